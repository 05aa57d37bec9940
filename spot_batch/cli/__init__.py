"""The command line: parse, load the spec, call one function. Heavy imports stay in commands."""

from spot_batch.cli import bench, drafters, export, replay, targets, training
from spot_batch.cli.app import app

__all__ = ["app", "bench", "drafters", "export", "replay", "targets", "training"]
