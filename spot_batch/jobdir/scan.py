"""What is published, rebuilt from the files themselves."""

from __future__ import annotations

import errno
import json
import logging
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError, sha256_of
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.schema import BATCH_ROWS, ERROR_SCHEMA, STATS_SCHEMA
from spot_batch.jobdir.segments import BadSegment, SegmentInfo, list_segments, read_info
from spot_batch.jobdir.summary import Totals

logger = logging.getLogger(__name__)

Which = Literal["data", "errors", "stats"]

PART_KEY = b"spot_batch.part"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartInfo:
    """A published part: `num_rows` in data/, `num_errors` in errors/, together all of its ids."""

    index: int
    name: str
    num_rows: int
    num_errors: int
    sha256: str
    totals: Totals
    revision: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What is done, by sample id. `data` is what need not be generated again, errors included."""

    data: IntervalSet = field(default_factory=IntervalSet)
    in_parts: IntervalSet = field(default_factory=IntervalSet)
    audits: IntervalSet = field(default_factory=IntervalSet)
    segments: tuple[SegmentInfo, ...] = ()
    audit_segments: tuple[SegmentInfo, ...] = ()
    parts: tuple[PartInfo, ...] = ()

    @property
    def totals(self) -> Totals:
        """Counts so far; a sample that stands in two segments is counted twice until compacted."""
        loose = [s.totals for s in self.segments if not self.in_parts.contains_all(s.ids)]
        return sum((part.totals for part in self.parts), start=sum(loose, start=Totals()))


def scan(job: JobDirectory, *, verify: bool = False, verified: Collection[int] = ()) -> Published:
    """Reads every part's and segment's footer; files that do not count are named in a warning.

    `verify` reads all of each part, as `read_part` does, but for those `verified` just now.
    """
    in_parts = IntervalSet()
    parts = []
    for index in range(job.num_parts):
        part = read_part(job, index, verify=verify and index not in verified)
        if part is not None:
            ids = job.part_ids(index)
            in_parts.add_range(ids.start, ids.stop)
            parts.append(part)
    data = IntervalSet(in_parts.ranges())
    segments = tuple(_whole_segments(job, job.segments))
    for segment in segments:
        data.update(segment.ids)
    audit_segments = tuple(_whole_segments(job, job.audit))
    audits = IntervalSet()
    for segment in audit_segments:
        audits.update(segment.ids)
    return Published(
        data=data,
        in_parts=in_parts,
        audits=audits,
        segments=segments,
        audit_segments=audit_segments,
        parts=tuple(parts),
    )


def read_part(job: JobDirectory, index: int, *, verify: bool = False) -> PartInfo | None:
    """The published part, or None where it is missing or does not count (with a warning).

    `verify` compares the bytes with the hashes that were taken when the part was written, and
    removes a data part that does not count: whoever looks less closely must not take it either.
    """
    name = job.part_name(index)
    if not (job.data / name).exists() or (job.retry / name).exists():
        return None
    try:
        return _sound_part(job, index, verify=verify)
    except UNREADABLE as error:
        raise_unless_damaged(error)
        logger.warning("data/%s: does not count, its samples are made again: %s", name, error)
    if verify:
        (job.data / name).unlink(missing_ok=True)
    return None


def fault_of_parts(job: JobDirectory, *, verify: bool = True) -> str | None:
    """What is wrong with the first part that is not as it was written; removes nothing."""
    faults = (fault_of_part(job, index, verify=verify) for index in range(job.num_parts))
    return next(filter(None, faults), None)


def fault_of_part(job: JobDirectory, index: int, *, verify: bool = False) -> str | None:
    """Which file of a part is not as it was written, and why; None for a part that counts.

    `verify` compares hashes too. Removes nothing.
    """
    name = job.part_name(index)
    if not (job.data / name).exists():
        return f"data/{name}: is gone"
    try:
        _sound_part(job, index, verify=verify)
    except UNREADABLE as error:
        raise_unless_damaged(error)
        return str(error) if isinstance(error, BadPart) else f"data/{name}: {error}"
    return None


def _sound_part(job: JobDirectory, index: int, *, verify: bool) -> PartInfo:
    """The part; one of UNREADABLE where it does not count."""
    name = job.part_name(index)
    path, errors_path, stats_path = (folder / name for folder in (job.data, job.errors, job.stats))
    if not stats_path.exists():
        raise BadPart(f"stats/{name}: is gone")
    with _named(stats_path):
        stored = _stored_facts(stats_path)
    with _named(path):
        if path.stat().st_size != stored.num_bytes:
            raise BadPart("its size is not that of the part that was written")
        if verify and sha256_of(path) != stored.sha256:
            raise BadPart("its bytes are not those that were written (sha256)")
        num_rows = count_rows(path, job.schema)
    if verify:
        with _named(stats_path):
            _read_all_of(stats_path)
    has_errors = errors_path.exists()
    if stored.num_errors and not has_errors:
        raise BadPart(f"errors/{name}: is gone")
    num_errors = 0
    if has_errors:
        with _named(errors_path):
            if verify and stored.errors_sha256 is None:  # written before errors had a hash
                _read_all_of(errors_path)
            elif verify and sha256_of(errors_path) != stored.errors_sha256:
                raise BadPart("its bytes are not those that were written (sha256)")
            num_errors = count_rows(errors_path, ERROR_SCHEMA.with_metadata(job.schema.metadata))
    num_ids = len(job.part_ids(index))
    if num_rows + num_errors != num_ids or stored.num_errors != num_errors:
        raise BadPart(f"data/{name}: {num_rows} rows and {num_errors} errors for {num_ids} ids")
    return PartInfo(
        index=index,
        name=name,
        num_rows=num_rows,
        num_errors=num_errors,
        sha256=stored.sha256,
        totals=stored.totals,
        revision=stored.revision,
    )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file, under its name in the job directory."""
    try:
        yield
    except UNREADABLE as error:
        raise_unless_damaged(error)
        raise BadPart(f"{path.parent.name}/{path.name}: {error}") from error


def raise_unless_damaged(error: Exception) -> None:
    """A file that may not be read, or not now, is not damaged: nothing is made again for it."""
    is_refused = isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.EIO)
    if is_refused or isinstance(error, MemoryError):  # Arrow's own is one too
        raise error


def _read_all_of(path: Path) -> None:
    """Decodes every batch; one of UNREADABLE where that cannot be done."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        for number in range(reader.num_record_batches):
            reader.get_batch(number).validate(full=True)


class BadPart(ValueError):
    """A file named as a part that is none of this job's, or no longer as it was written."""


# What reading a damaged part raises: flipped bytes may hit the footer, a batch or the facts.
UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFacts:
    """What the statistics part says of the data part beside it."""

    num_bytes: int
    num_errors: int
    sha256: str
    totals: Totals
    errors_sha256: str | None = None  # None where there are no errors, and in older parts
    revision: int = 0  # how often `retry` has written it anew

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> PartFacts:
        tree = json.loads(text)
        tree["totals"] = Totals(**tree["totals"])
        return cls(**tree)


def _stored_facts(path: Path) -> PartFacts:
    with pa.memory_map(str(path)) as source:
        metadata = pa.ipc.open_file(source).schema.metadata or {}
    return PartFacts.from_json(metadata[PART_KEY])


def count_rows(path: Path, schema: pa.Schema | None) -> int:
    """Rows of a part from its footer and its last batch: all others hold BATCH_ROWS."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        if schema is not None and not reader.schema.equals(schema, check_metadata=True):
            raise BadPart("its schema or fingerprint is not this job's")
        batches = int(reader.num_record_batches)
        if batches == 0:
            return 0
        return (batches - 1) * BATCH_ROWS + int(reader.get_batch(batches - 1).num_rows)


def _whole_segments(job: JobDirectory, folder: Path) -> Iterator[SegmentInfo]:
    for path in list_segments(folder):
        try:
            info = read_info(path, fingerprint=job.fingerprint, num_samples=job.num_samples)
        except FileNotFoundError:  # compacted and deleted meanwhile: its ids are in a part
            continue
        except BadSegment as error:
            logger.warning("%s: ignored, its samples are made again: %s", path.name, error)
            continue
        yield info


def read_part_of(job: JobDirectory, which: Which, index: int) -> pa.Table | None:
    """One part, memory-mapped; None where it is not published or holds no such rows.

    OutputError names a file that is damaged and, of a complete job, one that is gone. Of a job that
    still runs a part may be between two revisions: its files are then read as they are.
    """
    if job.is_complete:
        fault = fault_of_part(job, index)
        if fault is not None:
            raise damaged(job, fault)
    folder = {"data": job.data, "errors": job.errors, "stats": job.stats}[which]
    path = folder / job.part_name(index)
    if not path.exists() or not (job.data / path.name).exists():
        return None
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all().replace_schema_metadata(None)
    except UNREADABLE as error:
        raise damaged(job, f"{which}/{path.name}: {error}") from error
    if not table.schema.equals(schema_of(job, which)):
        raise damaged(job, f"{which}/{path.name}: its schema is not this job's")
    return table


def schema_of(job: JobDirectory, which: Which) -> pa.Schema:
    """The columns of one folder's parts, without metadata."""
    schemas = {"data": job.schema, "errors": ERROR_SCHEMA, "stats": STATS_SCHEMA}
    return schemas[which].remove_metadata()


def damaged(job: JobDirectory, fault: str) -> OutputError:
    """What is said of a part that cannot be read: its file, why, and what makes it again."""
    root = shlex.quote(str(job.root))
    return OutputError(f"{job.root}/{fault}; `spot-batch resume {root}` makes it again")
