"""The audits: samples decoded a second time, draft-free, against what was published of them.

Both are read in order of sample id, part by part and a batch at a time, so that the check of a
large job takes no more memory than that of a small one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.scan import read_part
from spot_batch.jobdir.schema import COMPARED, ERROR, SAMPLE_ID
from spot_batch.jobdir.segments import BadSegment, ids_named, list_segments, read_segment
from spot_batch.records.results import CheckResult


class Compared(NamedTuple):
    """What the audits say, and the parts whose bytes were found to be those written on the way."""

    check: CheckResult
    verified: frozenset[int]


def compare_audits(job: JobDirectory) -> Compared:
    """Compares every audited sample that has a published completion, field by field.

    Audits that failed, and samples that ended in errors/, are not compared.
    """
    audits = _Audits(job)
    compared, differing = IntervalSet(), IntervalSet()
    verified: set[int] = set()
    for part in range(job.num_parts):
        again = audits.within(job.part_ids(part))
        if not again.num_rows:
            continue
        if read_part(job, part, verify=True) is None:  # damage is not a difference
            published = _of_segments(job, part)
        else:
            verified.add(part)
            published = _of_part(job, part)
        for rows in published:
            here = again.filter(pc.is_in(again[SAMPLE_ID], rows[SAMPLE_ID]))
            compared.add_many(here[SAMPLE_ID].to_pylist())
            differing.add_many(_differing(here, rows))
    return Compared(
        CheckResult(
            num_compared=len(compared), num_differed=len(differing), differing=tuple(differing)
        ),
        frozenset(verified),
    )


def incomparable_ids(job: JobDirectory) -> IntervalSet:
    """Samples that stand in errors/ so far, and those whose audit failed."""
    failed = IntervalSet()
    for part in range(job.num_parts):
        path = job.errors / job.part_name(part)
        if path.exists() and read_part(job, part) is not None:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all().select(["row_index", "sample_index"])
            n = job.spec.generation.n
            rows, samples = table["row_index"].to_pylist(), table["sample_index"].to_pylist()
            failed.add_many(row * n + sample for row, sample in zip(rows, samples, strict=True))
    for folder in (job.segments, job.audit):
        for path in list_segments(folder):
            batch = _segment(job, path, with_errors=True)
            if batch is not None:
                failed.add_many(batch.filter(batch[ERROR].is_valid())[SAMPLE_ID].to_pylist())
    return failed


class _Audits:
    """Completed audits in order of sample id; those of earlier parts are let go of."""

    def __init__(self, job: JobDirectory) -> None:
        self._job = job
        self._waiting = deque(list_segments(job.audit))
        self._open: list[tuple[range, pa.Table]] = []

    def within(self, ids: range) -> pa.Table:
        """The audits of a part, which stands behind those that were asked for before."""
        while self._waiting and ids_named(self._waiting[0]).start < ids.stop:
            path = self._waiting.popleft()
            batch = _segment(self._job, path)
            if batch is not None:
                done = batch.filter(batch[ERROR].is_null()).select([SAMPLE_ID, *COMPARED])
                table = pa.Table.from_batches([done]).replace_schema_metadata(None)
                self._open.append((ids_named(path), table))
        self._open = [each for each in self._open if each[0].stop > ids.start]
        if not self._open:
            return pa.table({SAMPLE_ID: pa.array([], pa.int64())})
        table = pa.concat_tables(table for _, table in self._open)
        numbers = table[SAMPLE_ID].to_numpy()
        return table.filter(pa.array((numbers >= ids.start) & (numbers < ids.stop)))


def _differing(audits: pa.Table, rows: pa.Table) -> list[int]:
    """The samples of which an audit is not the published row; `rows` has all of them."""
    names = rows.schema.names
    audits = audits.select(names).combine_chunks()
    published = rows.take(pc.index_in(audits[SAMPLE_ID], rows[SAMPLE_ID])).combine_chunks()
    if audits.equals(published):
        return []
    pairs = zip(audits.to_pylist(), published.to_pylist(), strict=True)
    return [one[SAMPLE_ID] for one, other in pairs if one != other]


def _of_part(job: JobDirectory, part: int) -> Iterator[pa.Table]:
    """Ids and compared columns of a published part, batch by batch; no other column is read."""
    prefix, n = job.spec.output.prefix, job.spec.generation.n
    names = [name for name in COMPARED if prefix + name in job.schema.names]
    wanted = [prefix + name for name in ("row_index", "sample_index", *names)]
    options = pa.ipc.IpcReadOptions(
        included_fields=sorted(job.schema.names.index(name) for name in wanted)
    )
    with pa.memory_map(str(job.data / job.part_name(part))) as source:
        reader = pa.ipc.open_file(source, options=options)
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            ids = batch[prefix + "row_index"].to_numpy() * n
            ids = ids + batch[prefix + "sample_index"].to_numpy()
            columns = {name: batch[prefix + name] for name in names}
            yield pa.table({SAMPLE_ID: np.asarray(ids, np.int64), **columns})


def _of_segments(job: JobDirectory, part: int) -> Iterator[pa.Table]:
    """The same of completions that are in no part yet, segment by segment."""
    prefix = job.spec.output.prefix
    names = [name for name in COMPARED if prefix + name in job.schema.names]
    for path in list_segments(job.segments, overlapping=job.part_ids(part)):
        batch = _segment(job, path)
        if batch is not None:
            done = batch.filter(batch[ERROR].is_null())
            columns = {name: done[prefix + name] for name in names}
            yield pa.table({SAMPLE_ID: done[SAMPLE_ID], **columns})


def _segment(job: JobDirectory, path: Path, *, with_errors: bool = False) -> pa.RecordBatch | None:
    """The rows of a segment; None where it does not count, or lacks the error rows asked for."""
    try:
        info, batch = read_segment(path, fingerprint=job.fingerprint, num_samples=job.num_samples)
    except (BadSegment, FileNotFoundError):  # `scan` has warned of it
        return None
    return batch if info.totals.num_errors or not with_errors else None
