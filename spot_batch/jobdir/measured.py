"""What the first actor of a kind measured, kept so that all others work by the same figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from spot_batch.jobdir.files import link_whole, staged, write_durably
from spot_batch.jobdir.layout import Layout


def claim_numerics(job: Layout, mine: Mapping[str, object]) -> dict[str, object]:
    """The arithmetic that the job was begun with: `mine` where this actor is the first.

    What comes back is for the actor to compare with its own.
    """
    stored = _first(job, job.numerics_path, json.dumps(mine, indent=2) + "\n")
    first: dict[str, object] = json.loads(stored)
    return first


def latency_path(job: Layout, of_what: Mapping[str, object]) -> Path:
    """Where the latency table of one kind of device, model and settings is."""
    digest = hashlib.sha256(json.dumps(of_what, sort_keys=True).encode()).hexdigest()
    return job.spot / f"latency-{digest[:16]}.json"


def read_latency(job: Layout, of_what: Mapping[str, object]) -> str | None:
    """The table that an actor on such a device has kept here."""
    path = latency_path(job, of_what)
    return path.read_text(encoding="utf-8") if path.exists() else None


def keep_latency(job: Layout, of_what: Mapping[str, object], table: str) -> str:
    """Keeps a table, unless another actor was first: that actor's table comes back then."""
    return _first(job, latency_path(job, of_what), table)


def _first(job: Layout, path: Path, mine: str) -> str:
    """What stands at `path` once `mine` has been offered to it."""
    with staged(job.tmp) as aside:
        write_durably(aside, mine.encode())
        link_whole(aside, path)
    return path.read_text(encoding="utf-8")
