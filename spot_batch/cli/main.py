"""The command line, whole: the service's commands, and those of the laboratory."""

import typer

from spot_batch.cli import drafters, export, replay, targets, training
from spot_batch.cli.app import app
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

bench = typer.Typer(help="Measurements that anyone can run.", no_args_is_help=True)
app.add_typer(bench, name="bench")
bench.command("exact")(exact.exact)
bench.command("latency")(latency.latency)
bench.command("throughput")(throughput.throughput)
bench.command("simulate")(simulate.simulate)
bench.command("occupancy")(occupancy.occupancy)
bench.command("store")(store.store)
bench.command("nfe")(nfe.nfe)
bench.command("commit-order")(commit_order.commit_order)
bench.command("scores")(scores.scores)
bench.command("prompts")(prompts.prompts)
training.train.command("corpus")(bundled.corpus)
training.train.command("target")(bundled.target)
drafters.drafters.command("inspect")(foreign.inspect)
drafters.drafters.command("import")(foreign.import_drafter)
drafters.calibrate.command("spiffy")(calibrating.spiffy)

__all__ = ["app", "export", "replay", "targets"]
