"""Results as a `datasets.Dataset`, without a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import pyarrow as pa

from spot_batch.store.directory import JobDirectory, OutputError
from spot_batch.store.schema import ERROR_SCHEMA, STATS_SCHEMA

if TYPE_CHECKING:
    import datasets

Which = Literal["data", "errors", "stats"]


def load(root: Path | str, which: Which = "data", *, partial: bool = False) -> datasets.Dataset:
    """The rows of a job as one Dataset, also when there are none.

    Files are memory-mapped: with `output.compression: none` nothing is copied. A job that is not
    complete is refused unless `partial` is true; its published parts are then what there is.
    """
    import datasets
    from datasets.table import InMemoryTable

    job = JobDirectory.open(root)
    if which not in get_args(Which):
        raise ValueError(f"which must be data, errors or stats, got {which!r}")
    if not job.is_complete and not partial:
        raise OutputError(f"{job.root}: not complete yet; partial=True loads what is published")
    info = None
    if not job.is_complete:
        info = datasets.DatasetInfo(description="Not complete: more parts follow.")
    return datasets.Dataset(InMemoryTable(read_parts(job, which)), info=info)


def read_parts(job: JobDirectory, which: Which) -> pa.Table:
    """The parts of one folder, one after another, memory-mapped."""
    schema = {"data": job.schema, "errors": ERROR_SCHEMA, "stats": STATS_SCHEMA}[which]
    tables = [schema.empty_table().replace_schema_metadata(None)]
    for index in range(job.num_parts):
        table = read_part_of(job, which, index)
        tables += [table] if table is not None else []
    return pa.concat_tables(tables).replace_schema_metadata(job.schema.metadata)


def read_part_of(job: JobDirectory, which: Which, index: int) -> pa.Table | None:
    """One part, memory-mapped; None where it is not published or holds no such rows."""
    folder = {"data": job.data, "errors": job.errors, "stats": job.stats}[which]
    path = folder / job.part_name(index)
    if not path.exists() or not (job.data / path.name).exists():
        return None
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return reader.read_all().replace_schema_metadata(None)
