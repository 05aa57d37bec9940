"""Results as a `datasets.Dataset`, without a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pyarrow as pa

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.mirror import folder_of
from spot_batch.jobdir.scan import Which, read_part_of, schema_of

if TYPE_CHECKING:
    import datasets


def load(root: Path | str, which: Which = "data", *, partial: bool = False) -> datasets.Dataset:
    """The rows of a job as one Dataset, also when there are none; `root` may be its URL.

    Files are memory-mapped: with `output.compression: none` nothing is copied. A job that is not
    complete is refused unless `partial` is true; its published parts are then what there is.
    A column of maps is one of lists of key and value. OutputError names a part that is missing or
    damaged.
    """
    import datasets
    from datasets.table import InMemoryTable

    job = JobDirectory.open(folder_of(root))
    if which not in get_args(Which):
        raise ValueError(f"which must be data, errors or stats, got {which!r}")
    if not job.is_complete and not partial:
        raise OutputError(f"{job.root}: not complete yet; partial=True loads the parts there are")
    info = None
    if not job.is_complete:
        info = datasets.DatasetInfo(description="Not complete: more parts follow.")
    return datasets.Dataset(InMemoryTable(without_maps(read_parts(job, which))), info=info)


def without_maps(table: pa.Table) -> pa.Table:
    """Maps as lists of key and value, which is how `datasets` can hold them; no copy."""
    fields = [field.with_type(_without_maps(field.type)) for field in table.schema]
    schema = pa.schema(fields, metadata=table.schema.metadata)
    return table if schema.equals(table.schema) else table.cast(schema)


def _without_maps(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_map(kind):
        entry = [("key", _without_maps(kind.key_type)), ("value", _without_maps(kind.item_type))]
        return pa.list_(pa.struct(entry))
    if types.is_struct(kind):
        inner = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_without_maps(field.type)) for field in inner])
    if types.is_list(kind):
        item = kind.value_field
        return pa.list_(item.with_type(_without_maps(item.type)))
    if types.is_large_list(kind):
        item = kind.value_field
        return pa.large_list(item.with_type(_without_maps(item.type)))
    return kind


def read_parts(job: JobDirectory, which: Which) -> pa.Table:
    """The parts of one folder, one after another, memory-mapped; OutputError as `read_part_of`."""
    tables = [schema_of(job, which).empty_table()]
    for index in range(job.num_parts):
        table = read_part_of(job, which, index)
        tables += [table] if table is not None else []
    return pa.concat_tables(tables).replace_schema_metadata(job.schema.metadata)


def num_errors(job: JobDirectory) -> int:
    """How many samples of the published parts have no generation; OutputError as `read_part_of`."""
    parts = (read_part_of(job, "errors", index) for index in range(job.num_parts))
    return sum(part.num_rows for part in parts if part is not None)
