"""The first check: audited samples, decoded again draft-free, against what was published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.scan import read_part
from spot_batch.jobdir.schema import ERROR, SAMPLE_ID
from spot_batch.jobdir.segments import BadSegment, list_segments, read_segment
from spot_batch.records.results import CheckResult

COMPARED = ("generation", "finish_reason", "token_ids", "commit_step")


def compare_audits(job: JobDirectory) -> CheckResult:
    """Compares every audited sample that has a published completion, field by field.

    Audits that failed, and samples that ended in errors/, are not compared.
    """
    audited: dict[int, list[dict[str, object]]] = {}
    for row in _segment_rows(job, audits=True):
        audited.setdefault(int(str(row[SAMPLE_ID])), []).append(row)
    compared, differing = set(), set()
    for sample_id, published in _published(job, sorted(audited)):
        compared.add(sample_id)
        for again in audited[sample_id]:
            if any(again[name] != value for name, value in published.items()):
                differing.add(sample_id)
    return CheckResult(
        num_compared=len(compared),
        num_differed=len(differing),
        differing=tuple(sorted(differing)),
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
        for batch in _segments(job, folder, with_errors=True):
            ids, errors = batch[SAMPLE_ID].to_pylist(), batch[ERROR].is_valid().to_pylist()
            failed.add_many(each for each, bad in zip(ids, errors, strict=True) if bad)
    return failed


def _published(job: JobDirectory, sample_ids: list[int]) -> Iterator[tuple[int, dict[str, object]]]:
    """(sample id, its compared columns) from parts, and from segments where no part is yet."""
    wanted: dict[int, set[int]] = {}
    for sample_id in sample_ids:
        wanted.setdefault(job.part_of(sample_id), set()).add(sample_id)
    loose: set[int] = set()
    for part, ids in wanted.items():
        if read_part(job, part, verify=True) is None:  # damage is not a difference
            loose |= ids
        else:
            yield from _from_part(job, part, ids)
    if loose:
        prefix = job.spec.output.prefix
        for row in _segment_rows(job, audits=False):
            sample_id = int(str(row[SAMPLE_ID]))
            if sample_id in loose:
                yield sample_id, {n: row[prefix + n] for n in COMPARED if prefix + n in row}


def _from_part(
    job: JobDirectory, part: int, ids: set[int]
) -> Iterator[tuple[int, dict[str, object]]]:
    prefix, n = job.spec.output.prefix, job.spec.generation.n
    names = [name for name in COMPARED if prefix + name in job.schema.names]
    with pa.memory_map(str(job.data / job.part_name(part))) as source:
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            rows = batch[prefix + "row_index"].to_pylist()
            samples = batch[prefix + "sample_index"].to_pylist()
            for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
                if row * n + sample in ids:
                    found = {name: batch[prefix + name][place].as_py() for name in names}
                    yield row * n + sample, found


def _segment_rows(job: JobDirectory, *, audits: bool) -> Iterator[dict[str, object]]:
    """The compared columns of every completion in the segments, or in the audits."""
    for batch in _segments(job, job.audit if audits else job.segments):
        prefix = "" if audits else job.spec.output.prefix
        names = [prefix + name for name in COMPARED if prefix + name in batch.schema.names]
        columns = [SAMPLE_ID, ERROR, *names]
        for row in batch.select(columns).to_pylist():
            if row[ERROR] is None:
                yield row


def _segments(
    job: JobDirectory, folder: Path, *, with_errors: bool = False
) -> Iterator[pa.RecordBatch]:
    """The segments that count; `with_errors` leaves out those without an error row."""
    for path in list_segments(folder):
        try:
            info, batch = read_segment(
                path, fingerprint=job.fingerprint, num_samples=job.num_samples
            )
        except (BadSegment, FileNotFoundError):  # `scan` has warned of it
            continue
        if not with_errors or info.totals.num_errors:
            yield batch
