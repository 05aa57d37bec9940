"""Rows of a pinned input by index, with their Arrow types."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.table_files import read_table
from spot_batch.inputs.text_files import LINES, read_text
from spot_batch.records.input import PinnedInput

_CHUNKS_KEPT = 4
_TEXTS = LINES | {"json", "csv"}


@dataclass(frozen=True, slots=True)
class InputRows:
    """Rows in the order asked for; a row with a fault stands in the table as nulls.

    `faults` and `raw` (the text of faulty rows, where there is any) go by position in
    `row_indices`.
    """

    row_indices: tuple[int, ...]
    table: pa.Table
    faults: Mapping[int, RowFault] = field(default_factory=dict)
    raw: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chunk:
    table: pa.Table
    faults: Mapping[int, RowFault]
    raw: Mapping[int, str]
    lines: Sequence[int] | None


class InputReader:
    """Reads rows of a pinned input by index, with their Arrow types, a few chunks in memory.

    Raises InputError where a file is no longer what was pinned. Not for several threads at once.
    """

    def __init__(self, pinned: PinnedInput, *, columns: Sequence[str] | None = None) -> None:
        schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
        names = schema.names if columns is None else list(dict.fromkeys(columns))
        self.schema = pa.schema([schema.field(name) for name in names])
        self._pinned = pinned
        self._id_column = pinned.custom_id_column
        self._starts = [chunk.first_row for chunk in pinned.chunks]
        self._kept: OrderedDict[int, _Chunk] = OrderedDict()

    def read(self, row_indices: Sequence[int]) -> InputRows:
        """The rows, in the order asked for; a row may be asked for more than once."""
        places: dict[int, list[tuple[int, int]]] = {}
        for position, row in enumerate(row_indices):
            assert 0 <= row < self._pinned.num_rows, (
                f"want a row below {self._pinned.num_rows}, got {row}"
            )
            number = bisect_right(self._starts, row) - 1
            places.setdefault(number, []).append((position, row - self._starts[number]))
        pieces: list[pa.Table] = []
        order = [0] * len(row_indices)
        faults: dict[int, RowFault] = {}
        raw: dict[int, str] = {}
        num_taken = 0
        for number, spots in places.items():
            chunk = self._chunk(number)
            taken: list[int | None] = []
            for position, place in spots:
                order[position] = num_taken + len(taken)
                fault = chunk.faults.get(place)
                taken.append(None if fault is not None else place)
                if fault is not None:
                    faults[position] = fault
                    raw[position] = chunk.raw.get(place, "")
            pieces.append(chunk.table.take(pa.array(taken, pa.int64())))
            num_taken += len(taken)
        nullable = pa.schema([each.with_nullable(True) for each in self.schema])
        table = pa.concat_tables([nullable.empty_table(), *pieces]).combine_chunks()
        table = table.take(pa.array(order, pa.int64()))
        return InputRows(tuple(row_indices), table, faults, raw)

    def chunks(self) -> Iterator[tuple[range, Mapping[int, RowFault], pa.Table]]:
        """Every chunk in order, each read once: (its rows, faults by place, table)."""
        for number, chunk in enumerate(self._pinned.chunks):
            read = self._read_chunk(number)
            rows = range(chunk.first_row, chunk.first_row + chunk.num_rows)
            yield rows, read.faults, read.table

    def where(self, row_index: int) -> str:
        """`prompts.jsonl line 7` or `prompts.parquet row 6 (from 0)`: for messages."""
        number = bisect_right(self._starts, row_index) - 1
        place = row_index - self._starts[number]
        file = self._pinned.files[self._pinned.chunks[number].file]
        name = Path(file.path).name
        if file.format in _TEXTS:
            lines = self._chunk(number).lines
            if lines is not None and lines[place]:
                return f"{name} line {lines[place]}"
        return f"{name} row {row_index - file.first_row} (from 0)"

    def _chunk(self, number: int) -> _Chunk:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        chunk = self._kept[number] = self._read_chunk(number)
        if len(self._kept) > _CHUNKS_KEPT:
            self._kept.popitem(last=False)
        return chunk

    def _read_chunk(self, number: int) -> _Chunk:
        chunk = self._pinned.chunks[number]
        file = self._pinned.files[chunk.file]
        path = Path(file.path)
        try:
            if file.format in _TEXTS:
                read = read_text(path, file.format, chunk, self.schema, id_column=self._id_column)
                result = _Chunk(read.table, read.faults, read.raw, read.lines)
            else:
                table = read_table(path, file.format, chunk, self.schema)
                faults = _encoding_faults(table, self._id_column)
                result = _Chunk(table, faults, {}, None)
        except FileNotFoundError:
            raise InputError(f"{path}: gone since the job was submitted") from None
        except (pa.ArrowInvalid, IndexError) as error:
            raise InputError(f"{path}: cannot be read: {str(error)[:200]}") from error
        num_rows = result.table.num_rows if result.lines is None else len(result.lines)
        if num_rows != chunk.num_rows:
            raise InputError(f"{path}: changed since the job was submitted")
        return result


def _encoding_faults(table: pa.Table, id_column: str | None) -> dict[int, RowFault]:
    """Rows of a table whose text is not UTF-8, with their ids: Arrow itself does not look."""
    faults: dict[int, RowFault] = {}
    for name in table.column_names:
        column = table.column(name)
        try:
            column.validate(full=True)
            continue
        except pa.ArrowInvalid:
            pass
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
