"""`trajectories`, `train` and `drafters`: how a drafter comes to be."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

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

train = typer.Typer(help="Train targets and drafters.", no_args_is_help=True)
drafters = typer.Typer(help="Drafters: which there are, what a file is.", no_args_is_help=True)
app.add_typer(train, name="train")
app.add_typer(drafters, name="drafters")

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
    from spot_batch.actor import model_info
    from spot_batch.cli import running

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
    count: Annotated[int, typer.Option(help="How many distinct questions.")] = 1000,
    split: Annotated[Literal["train", "held-out"], typer.Option(help="Which side.")] = "train",
    seed: Annotated[int, typer.Option(help="Of the corpus.")] = 0,
) -> None:
    """Write questions of the bundled target's synthetic corpus, with their answers."""
    from spot_batch.training.corpus import write_prompts

    write_prompts(output, count=count, seed=seed, split=split)
    typer.echo(f"{count:,} questions written to {output}")


@train.command("target")
@speaking_plainly
def target(
    run: Annotated[Path, typer.Argument(help="Checkpoints and logs; resumed if there.")],
    export: Annotated[
        Path | None, typer.Option(help="Write the model folder here at the end.")
    ] = None,
    stop_at: Annotated[int | None, typer.Option(help="End at this step, to be resumed.")] = None,
    num_evaluated: Annotated[int, typer.Option(help="Held-out prompts at the end.")] = 240,
) -> None:
    """Train the bundled target from nothing: about an hour on two cores.

    With glibc a step is several times faster when freed memory is kept: set MALLOC_MMAP_MAX_=0,
    MALLOC_TRIM_THRESHOLD_=100000000000 and MALLOC_TOP_PAD_=268435456 for the process.
    """
    from spot_batch.training.corpus import held_out_problems
    from spot_batch.training.curve import plot_losses
    from spot_batch.training.export import evaluate_checkpoint, export_target
    from spot_batch.training.target import default_settings, newest_checkpoint, train_target

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = default_settings()
    train_target(settings, run, stop_at=stop_at)
    plot_losses(run, run / "losses.png")
    if export is None:
        return
    checkpoint = newest_checkpoint(run)
    problems = list(held_out_problems(num_evaluated, seed=settings.seed))
    figures = evaluate_checkpoint(checkpoint, problems, settings=settings)
    command = "spot-batch train target RUN --export FOLDER"
    export_target(checkpoint, export, settings=settings, command=command, figures=figures)
    typer.echo(f"{export} written: {figures}")


@train.command("drafter")
@speaking_plainly
def drafter(
    jobs: Annotated[list[Path], typer.Argument(help="Directories of `trajectories` jobs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="PATH.safetensors, PATH.json.")],
    num_layers: Annotated[int, typer.Option(help="Of the order model.")] = 3,
    hidden_size: Annotated[int, typer.Option(help="Of the order model.")] = 128,
    num_heads: Annotated[int, typer.Option(help="Of the order model.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 3000,
    batch: Annotated[int, typer.Option(help="Queries a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="At the peak.")] = 1e-3,
    held_out: Annotated[float, typer.Option(help="Share of the samples kept for figures.")] = 0.1,
    seed: Seed = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all.")] = None,
    as_json: Json = False,
) -> None:
    """Train an order drafter (SPOT) on recorded trajectories and say how good it is."""
    import torch

    from spot_batch.drafters.order import OrderConfig, save_order
    from spot_batch.training.drafter import (
        DrafterSettings,
        drafter_card,
        figures_table,
        train_drafter,
    )
    from spot_batch.training.trajectories import load_trajectories

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if threads is not None:
        torch.set_num_threads(threads)
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
    )
    model, figures = train_drafter(states, settings)
    card = drafter_card(output.stem, states, settings, figures)
    save_order(model, output, card)
    if as_json:
        print(json.dumps({"path": str(output), "figures": [asdict(one) for one in figures]}))
    else:
        print(figures_table(figures))
        print(f"{output}.safetensors and {output}.json written")


@drafters.command("list")
@speaking_plainly
def list_drafters(as_json: Json = False) -> None:
    """The packaged drafters."""
    from spot_batch.drafters.registry import packaged_drafters

    cards = packaged_drafters()
    if as_json:
        print(json.dumps(cards))
        return
    for card in cards:
        print(
            f"{card['name']:<20} {card['kind']}, block length {card['config']['block_length']}, "
            f"for {card.get('target', 'any target')}"
        )
