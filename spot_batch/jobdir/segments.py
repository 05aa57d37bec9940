"""Segments: what an actor publishes. A published segment is the commit."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import publish_bytes
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.schema import (
    AUDIT_SCHEMA,
    ERROR,
    ERROR_STRUCT,
    OWN_COLUMNS,
    SAMPLE_ID,
    STATS,
    STATS_STRUCT,
    own_columns,
    segment_schema,
)
from spot_batch.jobdir.summary import Totals
from spot_batch.records.lending import Purpose, Receipt
from spot_batch.records.results import Completion, Outcome, RowError, SampleStats

logger = logging.getLogger(__name__)

REQUEST_CHARS = 2_000  # how much of a failed row's text its error row keeps

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]{32})\.arrow")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentInfo:
    """What a segment says of itself, after its checksum and fingerprint were found right."""

    name: str
    path: Path
    purpose: Purpose
    ids: IntervalSet
    num_bytes: int
    totals: Totals


class BadSegment(ValueError):
    """A file among the segments that does not count: torn, altered or another job's."""


def publish_segment(
    job: JobDirectory, outcomes: Sequence[Outcome], *, purpose: Purpose = "data", actor: str = ""
) -> Receipt:
    """Makes finished samples durable and visible as one file, and returns its receipt.

    Safe from any number of processes at once. Publishing the same outcomes again changes nothing.
    """
    assert outcomes, "a segment holds at least one sample"
    outcomes = sorted(outcomes, key=lambda outcome: outcome.sample_id)
    assert len({outcome.sample_id for outcome in outcomes}) == len(outcomes), (
        "a segment holds a sample once"
    )
    table = _audit_table(outcomes) if purpose == "audit" else _data_table(job, outcomes)
    name, totals = publish_rows(job, table, purpose=purpose, actor=actor)
    return _receipt(outcomes, totals, name=name, purpose=purpose)


def publish_rows(
    job: JobDirectory, rows: pa.Table, *, purpose: Purpose = "data", actor: str
) -> tuple[str, Totals]:
    """Publishes rows of a segment's schema, in order of sample id; (its name, its counts)."""
    sample_ids = rows[SAMPLE_ID].to_pylist()
    totals = totals_of([rows], prefix="" if purpose == "audit" else job.spec.output.prefix)
    metadata = {
        "spot_batch.fingerprint": job.fingerprint,
        "spot_batch.purpose": purpose,
        "spot_batch.ids": str(IntervalSet.of(sample_ids)),
        "spot_batch.totals": totals.to_json(),
        "spot_batch.actor": actor,
    }
    data = _as_file(rows.replace_schema_metadata(metadata))
    checksum = hashlib.sha256(data).hexdigest()[:32]
    name = f"{sample_ids[0]:012d}-{sample_ids[-1]:012d}-{checksum}.arrow"
    folder = job.audit if purpose == "audit" else job.segments
    job.reach(f"{purpose}.segment.made")
    publish_bytes(data, folder / name, tmp=job.tmp, reach=job.reach)
    job.reach(f"{purpose}.segment.published")
    return name, totals


def totals_of(pieces: Iterable[pa.Table | pa.RecordBatch], *, prefix: str) -> Totals:
    """Counts over rows of segments; `prefix` stands before our columns, but not in audits."""
    num_rows = 0
    reasons: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for rows in pieces:
        num_rows += rows.num_rows
        reasons.update(filter(None, rows.column(prefix + "finish_reason").to_pylist()))
        codes.update(filter(None, pc.struct_field(rows.column(ERROR), "code").to_pylist()))
        for field in STATS_STRUCT:
            sums[field.name] += pc.sum(pc.struct_field(rows.column(STATS), field.name)).as_py() or 0
    return Totals(
        num_samples=num_rows,
        num_completions=num_rows - codes.total(),
        num_errors=codes.total(),
        finish_reasons=dict(sorted(reasons.items())),
        error_codes=dict(sorted(codes.items())),
        **sums,
    )


def list_segments(folder: Path, *, overlapping: range | None = None) -> Iterator[Path]:
    """Files named as segments, in order of name; with a range, those that may hold ids of it."""
    for path in sorted(folder.glob("*.arrow")):
        if _NAME.fullmatch(path.name) is None:
            logger.warning("%s: not named as a segment; ignored", path.name)
            continue
        ids = ids_named(path)
        if overlapping is None or (ids.start < overlapping.stop and ids.stop > overlapping.start):
            yield path


def ids_named(path: Path) -> range:
    """From the first to the last id of a segment, by its name; it may lack some between them."""
    first, last, _ = path.name.split("-")
    return range(int(first), int(last) + 1)


def read_info(path: Path, *, fingerprint: str, num_samples: int) -> SegmentInfo:
    """What a segment holds; BadSegment where it does not count, FileNotFoundError where gone."""
    return _verified(path, fingerprint=fingerprint, num_samples=num_samples)[0]


def read_segment(
    path: Path, *, fingerprint: str, num_samples: int
) -> tuple[SegmentInfo, pa.RecordBatch]:
    """A segment and its rows, as one batch in order of sample id."""
    info, reader = _verified(path, fingerprint=fingerprint, num_samples=num_samples)
    batch = reader.get_batch(0)
    if batch.num_rows != len(info.ids):
        raise BadSegment(f"{batch.num_rows} rows for {len(info.ids)} sample ids")
    return info, batch


def _verified(
    path: Path, *, fingerprint: str, num_samples: int
) -> tuple[SegmentInfo, pa.RecordBatchFileReader]:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise BadSegment("not named as a segment")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest()[:32] != match[3]:
        raise BadSegment("torn or altered: the checksum in its name is not that of its bytes")
    try:
        reader = pa.ipc.open_file(pa.py_buffer(data))
    except pa.ArrowInvalid as error:
        raise BadSegment(f"not an Arrow file: {error}") from error
    metadata = {k.decode(): v.decode() for k, v in (reader.schema.metadata or {}).items()}
    if metadata.get("spot_batch.fingerprint") != fingerprint:
        raise BadSegment("of another job: its fingerprint differs")
    ids = IntervalSet.parse(metadata["spot_batch.ids"])
    if not IntervalSet([range(num_samples)]).contains_all(ids) or reader.num_record_batches != 1:
        raise BadSegment(f"sample ids {ids} in {reader.num_record_batches} batches do not fit")
    purpose: Purpose = "audit" if metadata["spot_batch.purpose"] == "audit" else "data"
    info = SegmentInfo(
        name=path.name,
        path=path,
        purpose=purpose,
        ids=ids,
        num_bytes=len(data),
        totals=Totals.from_json(metadata["spot_batch.totals"]),
    )
    return info, reader


def segment_actor(batch: pa.RecordBatch) -> str:
    return str((batch.schema.metadata or {}).get(b"spot_batch.actor", b"").decode())


# -- rows to columns -------------------------------------------------------------------------------


def _data_table(job: JobDirectory, outcomes: Sequence[Outcome]) -> pa.Table:
    schema = segment_schema(job.schema)
    kept = _kept_columns(outcomes, job.kept)
    columns: list[pa.Array | pa.ChunkedArray] = [_array(SAMPLE_ID, schema, _ids(outcomes))]
    columns += [kept.column(name) for name in job.kept]
    names = own_columns(job.spec)
    values = _own_values(outcomes, job.spec.generation.n, names)
    columns += [pa.array(values[name], type=OWN_COLUMNS[name]) for name in names]
    columns += [_errors(outcomes), _stats(outcomes)]
    for field, column in zip(schema, columns, strict=True):
        assert column.type == field.type, f"column {field.name}: {column.type}, want {field.type}"
    return pa.Table.from_arrays(columns, schema=schema)


def _audit_table(outcomes: Sequence[Outcome]) -> pa.Table:
    columns: dict[str, object] = {SAMPLE_ID: _ids(outcomes)}
    columns |= _own_values(outcomes, 1, ("generation", "finish_reason", "token_ids", "commit_step"))
    columns |= {ERROR: _errors(outcomes), STATS: _stats(outcomes)}
    return pa.table(columns, schema=AUDIT_SCHEMA)


def _kept_columns(outcomes: Sequence[Outcome], names: list[str]) -> pa.Table:
    """The kept columns of the outcomes' input rows, in order of the outcomes."""
    sources: dict[int, pa.Table] = {}
    positions: dict[int, list[int]] = {}
    places: list[tuple[int, int]] = []
    for outcome in outcomes:
        key = id(outcome.rows)
        sources.setdefault(key, outcome.rows)
        taken = positions.setdefault(key, [])
        places.append((key, len(taken)))
        taken.append(outcome.position)
    pieces = [sources[key].select(names).take(taken) for key, taken in positions.items()]
    if len(pieces) == 1:  # already in order
        return pieces[0].combine_chunks()
    starts, start = {}, 0
    for key, taken in positions.items():
        starts[key] = start
        start += len(taken)
    order = [starts[key] + place for key, place in places]
    return pa.concat_tables(pieces).combine_chunks().take(order)


def _own_values(
    outcomes: Sequence[Outcome], n: int, names: Sequence[str]
) -> dict[str, list[object] | pa.Array]:
    """The named columns of ours; those of a completion are null for an error."""
    results = [o.result if isinstance(o.result, Completion) else None for o in outcomes]
    texts = [
        _text(o.text) if r is not None else (None, None) for o, r in _beside(outcomes, results)
    ]
    values: dict[str, list[object] | pa.Array] = {}
    for name in names:
        if name == "usage":
            values[name] = _usage(results)
        elif name in _OF_SAMPLES:
            of_sample = _OF_SAMPLES[name]
            values[name] = [of_sample(outcome, n) for outcome in outcomes]
        elif name in _OF_TEXTS:
            values[name] = [text[_OF_TEXTS[name]] for text in texts]
        else:
            of_result = _OF_RESULTS[name]
            values[name] = [
                None if result is None else of_result(outcome, result)
                for outcome, result in _beside(outcomes, results)
            ]
    return values


def _beside(
    outcomes: Sequence[Outcome], results: Sequence[Completion | None]
) -> Iterator[tuple[Outcome, Completion | None]]:
    return zip(outcomes, results, strict=True)


_OF_TEXTS = {"generation": 0, "text_lossy": 1}
_OF_SAMPLES: dict[str, Callable[[Outcome, int], object]] = {
    "custom_id": lambda outcome, n: outcome.custom_id,
    "row_index": lambda outcome, n: outcome.sample_id // n,
    "sample_index": lambda outcome, n: outcome.sample_id % n,
    "seed": lambda outcome, n: outcome.seed,
}
_OF_RESULTS: dict[str, Callable[[Outcome, Completion], object]] = {
    "finish_reason": lambda outcome, result: result.finish_reason,
    "token_ids": lambda outcome, result: result.token_ids,
    "commit_step": lambda outcome, result: result.commit_step,
    "rendered_prompt": lambda outcome, result: _text(outcome.prompt_text)[0],
    "trajectory": lambda outcome, result: (
        None if result.trajectory is None else asdict(result.trajectory)
    ),
}


def _usage(results: Sequence[Completion | None]) -> pa.Array:
    counts = (
        [result.num_prompt_tokens if result else None for result in results],
        [len(result.token_ids) if result else None for result in results],
        [result.num_draft_free_forwards if result else None for result in results],
    )
    fields = list(OWN_COLUMNS["usage"])
    arrays = [pa.array(each, field.type) for each, field in zip(counts, fields, strict=True)]
    mask = pa.array([result is None for result in results], pa.bool_())
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _error(outcome: Outcome) -> dict[str, object] | None:
    error = outcome.result
    if not isinstance(error, RowError):
        return None
    return {
        "code": error.code,
        "stage": error.stage,
        "message": _text(error.message)[0],
        "attempts": error.attempts,
        "request": _text(outcome.prompt_text[:REQUEST_CHARS])[0],
    }


def _errors(outcomes: Sequence[Outcome]) -> pa.Array:
    return pa.array([_error(outcome) for outcome in outcomes], type=ERROR_STRUCT)


def _stats(outcomes: Sequence[Outcome]) -> pa.Array:
    """What depends on scheduling; zeros for an error."""
    results = [o.result if isinstance(o.result, Completion) else None for o in outcomes]
    counts = {
        "num_tokens": [len(result.token_ids) if result else 0 for result in results],
        "num_draft_free_forwards": [
            result.num_draft_free_forwards if result else 0 for result in results
        ],
    }
    for name in SampleStats.__slots__:
        counts[name] = [getattr(result.stats, name) if result else 0 for result in results]
    arrays = [pa.array(counts[field.name], field.type) for field in STATS_STRUCT]
    return pa.StructArray.from_arrays(arrays, fields=list(STATS_STRUCT))


def _text(text: str) -> tuple[str, bool]:
    """(text that UTF-8 can hold, whether something of it was lost)."""
    if text.isascii():
        return text, False
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text, "\ufffd" in text


def _ids(outcomes: Sequence[Outcome]) -> list[int]:
    return [outcome.sample_id for outcome in outcomes]


def _array(name: str, schema: pa.Schema, values: list[int]) -> pa.Array:
    return pa.array(values, type=schema.field(name).type)


def _as_file(table: pa.Table) -> bytes:
    batches = table.combine_chunks().to_batches()
    assert len(batches) == 1, "more than 2 GB of text in one segment"
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=_OPTIONS) as writer:
        writer.write_batch(batches[0])
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _receipt(
    outcomes: Sequence[Outcome], totals: Totals, *, name: str, purpose: Purpose
) -> Receipt:
    return Receipt(
        name=name,
        purpose=purpose,
        sample_ids=tuple(_ids(outcomes)),
        num_tokens=totals.num_tokens,
        stats=SampleStats(
            num_forwards=totals.num_forwards,
            num_clean_passes=totals.num_clean_passes,
            num_drafted=totals.num_drafted,
            num_accepted=totals.num_accepted,
        ),
        num_draft_free_forwards=totals.num_draft_free_forwards,
        errors={o.sample_id: o.result.code for o in outcomes if isinstance(o.result, RowError)},
    )
