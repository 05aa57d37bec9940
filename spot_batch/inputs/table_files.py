"""Formats that bring Arrow types with them: Parquet and Arrow IPC, files and streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.types import MAX_DEPTH, depth_of, plain_column, plain_type
from spot_batch.records.input import CHUNK_ROWS, InputChunk

_ARROW_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_OLD_STREAM_END = b"\0\0\0\0"  # of the format before version 0.15


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
        schema = _plain_schema(path, _arrow_schema(path))
    except (pa.ArrowInvalid, OSError) as error:
        noun = "a Parquet" if kind == "parquet" else "an Arrow"
        raise InputError(f"{path}: not {noun} file: {str(error)[:200]}") from None
    return TableScan(schema, [batch.num_rows for batch in _arrow_batches(path)])


def read_table(path: Path, kind: str, chunk: InputChunk, schema: pa.Schema) -> pa.Table:
    """The rows of a chunk in the pinned schema; a column that the file lacks is nulls."""
    assert len(schema), "a table is read for at least one column"
    if kind == "parquet":
        with pq.ParquetFile(path) as file:
            names = _present(file, schema)
            with _damaged(path, f"row group {chunk.offset}"):
                table = file.read_row_group(chunk.offset, columns=names, use_threads=False)
    else:
        with _damaged(path, f"batch {chunk.offset}"):
            table = pa.Table.from_batches([_arrow_batch(path, chunk.offset)])
    return _in_schema(table.slice(0, chunk.num_rows), schema)


def stream_table(path: Path, kind: str, schema: pa.Schema, *, num_rows: int) -> Iterator[pa.Table]:
    """The first `num_rows` rows in the pinned schema, CHUNK_ROWS at most at a time."""
    left = num_rows
    for batch in _parquet_batches(path, schema) if kind == "parquet" else _arrow_batches(path):
        for start in range(0, min(left, batch.num_rows), CHUNK_ROWS):
            some = batch.slice(start, min(CHUNK_ROWS, left - start))
            yield _in_schema(pa.Table.from_batches([some]), schema)
        left -= min(left, batch.num_rows)
        if not left:
            return


def _in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    columns = [
        plain_column(table.column(field.name), field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in nullable
    ]
    return pa.Table.from_arrays(columns, schema=nullable)


def _parquet_batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        names = _present(file, schema)
        for group in range(file.metadata.num_row_groups):
            with _damaged(path, f"row group {group}"):
                yield from file.iter_batches(
                    CHUNK_ROWS, row_groups=[group], columns=names, use_threads=False
                )


def _present(file: pq.ParquetFile, schema: pa.Schema) -> list[str]:
    return [name for name in schema.names if name in file.schema_arrow.names]


def _arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Every batch of an Arrow file or stream, memory-mapped: uncompressed ones cost no memory."""
    source = pa.memory_map(str(path))
    if _is_arrow_file(path):
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            with _damaged(path, f"batch {number}"):
                yield reader.get_batch(number)
        return
    stream = pa.ipc.open_stream(source)
    number = 0
    while True:
        with _damaged(path, f"batch {number}"):
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                break
        yield batch
        number += 1
    _check_end(path, source.tell())


@contextmanager
def _damaged(path: Path, part: str) -> Iterator[None]:
    """What reading a part of a file raises, as an InputError that names both."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: {part} cannot be read: {why}") from error


def _check_end(path: Path, end: int) -> None:
    """InputError where a stream that was read up to byte `end` does not end there with its mark."""
    with path.open("rb") as file:
        mark = _STREAM_END if file.read(4) == _STREAM_END[:4] else _OLD_STREAM_END
        file.seek(max(0, end - len(mark)))
        if file.read(len(mark)) != mark:
            raise InputError(f"{path}: an Arrow stream that is cut short: it has no end mark")
        if file.read(1):
            raise InputError(f"{path}: an Arrow stream with more behind its end mark")


def _arrow_batch(path: Path, number: int) -> pa.RecordBatch:
    """One batch; those of a stream stand one behind the other and are passed on the way."""
    if _is_arrow_file(path):
        return pa.ipc.open_file(pa.memory_map(str(path))).get_batch(number)
    for batch in islice(_arrow_batches(path), number, None):
        return batch
    raise IndexError(f"no batch {number}")


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
        if depth_of(kind) > MAX_DEPTH:
            raise InputError(f"{path}: column {field.name!r} is nested more than {MAX_DEPTH} deep")
        fields.append(pa.field(field.name, kind, nullable=field.nullable))
    return pa.schema(fields)
