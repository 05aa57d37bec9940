"""CSV and TSV files. Python's own reader is strict: a quote that is never closed is an error.

(duckdb's reader names the records that it rejects, but not the lines of those that it takes, and
leaves out where in the file a rejected one stood.)
"""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.text_row import RAW_CHARS, TextRow, is_encodable

_MOST_LINES = 1_000  # of one quoted cell in a .tsv, whose quotes are mostly text


def scan_csv(path: Path) -> Iterator[TextRow]:
    """Every row of a file; InputError where one cannot be told from the next."""
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _Lines(file)
        records = _tab_records(lines) if _is_tsv(path) else _comma_records(path, lines)
        header = None
        for line, cells in records:
            if header is None:
                if isinstance(cells, RowFault):
                    raise InputError(f"{path}: its header: {cells.message}")
                header = cells
                _check_header(path, header)
            elif cells:  # not a blank line
                yield _row(header, cells, line)


def _is_tsv(path: Path) -> bool:
    return path.suffix.lower() == ".tsv"


class _Lines:
    """The lines of a file, those of the record that is being read apart."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._again: deque[str] = deque()
        self.taken: list[str] = []
        self.number = 0
        self.most: int | None = None

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        if self.most is not None and len(self.taken) >= self.most:
            raise csv.Error("a cell of too many lines")
        line = self._again.popleft() if self._again else next(self._lines)
        self.taken.append(line)
        return line

    def begin(self) -> int:
        """The number of the line that the next record begins in."""
        self.number += len(self.taken)
        self.taken = []
        return self.number + 1

    def keep_one(self) -> str:
        """The first line of the record; the others are read again."""
        self._again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]
        return self.taken[0]


def _comma_records(path: Path, lines: _Lines) -> Iterator[tuple[int, list[str] | RowFault]]:
    reader = csv.reader(lines, strict=True)
    while True:
        line = lines.begin()
        try:
            yield line, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if len(lines.taken) > 1 or "end of data" in str(error):
                raise InputError(
                    f"{path}: line {line}: a quote that opens there is not closed, or a quote in "
                    f"a cell is not doubled ({error})"
                ) from None
            yield line, RowFault("bad_csv", f"not CSV: {error}")


def _tab_records(lines: _Lines) -> Iterator[tuple[int, list[str]]]:
    """A cell in quotes is what is in them; any other quote is text, as in most files of tabs."""
    lines.most = _MOST_LINES
    reader = csv.reader(lines, delimiter="\t", strict=True)
    while True:
        line = lines.begin()
        try:
            cells = next(reader)
            is_text = len(lines.taken) > 1 and any("\t" in cell for cell in cells)
        except StopIteration:
            return
        except csv.Error:
            is_text = True
        if is_text:
            cells = lines.keep_one().rstrip("\r\n").split("\t")
        yield line, cells


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if header.count(name) > 1:
            raise InputError(f"{path}: two columns are named {name!r}")
    if not all(is_encodable(name) for name in header):
        raise InputError(f"{path}: its header is not UTF-8")


def _row(header: list[str], cells: list[str] | RowFault, line: int) -> TextRow:
    if isinstance(cells, RowFault):
        return TextRow(line, 0, 0, None, cells)
    readable = None
    if len(cells) != len(header):
        fault = RowFault("bad_csv", f"{len(cells)} fields where the header has {len(header)}")
    elif not all(is_encodable(cell) for cell in cells):
        fault = RowFault("bad_encoding", "not UTF-8")
        readable = dict(zip(header, cells, strict=True))
    else:
        return TextRow(line, 0, 0, dict(zip(header, cells, strict=True)))
    raw = ",".join(cells)[:RAW_CHARS].encode("utf-8", "replace").decode()
    return TextRow(line, 0, 0, None, fault, raw, readable)


class CsvColumn:
    """A column is whole numbers or numbers only where every cell reads back as it was written.

    Where numbers are asked for (`is_number`), any way to write them will do.
    """

    __slots__ = ("_is_float", "_is_int", "_is_lenient", "_is_seen")

    def __init__(self, *, is_number: bool) -> None:
        self._is_int = True
        self._is_float = True
        self._is_seen = False
        self._is_lenient = is_number

    def observe(self, cell: str) -> None:
        if not (self._is_float or self._is_int) or cell == "":
            return
        self._is_seen = True
        if self._is_int and not (_INT.fullmatch(cell) and -(2**63) <= int(cell) < 2**63):
            self._is_int = False
        if not (_FLOAT.fullmatch(cell) and (self._is_lenient or repr(float(cell)) == cell)):
            self._is_float = False

    def to_arrow(self) -> pa.DataType:
        if self._is_seen and self._is_int:
            return pa.int64()
        return pa.float64() if self._is_seen and self._is_float else pa.string()


def of_cell(kind: pa.DataType) -> Callable[[Any], Any]:
    """Turns a cell into a value of its column's type."""
    if pa.types.is_integer(kind):
        return lambda cell: int(cell) if cell else None
    if pa.types.is_floating(kind):
        return lambda cell: float(cell) if cell else None
    return lambda cell: cell


_INT = re.compile(r"0|-?[1-9]\d{0,18}")
_FLOAT = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?([eE][-+]?\d{1,3})?")
