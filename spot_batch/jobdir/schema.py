"""The columns we write, and how they stand beside the columns that were given."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from spot_batch.job.spec import JobSpec, SpecError

BATCH_ROWS = 1_024  # every record batch but a part's last: bytes do not depend on segmentation

SAMPLE_ID = "__spot_sample_id"
ERROR = "__spot_error"
STATS = "__spot_stats"
RESERVED = "__spot_"

USAGE = pa.struct(
    [
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("draft_free_forwards", pa.int32()),
    ]
)
TRAJECTORY = pa.struct(
    [
        ("noise_key", pa.uint64()),
        ("temperature", pa.float32()),
        (
            "states",
            pa.list_(
                pa.struct(
                    [
                        ("start", pa.int32()),
                        ("num_committed", pa.int16()),
                        ("masked", pa.list_(pa.bool_())),
                        ("log_prob", pa.list_(pa.float16())),
                        ("ids", pa.list_(pa.int32())),
                        ("positions", pa.list_(pa.int16())),
                        ("tokens", pa.list_(pa.int32())),
                    ]
                )
            ),
        ),
    ]
)
ERROR_STRUCT = pa.struct(
    [
        ("code", pa.string()),
        ("stage", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int32()),
        ("request", pa.string()),
    ]
)
STATS_STRUCT = pa.struct(
    [
        ("num_forwards", pa.int64()),
        ("num_clean_passes", pa.int64()),
        ("num_drafted", pa.int64()),
        ("num_accepted", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_draft_free_forwards", pa.int64()),
    ]
)
OWN_COLUMNS: dict[str, pa.DataType] = {
    "custom_id": pa.string(),
    "row_index": pa.int64(),
    "sample_index": pa.int32(),
    "generation": pa.string(),
    "finish_reason": pa.string(),
    "token_ids": pa.list_(pa.int32()),
    "commit_step": pa.list_(pa.int16()),
    "seed": pa.uint64(),
    "usage": USAGE,
    "rendered_prompt": pa.string(),
    "trajectory": TRAJECTORY,
    "text_lossy": pa.bool_(),
}
COMPARED = ("generation", "finish_reason", "token_ids", "commit_step")  # of audits
OPTIONAL = frozenset({"token_ids", "commit_step", "usage", "rendered_prompt", "trajectory"})

ERROR_SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("row_index", pa.int64()),
        ("sample_index", pa.int32()),
        *ERROR_STRUCT,
    ]
)
STATS_SCHEMA = pa.schema(
    [
        ("row_index", pa.int64()),
        ("sample_index", pa.int32()),
        ("is_error", pa.bool_()),
        *STATS_STRUCT,
        ("actor", pa.string()),
        ("segment", pa.string()),
    ]
)
AUDIT_SCHEMA = pa.schema(
    [
        (SAMPLE_ID, pa.int64()),
        *((name, OWN_COLUMNS[name]) for name in COMPARED),
        (ERROR, ERROR_STRUCT),
        (STATS, STATS_STRUCT),
    ]
)


def own_columns(spec: JobSpec) -> list[str]:
    """The columns that the job adds, without the prefix, in order."""
    return [name for name in OWN_COLUMNS if name not in OPTIONAL or name in spec.output.include]


def kept_columns(input_schema: pa.Schema, spec: JobSpec) -> list[str]:
    """The input columns that pass through, in order. Raises SpecError for one that is not there.

    A column that is the source of one of ours under the same name (custom_id, or a per-row seed)
    is that column, not a collision: it stands among ours.
    """
    names = list(input_schema.names)
    if spec.input.keep != "all":
        missing = [name for name in spec.input.keep if name not in names]
        if missing:
            raise SpecError(
                f"input.keep: no column {missing[0]!r} in the input; "
                f"its columns: {', '.join(map(repr, names))}"
            )
        names = list(dict.fromkeys(spec.input.keep))
    ours = set(_same_column(spec))
    return [name for name in names if name not in ours]


def completion_schema(input_schema: pa.Schema, spec: JobSpec) -> pa.Schema:
    """Kept columns as they came, then ours. Raises SpecError where two would share a name."""
    kept = kept_columns(input_schema, spec)
    reserved = [name for name in kept if name.startswith(RESERVED)]
    if reserved:
        raise SpecError(
            f"input column {reserved[0]!r}: names that start with {RESERVED} are reserved; "
            "leave it out of input.keep"
        )
    prefix = spec.output.prefix
    own = [prefix + name for name in own_columns(spec)]
    clash = [name for name in kept if name in own]
    if clash:
        raise SpecError(
            f"output column {clash[0]!r} is also a column of the input: "
            'set output.prefix (as in "spot_"), or leave it out of input.keep'
        )
    fields = [input_schema.field(name) for name in kept]
    fields += [pa.field(prefix + name, OWN_COLUMNS[name]) for name in own_columns(spec)]
    return pa.schema(fields)


def opens_in_datasets(schema: pa.Schema) -> bool:
    """Whether `datasets.load_dataset` has a type for every column of data/; it lacks maps."""
    return all(_has_feature(field.type) for field in schema)


def _has_feature(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_map(kind) or types.is_union(kind) or types.is_interval(kind):
        return False
    inner = [kind.field(place) for place in range(kind.num_fields)]
    return all(_has_feature(field.type) for field in inner)


def segment_schema(data_schema: pa.Schema) -> pa.Schema:
    """A data row or an error row, with its id and its statistics."""
    fields = [pa.field(SAMPLE_ID, pa.int64())]
    fields += [field.with_nullable(True) for field in data_schema]
    fields += [pa.field(ERROR, ERROR_STRUCT), pa.field(STATS, STATS_STRUCT)]
    return pa.schema(fields)


def _same_column(spec: JobSpec) -> Iterator[str]:
    prefix = spec.output.prefix
    if spec.input.custom_id is not None and spec.input.custom_id == prefix + "custom_id":
        yield spec.input.custom_id
    if "seed" in spec.generation.per_row and prefix == "":
        yield "seed"
