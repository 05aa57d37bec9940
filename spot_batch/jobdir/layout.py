"""Where everything of a job stands: paths, and nothing that reads what is in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final


class Layout:
    """Every path of a job directory, which may not be there yet. Nothing of it changes."""

    def __init__(self, root: Path | str) -> None:
        self.root: Final = Path(os.path.abspath(root))
        # What people read.
        self.data: Final = self.root / "data"
        self.errors: Final = self.root / "errors"
        self.stats: Final = self.root / "stats"
        self.audit: Final = self.root / "audit"
        self.readme: Final = self.root / "README.md"
        self.summary_path: Final = self.root / "summary.json"
        self.success: Final = self.root / "_SUCCESS"
        # What the job is.
        self.spot: Final = self.root / "_spot"
        self.format_path: Final = self.spot / "format"
        self.spec_path: Final = self.spot / "spec.yaml"
        self.input_path: Final = self.spot / "input.json"
        self.input_index_path: Final = self.spot / "input-index.arrow"
        self.schema_path: Final = self.spot / "schema.arrow"
        self.fingerprint_path: Final = self.spot / "fingerprint.json"
        self.hub_input: Final = self.spot / "input"  # a hub dataset, as Parquet
        # How far it is, and who works at it.
        self.segments: Final = self.spot / "segments"
        self.checkpoints: Final = self.spot / "checkpoints"  # whole blocks of samples in flight
        self.retry: Final = self.spot / "retry"  # a marker for each part that is being revised
        self.tmp: Final = self.spot / "tmp"
        self.numerics_path: Final = self.spot / "numerics.json"
        self.driver_path: Final = self.spot / "driver.json"
        self.heartbeat_path: Final = self.spot / "heartbeat.json"
        self.events_path: Final = self.spot / "events.jsonl"

    @property
    def exists(self) -> bool:
        """Whether a job was created here: the last file of its creation is there."""
        return self.fingerprint_path.is_file()

    @property
    def is_complete(self) -> bool:
        return self.success.exists()
