"""The program: every command by its name, the service's and the laboratory's.

The commands on one job are in `job`, but for `export` and `replay`; those on packaged specs are in
`specs`, those of a group in the module of its name, those of `bench` in one module each. What needs
torch or ray is imported when a command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from spot_batch.cli import drafters, export, job, replay, specs, targets, training
from spot_batch.lab.commands import calibrating, foreign
from spot_batch.lab.commands import training as bundled
from spot_batch.lab.commands.bench import (
    commit_order,
    exact,
    latency,
    nfe,
    occupancy,
    prompts,
    scores,
    simulate,
    store,
    throughput,
)

app = typer.Typer(
    name="spot-batch",
    help="Exact batch inference for block-diffusion language models: prompts in, Arrow out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from spot_batch.version import __version__

        print(__version__)
        raise typer.Exit


def _add(to: typer.Typer, *commands: Callable[..., object], **named: Callable[..., object]) -> None:
    """Adds commands, named as their functions are where no other name is given."""
    for each in commands:
        to.command(each.__name__.replace("_", "-"))(each)
    for name, each in named.items():
        to.command(name)(each)


def _group(name: str, about: str) -> typer.Typer:
    found = typer.Typer(help=about, no_args_is_help=True)
    app.add_typer(found, name=name)
    return found


_add(app, *(job.submit, job.demo, job.resume, job.retry, job.status, job.validate))
_add(app, *(export.export, replay.replay, specs.init, specs.jobs, training.trajectories))

_targets = _group("targets", "Targets: which there are, what one is.")
_add(_targets, targets.check, list=targets.list_targets)

_drafters = _group("drafters", "Drafters: which there are, what a file is, taking one over.")
_add(_drafters, foreign.inspect, list=drafters.list_drafters)
_add(_drafters, **{"import": foreign.import_drafter})

_train = _group("train", "Train targets and drafters.")
_add(_train, training.drafter, bundled.corpus, bundled.target)

_calibrate = _group("calibrate", "Calibrate drafters.")
_add(_calibrate, drafters.masses, calibrating.spiffy)

_bench = _group("bench", "Measurements that anyone can run.")
_add(_bench, *(exact.exact, latency.latency, throughput.throughput, simulate.simulate))
_add(_bench, *(occupancy.occupancy, store.store, nfe.nfe, commit_order.commit_order))
_add(_bench, scores.scores, prompts.prompts)
