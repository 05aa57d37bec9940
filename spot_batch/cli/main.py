"""The program: every command by its name, the service's and the laboratory's.

The commands on one job are in `job`, but for `export` and `replay`; those on packaged specs are in
`specs`, those of a group in the module of its name, those of `bench` in one module each. What needs
torch or ray is imported when a command runs.
"""

from __future__ import annotations

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


def _group(name: str, about: str) -> typer.Typer:
    found = typer.Typer(help=about, no_args_is_help=True)
    app.add_typer(found, name=name)
    return found


app.command("submit")(job.submit)
app.command("demo")(job.demo)
app.command("resume")(job.resume)
app.command("retry")(job.retry)
app.command("status")(job.status)
app.command("validate")(job.validate)
app.command("export")(export.export)
app.command("replay")(replay.replay)
app.command("init")(specs.init)
app.command("jobs")(specs.jobs)
app.command("trajectories")(training.trajectories)

_targets = _group("targets", "Targets: which there are, what one is.")
_targets.command("list")(targets.list_targets)
_targets.command("check")(targets.check)

_drafters = _group("drafters", "Drafters: which there are, what a file is, taking one over.")
_drafters.command("list")(drafters.list_drafters)
_drafters.command("inspect")(foreign.inspect)
_drafters.command("import")(foreign.import_drafter)

_train = _group("train", "Train targets and drafters.")
_train.command("drafter")(training.drafter)
_train.command("corpus")(bundled.corpus)
_train.command("target")(bundled.target)

_calibrate = _group("calibrate", "Calibrate drafters.")
_calibrate.command("masses")(drafters.masses)
_calibrate.command("spiffy")(calibrating.spiffy)

_bench = _group("bench", "Measurements that anyone can run.")
_bench.command("exact")(exact.exact)
_bench.command("latency")(latency.latency)
_bench.command("throughput")(throughput.throughput)
_bench.command("simulate")(simulate.simulate)
_bench.command("occupancy")(occupancy.occupancy)
_bench.command("store")(store.store)
_bench.command("nfe")(nfe.nfe)
_bench.command("commit-order")(commit_order.commit_order)
_bench.command("scores")(scores.scores)
_bench.command("prompts")(prompts.prompts)
