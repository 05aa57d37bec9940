"""`drafters` and `calibrate`: which drafters there are, what a file is, how to take one over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Seed, check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping


@plain_errors
def list_drafters(as_json: Json = False) -> None:
    """The packaged drafters, and how they do on held-out prompts."""
    from spot_batch.drafters.registry import packaged_drafters
    from spot_batch.terminal.screen import Screen

    found = packaged_drafters()
    if as_json:
        cards = [{**each.card, "num_parameters": each.num_parameters} for each in found]
        print(json.dumps(cards))
        return
    screen = Screen()
    for each in found:
        card = each.card
        screen.line(
            f"{card.get('name', each.path.name):<20} {card['kind']}, {each.num_parameters:,} "
            f"parameters, block length {card['config'].get('block_length')}, "
            f"for {card.get('target', 'any target')}; {_summary(card)}"
        )


def _summary(card: Mapping[str, Any]) -> str:
    """A card's held-out figures in a few words."""
    try:
        first, error = card["held_out"]["by_depth"][0], card["held_out"]["overall"]["mass_error"]
        if "calibrated" in card:  # since those figures were taken
            error = card["calibrated"]["mass_errors"][0]["after"]
        return (
            f"next commit {first['next_commit']:.3f} at depth 1 (stale confidence "
            f"{first['stale_confidence']:.3f}), masses off by {error:.1f} %"
        )
    except (LookupError, TypeError, ValueError):
        return "no held-out figures"


@plain_errors
def masses(
    jobs: Annotated[list[str], typer.Argument(help="`trajectories` jobs, or their URLs.")],
    drafter: Annotated[str, typer.Option(help="A drafter's path, or a packaged one's name.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a copy; the drafter stays.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit how far a drafter's probabilities are trusted, on prompts it has not learned from.

    Half of them serve the fit, the errors are of the other half. No output depends on it.
    """
    import torch

    from spot_batch.drafters.order import (
        bare_path,
        card_file,
        load_order,
        read_card,
        save_order,
        write_card,
    )
    from spot_batch.drafters.registry import find_drafter
    from spot_batch.learning.calibration import MAX_STATES, fit_calibration, halves_for_fit
    from spot_batch.learning.drafter import made_from, unseen
    from spot_batch.learning.figures import compare, comparison_table
    from spot_batch.learning.trajectories import load_trajectories

    path = find_drafter(drafter)
    written = card_file(path if output is None else bare_path(output))
    check_writable(written, "--drafter" if output is None else "--output", makes_folders=True)
    card = read_card(path)
    states = load_trajectories(jobs)
    loaded = load_order(path, block_length=states.block_length, device=torch.device("cpu"))
    if card.get("target_weights") != states.source.weights:
        typer.echo(
            f"warning: the drafter was made for {card.get('target', 'an unknown target')}, these "
            f"are trajectories of {states.source.target}: its masses will be right for the latter",
            err=True,
        )
    states = unseen(states, card).some(2 * MAX_STATES, seed=seed or 0)
    for_fit, for_figures = halves_for_fit(states)
    calibration = fit_calibration(loaded.model, for_fit)
    errors = compare(loaded.model, loaded.calibration, calibration, for_figures)
    card |= {
        "calibration": asdict(calibration),
        "calibrated": {**made_from(states), "mass_errors": [asdict(each) for each in errors]},
    }
    if output is None:
        write_card(path, card)
    else:
        path = bare_path(output)
        save_order(loaded.model, path, {**card, "name": path.name}, calibration=calibration)
    if as_json:
        document = {
            "path": str(path),
            "calibration": asdict(calibration),
            "mass_errors": [asdict(each) for each in errors],
        }
        print(json.dumps(document))
    else:
        print(comparison_table(errors))
        print(f"\n{path}.json written")
