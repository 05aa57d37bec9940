"""`drafters` and `calibrate`: which drafters there are, what a file is, how to take one over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spot_batch.cli.app import Json, Seed, app, speaking_plainly
from spot_batch.cli.measuring import check_writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spot_batch.lab.foreign.files import ForeignFile, Looks
    from spot_batch.learning.trajectories import Trajectories

drafters = typer.Typer(
    help="Drafters: which there are, what a file is, taking one over.", no_args_is_help=True
)
calibrate = typer.Typer(help="Calibrate drafters.", no_args_is_help=True)
app.add_typer(drafters, name="drafters")
app.add_typer(calibrate, name="calibrate")

_MAX_BYTES = 2_000_000_000
_NUM_TRIED = 2_048  # states that a drafter to be taken over is calibrated on, and as many to try it

File = Annotated[Path, typer.Argument(help="A .safetensors, .pt, .pth or .bin file.")]
MaxBytes = Annotated[int, typer.Option(help="Refuse larger files, packed or unpacked.")]


@drafters.command("list")
@speaking_plainly
def list_drafters(as_json: Json = False) -> None:
    """The packaged drafters, and how they do on held-out prompts."""
    from spot_batch.cli.screen import Screen
    from spot_batch.drafters.registry import packaged_drafters

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


@drafters.command("inspect")
@speaking_plainly
def inspect(
    path: File,
    write_map: Annotated[
        Path | None, typer.Option(help="Write a map to complete by hand, for `drafters import`.")
    ] = None,
    max_bytes: MaxBytes = _MAX_BYTES,
    as_json: Json = False,
) -> None:
    """What a file of unknown origin holds and looks like. Nothing in it is run."""
    from spot_batch.lab.foreign.files import looks_like, open_foreign
    from spot_batch.lab.foreign.mapping import starter_map

    file = open_foreign(path, max_bytes=max_bytes)
    looks = looks_like(file)
    if write_map is not None:
        with write_map.open("x", encoding="utf-8") as out:
            out.write(starter_map(file))
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(path),
                    "format": file.format,
                    **asdict(looks),
                    "metadata": dict(file.metadata),
                    "tensors": [
                        {**asdict(each), "num_parameters": each.num_parameters}
                        for each in file.tensors
                    ],
                }
            )
        )
    else:
        _show(file, looks)
        if write_map is not None:
            typer.echo(f"{write_map} written; complete it, then: spot-batch drafters import")


def _show(file: ForeignFile, looks: Looks) -> None:
    from spot_batch.cli.screen import Screen

    screen = Screen()
    width = max((len(each.name) for each in file.tensors), default=0)
    for each in file.tensors:
        screen.line(
            f"{_one_line(each.name):<{width}}  {each.dtype:<9} {each.num_parameters:>12,}  "
            f"{list(each.shape)}"
        )
    known = {
        "layers": looks.num_layers,
        "width": looks.hidden_size,
        "feed-forward": looks.feed_forward,
        "features": looks.num_features,
        "block length": looks.block_length,
        "like a vocabulary": ", ".join(looks.vocabulary) or None,
    }
    facts = [
        ("format", file.format),
        ("tensors", f"{len(file.tensors):,} of {looks.num_parameters:,} parameters"),
        ("kind", looks.kind),
        *((name, _one_line(str(value))) for name, value in known.items() if value is not None),
        ("loads as it is", f"no: {looks.refusal}" if looks.refusal else "yes"),
    ]
    if file.metadata:
        said = (f"{_one_line(name)}: {_one_line(text)}" for name, text in file.metadata.items())
        facts.append(("metadata", "\n".join(said)))
    screen.facts(facts)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


@drafters.command("import")
@speaking_plainly
def import_drafter(
    path: File,
    map_file: Annotated[Path, typer.Option("--map", help="Which tensor is which: YAML or JSON.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="PATH.safetensors, PATH.json.")],
    jobs: Annotated[
        list[str], typer.Option("--jobs", help="`trajectories` jobs to try it on; repeatable.")
    ],
    min_accuracy: Annotated[
        float | None,
        typer.Option(help="Least next-commit accuracy; that of stale confidence if not given."),
    ] = None,
    max_bytes: MaxBytes = _MAX_BYTES,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Take over an order drafter from somebody else's file, if it guesses well enough.

    Half of the prompts of the jobs calibrate it, the other half are what it is tried on.
    """
    import torch

    from spot_batch.drafters.order import bare_path, card_file, save_order
    from spot_batch.lab.foreign.files import open_foreign
    from spot_batch.lab.foreign.mapping import assemble, read_map
    from spot_batch.learning.calibration import fit_calibration
    from spot_batch.learning.drafter import made_from
    from spot_batch.learning.figures import measure, tables
    from spot_batch.learning.queries import DepthLaw
    from spot_batch.learning.trajectories import load_trajectories

    check_writable(card_file(bare_path(output)), "--output", makes_folders=True)
    plan = read_map(map_file)
    model = assemble(open_foreign(path, max_bytes=max_bytes), plan)
    states = load_trajectories(jobs)
    if states.block_length != plan.config.block_length:
        raise ValueError(
            f"the trajectories are of block length {states.block_length}, "
            f"the map's is {plan.config.block_length}"
        )
    number = seed or 0
    for_fit, for_figures = (half.some(_NUM_TRIED, seed=number) for half in _halves(states))
    calibration = fit_calibration(model, for_fit)
    with torch.inference_mode():
        held_out = measure(model, calibration, for_figures, law=DepthLaw(), seed=number)
    overall = held_out.overall
    least = overall.stale_confidence if min_accuracy is None else min_accuracy
    accepted = overall.next_commit >= least
    if accepted:
        card = {
            "name": bare_path(output).name,
            **made_from(states),
            "imported_from": path.name,
            "held_out": held_out.tree(),
        }
        save_order(model, bare_path(output), card, calibration=calibration)
    figures = held_out.tree()
    document = json.dumps({"accepted": accepted, "min_accuracy": least, "figures": figures})
    typer.echo(document if as_json else tables(held_out), err=not accepted)
    if not accepted:
        raise ValueError(
            f"{path}: not taken over: next-commit accuracy {overall.next_commit:.3f} on held-out "
            f"prompts, want {least:.3f}"
            + ("" if min_accuracy is not None else ", that of stale confidence")
        )
    if not as_json:
        typer.echo(f"\n{bare_path(output)}.safetensors and .json written")


@calibrate.command("masses")
@speaking_plainly
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
    from spot_batch.learning.calibration import (
        MAX_STATES,
        compare,
        comparison_table,
        fit_calibration,
    )
    from spot_batch.learning.drafter import made_from, unseen
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
    for_fit, for_figures = _halves(states)
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


def _halves(states: Trajectories) -> tuple[Trajectories, Trajectories]:
    """Prompts to fit on and prompts to measure on. Raises ValueError where there is only one."""
    for_fit, for_figures = states.halves()
    if not len(for_fit):
        raise ValueError("the trajectories are of one prompt; record more: half are for the fit")
    return for_fit, for_figures
