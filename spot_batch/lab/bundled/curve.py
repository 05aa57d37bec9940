"""The loss curve of a run as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from spot_batch.lab.bundled.target import read_rows

SMOOTHED_STEPS = 20


def plot_losses(run: Path, picture: Path) -> None:
    """Draw losses.jsonl, one line an objective and block length, each smoothed."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in read_rows(run / "losses.jsonl"):
        width = row["block_length"]
        label = "causal, next token" if width is None else f"block diffusion, W = {width}"
        series.setdefault(label, []).append((row["step"], row["loss"]))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, points in series.items():
        steps, losses = np.array(points).T
        window = min(SMOOTHED_STEPS, len(losses))
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], smooth, label=label, linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a learnt token")
    axes.legend()
    figure.savefig(picture, dpi=120)
