"""Retry: the error rows of a finished job again, each part republished whole as its next revision.

What a part keeps goes back into a segment first; then a marker says that the part no longer counts.
From there on the job is an ordinary one that lacks the retried samples: its actors make them, and
compaction writes the part anew over the old one, which readers see until then. The marker goes
last, so that a stop anywhere leaves a job that goes on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError, publish_bytes
from spot_batch.jobdir.scan import PartInfo, damaged, fault_of_parts, read_part, read_part_of
from spot_batch.jobdir.schema import ERROR, ERROR_STRUCT, SAMPLE_ID, STATS, STATS_STRUCT
from spot_batch.jobdir.schema import segment_schema as schema_of_segments
from spot_batch.jobdir.segments import BadSegment, list_segments, publish_rows, read_segment
from spot_batch.records.results import MACHINE_CODES, ROW_CODES

SEGMENT_ROWS = 8_192


def begin_retry(job: JobDirectory, codes: Collection[str] = ()) -> int:
    """Opens a complete job for its error rows of these codes; how many they are.

    Without codes it is all rows whose fault is not their own. Raises what `retried_parts` raises.
    The caller holds the driver's lock.
    """
    affected = retried_parts(job, codes)
    job.success.unlink(missing_ok=True)
    job.reach("retry.opened")
    _open_audits(job)
    job.reach("retry.audits")
    count = 0
    for part in affected:
        count += sum(n for code, n in part.totals.error_codes.items() if _is_retried(code, codes))
        for rows in _kept_rows(job, part, codes):
            publish_rows(job, rows, actor="retry")
        job.reach("retry.kept")
        marker = json.dumps({"revision": part.revision + 1}).encode()
        publish_bytes(marker, job.retry / part.name, tmp=job.tmp)
        job.reach("retry.marked")
    return count


def retried_parts(job: JobDirectory, codes: Collection[str] = ()) -> list[PartInfo]:
    """The parts with error rows that another try may mend, of these codes; changes nothing.

    OutputError where the job is not complete or a part is damaged, ValueError where there are no
    such rows, for a code that nobody knows, and for one of rows that would fail again.
    """
    if not job.is_complete:
        raise OutputError(f"{job.root}: not complete yet; `spot-batch resume` it first")
    fault = fault_of_parts(job)  # every byte: what a part keeps is republished as sound
    if fault is not None:
        raise damaged(job, fault)
    parts = [part for index in range(job.num_parts) if (part := read_part(job, index)) is not None]
    held = sorted({code for part in parts for code in part.totals.error_codes})
    there_are = f"codes there are: {', '.join(held) or 'none'}"
    for code in codes:
        if code in ROW_CODES:
            raise ValueError(
                f"--code: {code} is a fault of the row, which would fail again: "
                "mend the input, and run it as another job"
            )
        if code not in MACHINE_CODES and code not in held:
            raise ValueError(f"--code: no error code is named {code!r}; {there_are}")
    affected = [
        part for part in parts if any(_is_retried(each, codes) for each in part.totals.error_codes)
    ]
    if not affected:
        raise ValueError(f"{job.root}: no error rows that a retry could mend; {there_are}")
    return affected


def _open_audits(job: JobDirectory) -> None:
    """Takes away audits that failed and need not have: who decodes a sample again audits it too."""
    for path in list_segments(job.audit):
        try:
            info, batch = read_segment(
                path, fingerprint=job.fingerprint, num_samples=job.num_samples
            )
        except (BadSegment, FileNotFoundError):  # `scan` has warned of it
            continue
        if all(code in ROW_CODES for code in info.totals.error_codes):
            continue
        rows = pa.Table.from_batches([batch])
        codes = pc.struct_field(rows[ERROR].combine_chunks(), "code").to_pylist()
        kept = rows.filter(pa.array([code is None or code in ROW_CODES for code in codes]))
        if kept.num_rows:
            publish_rows(job, kept, purpose="audit", actor="retry")
        path.unlink(missing_ok=True)


def _is_retried(code: str, codes: Collection[str]) -> bool:
    return code in codes if codes else code not in ROW_CODES


def _kept_rows(job: JobDirectory, part: PartInfo, codes: Collection[str]) -> Iterator[pa.Table]:
    """What a part keeps, as rows of segments in order of sample id."""
    data, stats = read_part_of(job, "data", part.index), read_part_of(job, "stats", part.index)
    errors = read_part_of(job, "errors", part.index)
    assert data is not None, part.name
    assert stats is not None, part.name
    assert errors is not None, part.name
    is_error = stats["is_error"]
    struct = pa.StructArray.from_arrays(
        [stats[field.name].combine_chunks().cast(field.type) for field in STATS_STRUCT],
        fields=list(STATS_STRUCT),
    )
    done = data.append_column(ERROR, pa.nulls(data.num_rows, ERROR_STRUCT))
    done = done.append_column(STATS, struct.filter(pc.invert(is_error).combine_chunks()))
    failed = _error_table(job, errors).append_column(
        STATS, struct.filter(is_error.combine_chunks())
    )
    again = pa.array([_is_retried(each, codes) for each in errors["code"].to_pylist()], pa.bool_())
    failed = failed.filter(pc.invert(again))
    prefix, n = job.spec.output.prefix, job.spec.generation.n
    schema = schema_of_segments(job.schema)
    kept = [_with_ids(each, prefix, n).select(schema.names).cast(schema) for each in (done, failed)]
    rows = pa.concat_tables(kept).sort_by(SAMPLE_ID)
    for start in range(0, rows.num_rows, SEGMENT_ROWS):
        yield rows.slice(start, SEGMENT_ROWS)


def _error_table(job: JobDirectory, errors: pa.Table) -> pa.Table:
    """Error rows with the columns of data/, null but for what says which sample they are."""
    prefix = job.spec.output.prefix
    own = {prefix + name: errors[name] for name in ("custom_id", "row_index", "sample_index")}
    columns = [own.get(field.name, pa.nulls(errors.num_rows, field.type)) for field in job.schema]
    table = pa.table(columns, names=job.schema.names)
    struct = pa.StructArray.from_arrays(
        [errors[field.name].combine_chunks() for field in ERROR_STRUCT], fields=list(ERROR_STRUCT)
    )
    return table.append_column(ERROR, struct)


def _with_ids(table: pa.Table, prefix: str, n: int) -> pa.Table:
    samples = pc.add(
        pc.multiply(table[prefix + "row_index"], n), table[prefix + "sample_index"].cast(pa.int64())
    )
    return table.append_column(SAMPLE_ID, samples)
