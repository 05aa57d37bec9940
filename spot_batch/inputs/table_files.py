"""Formats that bring Arrow types with them: Parquet and Arrow IPC, files and streams."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.types import plain_column, plain_type
from spot_batch.records.input import InputChunk

_ARROW_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True)
class TableScan:
    """The plain schema of a file and the rows of each of its groups or batches."""

    schema: pa.Schema
    group_rows: list[int]


def scan_table(path: Path, kind: str) -> TableScan:
    try:
        if kind == "parquet":
            with pq.ParquetFile(path) as file:
                groups = [
                    file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)
                ]
                return TableScan(_plain_schema(path, file.schema_arrow), groups)
        batches = arrow_batches(path)
        return TableScan(_plain_schema(path, _arrow_schema(path)), [b.num_rows for b in batches])
    except pa.ArrowInvalid as error:
        noun = "a Parquet" if kind == "parquet" else "an Arrow"
        raise InputError(f"{path}: not {noun} file: {str(error)[:200]}") from None


def read_table(path: Path, kind: str, chunk: InputChunk, schema: pa.Schema) -> pa.Table:
    """The rows of a chunk in the pinned schema; a column that the file lacks is nulls."""
    assert len(schema), "a table is read for at least one column"
    if kind == "parquet":
        with pq.ParquetFile(path) as file:
            present = [name for name in schema.names if name in file.schema_arrow.names]
            table = file.read_row_group(chunk.offset, columns=present, use_threads=False)
    else:
        table = pa.Table.from_batches([arrow_batches(path)[chunk.offset]])
    table = table.slice(0, chunk.num_rows)
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    columns = [
        plain_column(table.column(field.name), field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in nullable
    ]
    return pa.Table.from_arrays(columns, schema=nullable)


def arrow_batches(path: Path) -> list[pa.RecordBatch]:
    """Every batch of an Arrow file or stream, memory-mapped: uncompressed ones cost no memory."""
    source = pa.memory_map(str(path))
    if _is_arrow_file(path):
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    with pa.ipc.open_stream(source) as stream:
        return list(stream)


def _arrow_schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as source:
        if _is_arrow_file(path):
            return pa.ipc.open_file(source).schema
        return pa.ipc.open_stream(source).schema


def _is_arrow_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC


def _plain_schema(path: Path, schema: pa.Schema) -> pa.Schema:
    """Without metadata of the schema or its fields: it describes the file, not the rows."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise InputError(f"{path}: two columns are named {name!r}")
    fields = []
    for field in schema:
        try:
            kind = plain_type(field.type)
            plain_column(pa.chunked_array([], type=field.type), kind)
        except (TypeError, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"{path}: column {field.name!r} has type {field.type}, which cannot pass through "
                f"({error})"
            ) from None
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.schema(fields)
