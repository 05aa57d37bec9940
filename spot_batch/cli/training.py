"""`trajectories` and `train`: how a target and a drafter come to be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spot_batch.cli.app import (
    Actors,
    Input,
    Json,
    Limit,
    MaxNewTokens,
    Model,
    Output,
    Prompt,
    Seed,
    Sets,
    Temperature,
    app,
    compose,
    speaking_plainly,
)
from spot_batch.cli.measuring import check_writable, temperatures_of

if TYPE_CHECKING:
    from spot_batch.lab.bundled.sources import ExtraSource

train = typer.Typer(help="Train targets and drafters.", no_args_is_help=True)
app.add_typer(train, name="train")

STATE_BYTES = 6  # of an entry of a stale distribution: a float16 and an int32


@app.command()
@speaking_plainly
def trajectories(
    spec: Annotated[
        str | None, typer.Argument(help="A YAML file or a packaged spec's name; none is needed.")
    ] = None,
    inputs: Input = None,
    output: Output = None,
    model: Model = None,
    prompt: Prompt = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = None,
    sets: Sets = None,
    limit: Limit = None,
    actors: Actors = None,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Keep every state, not one in four.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Run a job that also records what the target saw and committed, for `train drafter`."""
    from spot_batch.cli import running
    from spot_batch.service.assemble import model_info

    loaded, out = compose(
        spec,
        inputs=inputs,
        sets=sets,
        values={
            "output.path": str(output) if output is not None else None,
            "output.include": ["token_ids", "commit_step", "usage", "trajectory"],
            "output.trajectory_every": 1 if every_step else None,
            "model.target": model,
            "input.prompt": prompt,
            "input.limit": limit,
            "generation.temperature": temperature,
            "generation.max_new_tokens": max_new_tokens,
            "generation.seed": seed,
            "generation.stop_at": "block",
            "resources.actors": actors,
        },
    )
    info = model_info(loaded)
    num_states = -(-loaded.generation.max_new_tokens // loaded.output.trajectory_every)
    num_bytes = num_states * info.block_length * min(32, info.vocab_size) * STATE_BYTES
    typer.echo(
        f"recording at most {num_states} states a sample, {num_bytes / 1e6:,.2f} MB "
        f"before compression; a thousand samples: {num_bytes / 1e6:,.2f} GB",
        err=True,
    )
    return running.submit(loaded, out, as_json=as_json)


@train.command("corpus")
@speaking_plainly
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
    mixed = temperatures_of(temperatures) if temperatures is not None else []
    write_prompts(output, count=count, seed=seed, split=split, temperatures=mixed)
    typer.echo(f"{count:,} questions written to {output}")


@train.command("target")
@speaking_plainly
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
    from spot_batch.lab.bundled.publication import evaluate_checkpoint, export_target, gsm8k_note
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
    export_target(checkpoint, export, settings=settings, command=command, figures=figures)
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


@train.command("drafter")
@speaking_plainly
def drafter(
    jobs: Annotated[list[str], typer.Argument(help="`trajectories` jobs, or their URLs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="PATH.safetensors, PATH.json.")],
    num_layers: Annotated[int, typer.Option(help="Of the order model.")] = 3,
    hidden_size: Annotated[int, typer.Option(help="Of the order model.")] = 128,
    num_heads: Annotated[int, typer.Option(help="Of the order model.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3000,
    batch: Annotated[int, typer.Option(help="Queries a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="At the peak.")] = 1e-3,
    held_out: Annotated[float, typer.Option(help="Share of the prompts kept for figures.")] = 0.1,
    seed: Seed = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all.")] = None,
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Of the products; auto is bfloat16 where the device has it."),
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    as_json: Json = False,
) -> None:
    """Train an order drafter (SPOT) on recorded trajectories, calibrate it, say how good it is.

    Half of the prompts that are held out calibrate it; the figures are of the other half.
    """
    import torch

    from spot_batch.drafters.order import OrderConfig, bare_path, card_file, save_order
    from spot_batch.learning.drafter import (
        DrafterSettings,
        best_precision,
        drafter_card,
        train_drafter,
    )
    from spot_batch.learning.figures import tables
    from spot_batch.learning.trajectories import load_trajectories
    from spot_batch.models.device import choose_device

    path = bare_path(output)
    check_writable(card_file(path), "--output", makes_folders=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(device).type
    states = load_trajectories(jobs)
    settings = DrafterSettings(
        config=OrderConfig(
            block_length=states.block_length,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
        ),
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        held_out=held_out,
        seed=seed or 0,
        precision=best_precision(device) if precision == "auto" else precision,
    )
    trained = train_drafter(states, settings, device=device)
    card = drafter_card(path.name, states, settings, trained)
    save_order(trained.model.cpu(), path, card, calibration=trained.calibration)
    if as_json:
        print(json.dumps({"path": str(path), "figures": trained.held_out.tree()}))
    else:
        print(tables(trained.held_out))
        print(f"\n{path}.safetensors and {path}.json written")
