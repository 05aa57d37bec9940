"""The rows of a pinned input where its files stand: by range, or from the first to the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa

from spot_batch.inputs.errors import InputError, RowFault, called
from spot_batch.inputs.table_files import read_table, stream_table
from spot_batch.inputs.text_files import LINES, TEXTS, read_lines, scan_text, text_chunk
from spot_batch.inputs.text_row import TextRow
from spot_batch.inputs.unchanged import check_file, size_and_time
from spot_batch.records.input import CHUNK_ROWS, InputChunk, InputFile, PinnedInput


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring rows as columns of the pinned schema; a row with a fault stands as nulls.

    `faults` and `raw` (the text of faulty rows, where there is any) go by place in the chunk;
    `lines` has the line of every row, 0 where lines mean nothing.
    """

    table: pa.Table
    faults: Mapping[int, RowFault]
    raw: Mapping[int, str]
    lines: Sequence[int]


class RowsInPlace:
    """Reads the chunks of a pinned input out of its files.

    Each time it looks whether the file is what it was, which is InputError where it is not.
    """

    def __init__(self, pinned: PinnedInput, schema: pa.Schema) -> None:
        self._pinned = pinned
        self._schema = schema
        self._checked = {
            number: (file.size, file.mtime_ns) for number, file in enumerate(pinned.files)
        }
        self._onward = _Onward()

    def read(self, number: int) -> Chunk:
        chunk = self._pinned.chunks[number]
        file = self._pinned.files[chunk.file]
        path, id_column = Path(file.path), self._pinned.custom_id_column
        if size_and_time(path) != self._checked[chunk.file]:
            self._checked[chunk.file] = check_file(self._pinned, chunk.file)
        with _reading(file):
            if file.format in TEXTS:
                by_range = read_lines if file.format in LINES else self._onward.rows
                rows = by_range(path, file.format, chunk)
                result = _of_text(rows, file, self._schema, self._pinned)
            else:
                result = _of_table(read_table(path, file.format, chunk, self._schema), id_column)
        if result.table.num_rows != chunk.num_rows:
            raise InputError(f"{path}: changed since the job was submitted")
        return result


class _Onward:
    """Reads chunks of a file whose rows have no address: the next one goes on from the last."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._at = 0
        self._rows: Iterator[TextRow] = iter(())

    def rows(self, path: Path, kind: str, chunk: InputChunk) -> Iterable[TextRow]:
        if path != self._path or chunk.offset < self._at:
            self._path, self._at, self._rows = path, 0, scan_text(path, kind)
        passed = islice(self._rows, chunk.offset - self._at, None)
        found = list(islice(passed, chunk.num_rows))
        self._at = chunk.offset + len(found)
        return found


def stream_chunks(pinned: PinnedInput, schema: pa.Schema) -> Iterator[Chunk]:
    """All rows in order, CHUNK_ROWS at most at a time, however long the chunks of a file are."""
    id_column = pinned.custom_id_column
    for number, file in enumerate(pinned.files):
        path, num_rows = Path(file.path), 0
        with _reading(file):
            if file.format in TEXTS:
                rows = islice(scan_text(path, file.format), file.num_rows)
                while some := list(islice(rows, CHUNK_ROWS)):
                    num_rows += len(some)
                    yield _of_text(some, file, schema, pinned)
            else:
                for table in stream_table(path, file.format, schema, num_rows=file.num_rows):
                    num_rows += table.num_rows
                    yield _of_table(table, id_column)
        check_file(pinned, number)
        if num_rows != file.num_rows:
            raise InputError(f"{path}: changed since the job was submitted")


@contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    """What can go wrong in a file, as an InputError that names it."""
    with called(file.path, file.origin):
        try:
            yield
        except FileNotFoundError:
            raise InputError(f"{file.path}: gone since the job was submitted") from None
        except (pa.ArrowException, OSError, IndexError) as error:
            raise InputError(f"{file.path}: cannot be read: {str(error)[:200]}") from error


def _of_text(
    rows: Iterable[TextRow], file: InputFile, schema: pa.Schema, pinned: PinnedInput
) -> Chunk:
    made = text_chunk(
        rows,
        file.format,
        schema,
        id_column=pinned.custom_id_column,
        json_columns=pinned.json_columns,
    )
    return Chunk(made.table, made.faults, made.raw, made.lines)


def _of_table(table: pa.Table, id_column: str | None) -> Chunk:
    return Chunk(table, _encoding_faults(table, id_column), {}, [0] * table.num_rows)


def _encoding_faults(table: pa.Table, id_column: str | None) -> dict[int, RowFault]:
    """Rows of a table whose text is not UTF-8, with their ids: Arrow itself does not look."""
    faults: dict[int, RowFault] = {}
    for name in table.column_names:
        column = table.column(name)
        try:
            column.validate(full=True)
            continue
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # damaged: to look closer may end the process
                raise
        for row in range(len(column)):
            try:
                column.slice(row, 1).take([0]).validate(full=True)
            except pa.ArrowInvalid:
                faults.setdefault(row, RowFault("bad_encoding", f"column {name!r}: not UTF-8"))
    return {row: fault.of(_id_in(table, id_column, row)) for row, fault in faults.items()}


def _id_in(table: pa.Table, column: str | None, row: int) -> str | None:
    if column is None or column not in table.column_names:
        return None
    try:
        value = table.column(column)[row].as_py()
    except UnicodeDecodeError:
        return None
    return None if value is None or value == "" else str(value)
