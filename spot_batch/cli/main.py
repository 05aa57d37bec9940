"""The command line, whole: every command registers itself on being imported."""

from spot_batch.cli import drafters, export, replay, targets, training
from spot_batch.cli.app import app
from spot_batch.lab.commands import comparing, foreign, scoring
from spot_batch.lab.commands import training as bundled
from spot_batch.lab.commands.bench import bench

app.add_typer(bench, name="bench")
training.train.command("corpus")(bundled.corpus)
training.train.command("target")(bundled.target)
drafters.drafters.command("inspect")(foreign.inspect)
drafters.drafters.command("import")(foreign.import_drafter)
drafters.calibrate.command("spiffy")(comparing.spiffy)

__all__ = ["app", "comparing", "drafters", "export", "replay", "scoring", "targets", "training"]
