"""The command line: parse, load the spec, call one function. Heavy imports stay in commands."""

from spot_batch.cli import bench, comparing, drafters, export, replay, scoring, targets, training
from spot_batch.cli.app import app

__all__ = [
    "app",
    "bench",
    "comparing",
    "drafters",
    "export",
    "replay",
    "scoring",
    "targets",
    "training",
]
