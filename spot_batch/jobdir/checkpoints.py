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
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

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
        self._read: dict[str, Mapping[int, Begun]] = {}

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

    def find(self, sample_ids: Sequence[int]) -> dict[int, Begun]:
        """The most that anybody had decoded of these samples, where it is known."""
        names = [path.name for path in sorted(self._job.checkpoints.glob("*.arrow"))]
        self._read = {name: self._read.get(name) or self._file(name) for name in names}
        found: dict[int, Begun] = {}
        for held in self._read.values():
            for sample_id in sample_ids:
                begun = held.get(sample_id)
                if begun is not None and (
                    sample_id not in found or len(begun.token_ids) > len(found[sample_id].token_ids)
                ):
                    found[sample_id] = begun
        return found

    def _file(self, name: str) -> Mapping[int, Begun]:
        match = _NAME.fullmatch(name)
        try:
            data = (self._job.checkpoints / name).read_bytes()
        except FileNotFoundError:  # its owner wrote the next one
            return {}
        if match is None or hashlib.sha256(data).hexdigest()[:32] != match[1]:
            logger.warning("%s: torn or altered; ignored", name)
            return {}
        with pa.ipc.open_file(data) as reader:
            table = reader.read_all()
        if (table.schema.metadata or {}).get(b"fingerprint") != self._job.fingerprint.encode():
            logger.warning("%s: of another job; ignored", name)
            return {}
        return {
            row["sample_id"]: Begun(
                token_ids=tuple(row["token_ids"]),
                commit_step=tuple(row["commit_step"]),
                num_steps=row["num_steps"],
                stats=SampleStats(**{name: row[name] for name in _STATS}),
            )
            for row in table.to_pylist()
        }


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
