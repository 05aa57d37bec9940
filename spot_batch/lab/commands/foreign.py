"""`drafters inspect` and `drafters import`: what a file of unknown origin is, taking one over."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Seed, check_writable

if TYPE_CHECKING:
    from spot_batch.lab.foreign.files import ForeignFile, Looks

_MAX_BYTES = 2_000_000_000
_NUM_TRIED = 2_048  # states that a drafter to be taken over is calibrated on, and as many to try it

File = Annotated[Path, typer.Argument(help="A .safetensors, .pt, .pth or .bin file.")]
MaxBytes = Annotated[int, typer.Option(help="Refuse larger files, packed or unpacked.")]


@plain_errors
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
    from spot_batch.terminal.screen import Screen

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


@plain_errors
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
    from spot_batch.learning.calibration import fit_calibration, halves_for_fit
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
    for_fit, for_figures = (half.some(_NUM_TRIED, seed=number) for half in halves_for_fit(states))
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
