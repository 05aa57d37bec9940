"""What `status` and `logs` read: the last heartbeat, and one line an event."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from spot_batch.jobdir.files import speaking_plainly, write_atomically
from spot_batch.jobdir.layout import Layout
from spot_batch.records.progress import ActorLoading, Heartbeat, LoadProgress, SilentActor


def write_heartbeat(job: Layout, heartbeat: Heartbeat) -> None:
    """Replaces the last heartbeat, stamped with the time unless it has one."""
    stamped = heartbeat if heartbeat.time else replace(heartbeat, time=time.time())
    write_atomically(job.heartbeat_path, json.dumps(asdict(stamped)).encode(), tmp=job.tmp)


def read_heartbeat(job: Layout) -> Heartbeat | None:
    try:
        tree = json.loads(job.heartbeat_path.read_text())
        loading = tuple(
            ActorLoading(each["actor"], LoadProgress(**each["progress"]))
            for each in tree.pop("loading", ())
        )
        silent = tuple(SilentActor(**each) for each in tree.pop("silent", ()))
        return Heartbeat(**tree, loading=loading, silent=silent)
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError):
        return None


def append_event(job: Layout, kind: str, **facts: str | int | float | bool | None) -> None:
    """Appends one line, whole: several processes may write at once."""
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, **facts}) + "\n"
    with speaking_plainly(job.events_path):
        handle = os.open(job.events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)


def read_events(job: Layout) -> Iterator[dict[str, object]]:
    """Events in order; a line that a crash cut short is left out."""
    if not job.events_path.exists():
        return
    with job.events_path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
