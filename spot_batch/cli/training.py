"""`trajectories` and `train`: how a target and a drafter come to be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from spot_batch.cli.spec_flags import RECORDED, Asked, of_spec
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Seed, check_writable

STATE_BYTES = 6  # of an entry of a stale distribution: a float16 and an int32


@plain_errors
@of_spec(*RECORDED)
def trajectories(
    asked: Asked,
    every_step: Annotated[
        bool, typer.Option("--every-step", help="Keep every state, not one in four.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Run a job that also records what the target saw and committed, for `train drafter`."""
    from spot_batch.cli import running
    from spot_batch.service.assemble import model_info

    spec = asked.load(
        output__include=["token_ids", "commit_step", "usage", "trajectory"],
        generation__stop_at="block",
        **({"output__trajectory_every": 1} if every_step else {}),
    )
    info = model_info(spec)
    num_states = -(-spec.generation.max_new_tokens // spec.output.trajectory_every)
    num_bytes = num_states * info.block_length * min(32, info.vocab_size) * STATE_BYTES
    typer.echo(
        f"recording at most {num_states} states a sample, {num_bytes / 1e6:,.2f} MB "
        f"before compression; a thousand samples: {num_bytes / 1e6:,.2f} GB",
        err=True,
    )
    return running.run_or_follow(running.new_job(spec), as_json=as_json)


@plain_errors
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
