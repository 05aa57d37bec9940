"""Compaction: segments become parts, whose bytes do not depend on how they were segmented.

Part k holds the sample ids [k R, (k+1) R) in order: completions in data/, errors in errors/, what
depends on scheduling in stats/. The statistics are published first and name the copy that was
taken of every sample. Whoever else compacts the same part takes the same copies, whatever segments
it had listed, so that a sample stands in data/ or in errors/ and never in both or neither.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import link_whole, replace_whole, sha256_of, speaking_plainly, staged
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.scan import (
    PART_KEY,
    UNREADABLE,
    PartFacts,
    PartInfo,
    count_rows,
    raise_unless_damaged,
    read_part,
)
from spot_batch.jobdir.schema import BATCH_ROWS, ERROR, ERROR_SCHEMA, SAMPLE_ID, STATS, STATS_SCHEMA
from spot_batch.jobdir.segments import (
    BadSegment,
    SegmentInfo,
    ids_named,
    list_segments,
    read_segment,
    segment_actor,
    totals_of,
)

logger = logging.getLogger(__name__)

_TRIES = 10  # each but the last is another compactor's doing

_Places = NDArray[np.int64]
"""(2, n): the segment of each sample among those read, and its row there."""


@dataclass(frozen=True, slots=True)
class _Segment:
    info: SegmentInfo
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which copy of each sample a part takes, in order of sample id."""

    sample_ids: list[int]
    segments: list[int]  # index into the segments read
    rows: list[int]
    failed: list[bool]

    def only(self, *, failed: bool) -> _Places:
        """Where the completions are, or the errors."""
        wanted = np.asarray(self.failed, np.bool_) == failed
        return self.all()[:, wanted]

    def all(self) -> _Places:
        return np.asarray([self.segments, self.rows], np.int64)


def compact(job: JobDirectory, part: int) -> PartInfo:
    """Publishes a part whose samples are all in segments; does nothing where it is published.

    ValueError where samples are missing. Safe beside actors and other compactors.
    """
    for _ in range(_TRIES):
        made = read_part(job, part) or _compacted(job, part)
        if made is not None:
            return made
    raise AssertionError(f"part {part} was published {_TRIES} times and does not count")


def _compacted(job: JobDirectory, part: int) -> PartInfo | None:
    """Publishes the part; None where another compactor came in between, and one must look again."""
    listed = list(list_segments(job.segments, overlapping=job.part_ids(part)))
    segments = list(_readable(job, listed))
    choice = _stored_choice(job, part, segments) or _first_choice(job, part, segments)
    if choice is None:
        if read_part(job, part) is not None:  # another compactor was first, and deleted segments
            return None
        raise ValueError(f"part {part} cannot be written: {_missing(job, part, segments)}")
    for folder in (job.data, job.stats, job.errors):
        if folder is not job.errors or any(choice.failed):
            folder.mkdir(exist_ok=True)
    name = job.part_name(part)
    with staged(job.tmp) as data_path, staged(job.tmp) as errors_path, staged(job.tmp) as stats:
        completions = _data_batches(job, segments, choice)
        _write_part(data_path, job.schema, completions, job.spec.output.compression)
        if any(choice.failed):
            _write_part(errors_path, *_error_rows(job, segments, choice), "zstd")
        _write_stats(job, name, stats, segments, choice, data_path, errors_path)
        job.reach("part.written")
        if not link_whole(stats, job.stats / name):
            theirs = _stored_choice(job, part, segments)
            if theirs != choice and (theirs is not None or _counts(job, part, listed)):
                return None  # another compactor's choice is the part's
            replace_whole(stats, job.stats / name)
        job.reach("part.stats")
        is_revised = (job.retry / name).exists()
        if any(choice.failed):
            _publish_part(errors_path, job.errors / name, None, is_revised=is_revised)
        else:  # of a damaged part that is made again, or of one whose errors were retried
            (job.errors / name).unlink(missing_ok=True)
        job.reach("part.errors")
        _publish_part(data_path, job.data / name, job.schema, is_revised=is_revised)
        job.reach("part.data")
        (job.retry / name).unlink(missing_ok=True)  # from here on the revision counts
    job.reach("part.published")
    return read_part(job, part)


def delete_covered_segments(job: JobDirectory, parts: Iterable[PartInfo]) -> int:
    """Deletes segments whose samples all stand in the given published parts; returns how many."""
    covered = IntervalSet(job.part_ids(part.index) for part in parts)
    count = 0
    for path in list_segments(job.segments):
        if covered.covers(ids_named(path)):
            path.unlink(missing_ok=True)
            job.reach("segment.deleted")
            count += 1
    return count


# -- which copy ------------------------------------------------------------------------------------


def _readable(job: JobDirectory, paths: Iterable[Path]) -> Iterator[_Segment]:
    for path in paths:
        try:
            info, batch = read_segment(
                path, fingerprint=job.fingerprint, num_samples=job.num_samples
            )
        except FileNotFoundError:
            continue
        except BadSegment as error:
            logger.warning("%s: ignored: %s", path.name, error)
            continue
        yield _Segment(info, batch)


def _first_choice(job: JobDirectory, part: int, segments: Sequence[_Segment]) -> _Choice | None:
    """One copy an id: a completion before an error, then by segment name."""
    ids = job.part_ids(part)
    tables = []
    for index, segment in enumerate(segments):  # in order of name
        batch = segment.batch
        tables.append(
            pa.table(
                {
                    "id": batch.column(SAMPLE_ID),
                    "failed": pc.is_valid(batch.column(ERROR)),
                    "segment": np.full(batch.num_rows, index, np.int32),
                    "row": np.arange(batch.num_rows, dtype=np.int32),
                }
            )
        )
    if not tables:
        return None if len(ids) else _Choice([], [], [], [])
    table = pa.concat_tables(tables)
    inside = pc.and_(
        pc.greater_equal(table["id"], ids.start),
        pc.less(table["id"], ids.stop),
    )
    table = table.filter(inside).sort_by(
        [("id", "ascending"), ("failed", "ascending"), ("segment", "ascending")]
    )
    numbers = table["id"].to_numpy()
    first = np.flatnonzero(np.diff(numbers, prepend=-1))
    names = ("id", "segment", "row", "failed")
    choice = _Choice(*(table[name].to_numpy()[first].tolist() for name in names))
    return choice if len(choice.sample_ids) == len(ids) else None


def _counts(job: JobDirectory, part: int, listed: Collection[Path]) -> bool:
    """Whether published statistics count that name segments beyond those `listed` here.

    Either the segments were published since and are there, or they went because the part stands by
    now. Otherwise nobody can keep to the statistics: they are damaged, or of an earlier revision.
    """
    unknown = set(_stored_names(job, part)) - {path.name for path in listed}
    return any((job.segments / name).exists() for name in unknown) or (
        read_part(job, part) is not None
    )


def _stored_names(job: JobDirectory, part: int) -> list[str]:
    """The segment of each sample, as published statistics name it; none where there are none."""
    path = job.stats / job.part_name(part)
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            names: list[str] = reader.read_all().column("segment").to_pylist()
    except UNREADABLE as error:  # missing or damaged: there is no choice to keep to
        raise_unless_damaged(error)
        return []
    return names


def _stored_choice(job: JobDirectory, part: int, segments: Sequence[_Segment]) -> _Choice | None:
    """The choice that published statistics hold, where its segments are all among those read."""
    names = _stored_names(job, part)
    ids = job.part_ids(part)
    rows_of = {
        segment.info.name: (
            index,
            {number: row for row, number in enumerate(segment.batch[SAMPLE_ID].to_pylist())},
        )
        for index, segment in enumerate(segments)
    }
    if len(names) != len(ids) or not set(names) <= rows_of.keys():
        return None
    places = [
        (rows_of[name][0], rows_of[name][1].get(number))
        for number, name in zip(ids, names, strict=True)
    ]
    if any(row is None for _, row in places):
        return None
    failed = [segment.batch[ERROR].is_valid().to_pylist() for segment in segments]
    rows = [row for _, row in places if row is not None]
    owners = [index for index, _ in places]
    is_failed = [failed[index][row] for index, row in zip(owners, rows, strict=True)]
    return _Choice(list(ids), owners, rows, is_failed)


def _missing(job: JobDirectory, part: int, segments: Sequence[_Segment]) -> str:
    ids = job.part_ids(part)
    held = IntervalSet()
    for segment in segments:
        held.update(segment.info.ids)
    gaps = IntervalSet(
        range(max(gap.start, ids.start), gap.stop)
        for gap in held.gaps(ids.stop)
        if gap.stop > ids.start
    )
    return f"{len(gaps)} of its samples are not published ({str(gaps)[:200]})"


# -- rows ------------------------------------------------------------------------------------------


def _gather(
    segments: Sequence[_Segment], places: _Places, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The named columns in the order of `places`, in batches of BATCH_ROWS.

    Each batch is the output of one `take` of one kernel, whatever the segments: the layout of
    buffers under nulls and past the end is then the same too.
    """
    for start in range(0, places.shape[1], BATCH_ROWS):
        owners, rows = places[:, start : start + BATCH_ROWS]
        used, which = np.unique(owners, return_inverse=True)
        pieces = [
            segments[owner].batch.select(columns).take(pa.array(rows[which == index]))
            for index, owner in enumerate(used.tolist())
        ]
        order = np.empty(len(which), np.int64)
        order[np.argsort(which, kind="stable")] = np.arange(len(which))
        joined = pa.Table.from_batches(
            [piece.replace_schema_metadata(None) for piece in pieces]
        ).combine_chunks()
        batches = joined.to_batches()
        assert len(batches) == 1, f"more than 2 GB of text in {BATCH_ROWS} rows"
        yield batches[0].take(pa.array(order))


def _data_batches(
    job: JobDirectory, segments: Sequence[_Segment], choice: _Choice
) -> Iterator[pa.RecordBatch]:
    for batch in _gather(segments, choice.only(failed=False), job.schema.names):
        yield pa.RecordBatch.from_arrays(batch.columns, schema=job.schema)


def _error_rows(
    job: JobDirectory, segments: Sequence[_Segment], choice: _Choice
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    schema = ERROR_SCHEMA.with_metadata(job.schema.metadata)
    own = [job.spec.output.prefix + name for name in ("custom_id", "row_index", "sample_index")]

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in _gather(segments, choice.only(failed=True), [*own, ERROR]):
            error = batch.column(ERROR)
            columns = [batch.column(name) for name in own]
            columns += [pc.struct_field(error, name) for name in schema.names[len(own) :]]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return schema, batches()


def _revision(job: JobDirectory, name: str) -> int:
    try:
        return int(json.loads((job.retry / name).read_bytes())["revision"])
    except FileNotFoundError:
        return 0


def _write_stats(
    job: JobDirectory,
    part_name: str,
    path: Path,
    segments: Sequence[_Segment],
    choice: _Choice,
    data_path: Path,
    errors_path: Path,
) -> None:
    prefix = job.spec.output.prefix
    counted = _gather(segments, choice.all(), [prefix + "finish_reason", ERROR, STATS])
    facts = PartFacts(
        num_bytes=data_path.stat().st_size,
        num_errors=sum(choice.failed),
        sha256=sha256_of(data_path),
        totals=totals_of(counted, prefix=prefix),
        errors_sha256=sha256_of(errors_path) if any(choice.failed) else None,
        revision=_revision(job, part_name),
    )
    schema = STATS_SCHEMA.with_metadata({**job.schema.metadata, PART_KEY: facts.to_json()})
    own = [prefix + name for name in ("row_index", "sample_index")]
    actors = pa.array([segment_actor(segment.batch) for segment in segments], pa.string())
    names = pa.array([segment.info.name for segment in segments], pa.string())

    def batches() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in _gather(segments, choice.all(), [*own, ERROR, STATS]):
            stats = batch.column(STATS)
            owners = pa.array(choice.segments[start : start + batch.num_rows], pa.int32())
            start += batch.num_rows
            columns = {
                "row_index": batch.column(own[0]),
                "sample_index": batch.column(own[1]),
                "is_error": pc.is_valid(batch.column(ERROR)),
                "actor": actors.take(owners),
                "segment": names.take(owners),
            }
            columns |= {field.name: pc.struct_field(stats, field.name) for field in stats.type}
            yield pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)

    _write_part(path, schema, batches(), "zstd")


def _write_part(
    path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], compression: str
) -> None:
    codec = None if compression == "none" else compression
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with speaking_plainly(path), path.open("wb") as file:
        with pa.ipc.new_file(file, schema, options=options) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())


def _publish_part(source: Path, final: Path, schema: pa.Schema | None, *, is_revised: bool) -> None:
    if link_whole(source, final):
        return
    if is_revised:
        replace_whole(source, final)
        return
    if sha256_of(source) == sha256_of(final):
        return
    try:
        count_rows(final, schema)
        logger.warning("%s: differs from what its segments hold; replaced", final.name)
    except UNREADABLE as error:
        raise_unless_damaged(error)
        logger.warning("%s: damaged; replaced", final.name)
    replace_whole(source, final)
