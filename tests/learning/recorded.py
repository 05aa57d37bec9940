"""Recorded jobs on small random targets, for what learns from trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spot_batch.drafters.order import OrderConfig
from tests.service.jobs import run_here, small_spec, write_rows

WIDTH = 8
SMALL = OrderConfig(block_length=WIDTH, num_layers=1, hidden_size=32, num_heads=2)
HEATS = (0.0, 0.5, 1.0, 1.5)


def record(
    folder: Path, target: Path, *, num_rows: int = 12, overrides: Mapping[str, object] | None = None
) -> Path:
    """A job that records every state, over rows of all temperatures; its directory."""
    rows = [
        {"question": f"What is {n} plus {n}?", "temperature": HEATS[n % 4]} for n in range(num_rows)
    ]
    asked = {
        "model.target": str(target),
        "generation.max_new_tokens": 32,
        "generation.per_row": ["temperature"],
        "output.include": ["token_ids", "commit_step", "usage", "trajectory"],
        "output.trajectory_every": 1,
        **(overrides or {}),
    }
    return run_here(folder / "out", small_spec(write_rows(folder, rows), asked)).root
