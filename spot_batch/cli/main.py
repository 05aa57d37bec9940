"""The command line, whole: every command registers itself on being imported."""

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
