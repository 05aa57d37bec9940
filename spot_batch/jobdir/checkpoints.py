"""Whole blocks of samples in flight: what an actor that dies need not have decoded in vain.

A file holds all of an actor's samples at one moment, under a name made of its content; the next one
takes its place. It is a hint and never a commit: without it a sample is decoded from its beginning,
to the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import publish_bytes
from spot_batch.records.results import Begun, SampleStats

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{16}-([0-9a-f]{32})\.arrow")
_STATS = tuple(SampleStats.__slots__)
_SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("commit_step", pa.list_(pa.int16())),
        ("num_steps", pa.int32()),
        *((name, pa.int64()) for name in _STATS),
    ]
)


class Checkpoints:
    """The checkpoints of a job: one file of this owner's, and everybody's to go on from."""

    def __init__(self, job: JobDirectory) -> None:
        self._job = job
        self._owner = secrets.token_hex(8)
        self._mine: Path | None = None

    def write(self, begun: Mapping[int, Begun]) -> None:
        """Replaces this owner's file; nothing begun leaves none."""
        before, self._mine = self._mine, None
        if begun:
            data = _as_file(begun, self._job.fingerprint)
            name = f"{self._owner}-{hashlib.sha256(data).hexdigest()[:32]}.arrow"
            self._mine = self._job.checkpoints / name
            publish_bytes(data, self._mine, tmp=self._job.tmp)
            self._job.reach("checkpoint.published")
        if before is not None and before != self._mine:
            before.unlink(missing_ok=True)

    def known_ids(self) -> set[int]:
        """The samples of which anybody has left whole blocks behind."""
        return {
            sample_id for table in self._tables() for sample_id in table["sample_id"].to_pylist()
        }

    def find(self, sample_ids: Sequence[int]) -> dict[int, Begun]:
        """The most that anybody had decoded of these samples, where it is known."""
        found: dict[int, Begun] = {}
        for table in self._tables() if sample_ids else ():
            wanted = pc.is_in(table["sample_id"], pa.array(sample_ids, pa.int64()))
            for row in table.filter(wanted).to_pylist():
                sample_id = row["sample_id"]
                best = found.get(sample_id)
                if best is None or len(row["token_ids"]) > len(best.token_ids):
                    found[sample_id] = _begun(row)
        return found

    def _tables(self) -> Iterator[pa.Table]:
        """The files of the job that count, those of this owner included."""
        for path in sorted(self._job.checkpoints.glob("*.arrow")):
            match = _NAME.fullmatch(path.name)
            try:
                data = path.read_bytes()
            except FileNotFoundError:  # its owner wrote the next one
                continue
            if match is None or hashlib.sha256(data).hexdigest()[:32] != match[1]:
                logger.warning("%s: torn or altered; ignored", path.name)
                continue
            with pa.ipc.open_file(data) as reader:
                table = reader.read_all()
            if (table.schema.metadata or {}).get(b"fingerprint") != self._job.fingerprint.encode():
                logger.warning("%s: of another job; ignored", path.name)
                continue
            yield table


def _begun(row: Mapping[str, Any]) -> Begun:
    return Begun(
        token_ids=tuple(row["token_ids"]),
        commit_step=tuple(row["commit_step"]),
        num_steps=row["num_steps"],
        stats=SampleStats(**{name: row[name] for name in _STATS}),
    )


def _as_file(begun: Mapping[int, Begun], fingerprint: str) -> bytes:
    columns: dict[str, list[object]] = {
        "sample_id": list(begun),
        "token_ids": [each.token_ids for each in begun.values()],
        "commit_step": [each.commit_step for each in begun.values()],
        "num_steps": [each.num_steps for each in begun.values()],
    }
    for name in _STATS:
        columns[name] = [getattr(each.stats, name) for each in begun.values()]
    schema = _SCHEMA.with_metadata({"fingerprint": fingerprint})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return bytes(sink.getvalue())
