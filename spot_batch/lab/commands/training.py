"""`train corpus` and `train target`: how the bundled targets come to be."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spot_batch.lab.bench.grids import read_temperatures
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import check_writable

if TYPE_CHECKING:
    from spot_batch.lab.bundled.sources import ExtraSource


@plain_errors
def corpus(
    output: Annotated[Path, typer.Argument(help="The JSON-lines file to write.")],
    count: Annotated[int, typer.Option(min=1, help="How many distinct questions.")] = 1000,
    split: Annotated[Literal["train", "held-out"], typer.Option(help="Which side.")] = "train",
    seed: Annotated[int, typer.Option(help="Of the corpus.")] = 0,
    temperatures: Annotated[
        str | None, typer.Option(help="By comma: a column of them in turn, for `trajectories`.")
    ] = None,
) -> None:
    """Write questions of the bundled target's synthetic corpus, with their answers."""
    from spot_batch.lab.bundled.corpus import write_prompts

    check_writable(output, "FILE")
    mixed = read_temperatures("--temperatures", temperatures) if temperatures is not None else []
    write_prompts(output, count=count, seed=seed, split=split, temperatures=mixed)
    typer.echo(f"{count:,} questions written to {output}")


@plain_errors
def target(
    run: Annotated[Path, typer.Argument(help="Checkpoints and logs; resumed if there.")],
    export: Annotated[
        Path | None, typer.Option(help="Write the model folder here at the end.")
    ] = None,
    recipe: Annotated[
        Literal["bundled", "small"], typer.Option(help="How large a target, how long a run.")
    ] = "bundled",
    block_length: Annotated[int, typer.Option(help="Positions of a block.")] = 32,
    extra: Annotated[
        list[str] | None,
        typer.Option(help="FILE=SHARE of the samples: GSM8K's or MBPP's train rows; repeatable."),
    ] = None,
    stop_at: Annotated[int | None, typer.Option(help="End at this step, to be resumed.")] = None,
    num_evaluated: Annotated[int, typer.Option(min=1, help="Held-out prompts at the end.")] = 240,
    gsm8k: Annotated[
        Path | None, typer.Option(help="Score the model on this GSM8K file, too.")
    ] = None,
    gsm8k_limit: Annotated[int, typer.Option(min=1, help="Only its first questions.")] = 100,
) -> None:
    """Train a target from nothing, by default the bundled one; an interrupted run goes on.

    With glibc a step is several times faster when freed memory is kept: set MALLOC_MMAP_MAX_=0,
    MALLOC_TRIM_THRESHOLD_=100000000000 and MALLOC_TOP_PAD_=268435456 for the process.
    """
    from spot_batch.lab.bundled.corpus import held_out_problems
    from spot_batch.lab.bundled.curve import plot_losses
    from spot_batch.lab.bundled.gsm8k import gsm8k_figures, read_gsm8k
    from spot_batch.lab.bundled.model_folder import (
        evaluate_checkpoint,
        gsm8k_note,
        write_model_folder,
    )
    from spot_batch.lab.bundled.target import RECIPES, newest_checkpoint, train_target

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    extras = tuple(extra_source(text) for text in extra or ())
    for folder in (run, export):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder}: is no folder")
    if gsm8k is not None:
        read_gsm8k(gsm8k, limit=gsm8k_limit)  # before an hour is spent, not after
    settings = RECIPES[recipe](block_length, extras)
    train_target(settings, run, stop_at=stop_at)
    plot_losses(run, run / "losses.png")
    if export is None:
        return
    checkpoint = newest_checkpoint(run)
    problems = list(held_out_problems(num_evaluated, seed=settings.seed))
    figures = evaluate_checkpoint(checkpoint, problems, settings=settings)
    command = f"spot-batch train target RUN --recipe {recipe} --block-length {block_length} "
    command += "".join(f"--extra {Path(source.path).name}={source.share:g} " for source in extras)
    command += "--export FOLDER"
    write_model_folder(checkpoint, export, settings=settings, command=command, figures=figures)
    typer.echo(f"{export} written: {figures}")
    if gsm8k is not None:
        scores = gsm8k_figures(export, gsm8k, limit=gsm8k_limit)
        gsm8k_note(export, scores)
        typer.echo(f"{gsm8k}: {scores}")


def extra_source(text: str) -> ExtraSource:
    """FILE=SHARE. Raises ValueError naming what is wrong with it."""
    from spot_batch.lab.bundled.sources import ExtraSource

    path, _, share = text.rpartition("=")
    try:
        source = ExtraSource(path=Path(path), share=float(share))
    except ValueError:
        raise ValueError(f"--extra wants FILE=SHARE, got {text!r}") from None
    if not 0.0 < source.share < 1.0:
        raise ValueError(f"--extra {text}: a share lies between 0 and 1")
    if not source.path.is_file():
        raise ValueError(f"--extra {text}: there is no file {source.path}")
    return source
