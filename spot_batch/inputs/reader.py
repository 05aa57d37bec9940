"""Rows of a pinned input by index, with their Arrow types."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from spot_batch.inputs.errors import RowFault
from spot_batch.inputs.in_place import Chunk, RowsInPlace, stream_chunks
from spot_batch.inputs.row_copy import CopiedRows
from spot_batch.inputs.text_files import TEXTS
from spot_batch.records.input import PinnedInput

_CHUNKS_HELD = 4


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


class InputReader:
    """Reads rows of a pinned input by index, with their Arrow types, a few chunks in memory.

    Raises InputError where a file is no longer what was pinned. Not for several threads at once.
    """

    def __init__(self, pinned: PinnedInput, *, columns: Sequence[str] | None = None) -> None:
        schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
        names = schema.names if columns is None else list(dict.fromkeys(columns))
        self._whole = schema
        self.schema = pa.schema([schema.field(name) for name in names])
        self._pinned = pinned
        self._starts = [chunk.first_row for chunk in pinned.chunks]
        self._first_rows = [file.first_row for file in pinned.files]
        self._rows: CopiedRows | RowsInPlace = (
            CopiedRows(pinned, self.schema) if pinned.copy else RowsInPlace(pinned, self.schema)
        )
        self._held: OrderedDict[int, Chunk] = OrderedDict()

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

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk in order, each read once; those of text in place hold all columns."""
        if not self._pinned.copy and self._pinned.files[0].format in TEXTS:
            yield from stream_chunks(self._pinned, self._whole)
        else:
            yield from (self._rows.read(number) for number in range(len(self._starts)))

    def where(self, row_index: int) -> str:
        """`prompts.jsonl line 7` or `prompts.parquet row 6 (from 0)`: for messages."""
        number = bisect_right(self._starts, row_index) - 1
        return self.place(row_index, self._chunk(number).lines[row_index - self._starts[number]])

    def place(self, row_index: int, line: int) -> str:
        """The same for a row whose line is known."""
        file = self._pinned.files[bisect_right(self._first_rows, row_index) - 1]
        if line:
            return f"{file.name} line {line}"
        return f"{file.name} row {row_index - file.first_row} (from 0)"

    def _chunk(self, number: int) -> Chunk:
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number]
        chunk = self._held[number] = self._rows.read(number)
        if len(self._held) > _CHUNKS_HELD:
            self._held.popitem(last=False)
        return chunk
