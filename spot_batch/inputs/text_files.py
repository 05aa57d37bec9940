"""Formats whose rows are text: JSON lines, OpenAI batch requests, JSON arrays and CSV.

Each row stands or falls alone.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from spot_batch.inputs import requests
from spot_batch.inputs.csv_files import CsvColumn, of_cell, scan_csv
from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.text_row import BOM, RAW_CHARS, TextRow, is_encodable
from spot_batch.inputs.types import Converter, Misfit, Shape, as_json, converter
from spot_batch.records.input import InputChunk

LINES = frozenset({"jsonl", "openai-batch"})  # formats with a row a line
TEXTS = LINES | {"json", "csv"}


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Rows as columns; rows with a fault are nulls. `lines` has the line of every row."""

    table: pa.Table
    lines: list[int]
    faults: dict[int, RowFault]
    raw: dict[int, str]


def scan_text(path: Path, kind: str) -> Iterator[TextRow]:
    """Every row of a file, one at a time."""
    return _SCANNERS[kind](path)


def read_lines(path: Path, kind: str, chunk: InputChunk) -> Iterator[TextRow]:
    """The rows of a chunk of a format of LINES."""
    rows = _read_jsonl(path, chunk)
    return map(_request, rows) if kind == "openai-batch" else rows


def text_chunk(
    rows: Iterable[TextRow],
    kind: str,
    schema: pa.Schema,
    *,
    id_column: str | None,
    json_columns: Container[str] = (),
) -> TextChunk:
    """Rows as columns of the pinned schema; faults with their row's id."""
    converters = {
        field.name: of_cell(field.type)
        if kind == "csv"
        else as_json
        if field.name in json_columns
        else converter(field.type, f"column {field.name!r}")
        for field in schema
    }
    columns: dict[str, list[object]] = {name: [] for name in schema.names}
    result = TextChunk(schema.empty_table(), [], {}, {})
    for place, row in enumerate(rows):
        values, fault = row.values, row.fault
        if values is not None:
            try:
                values = _converted(values, converters)
            except Misfit as misfit:
                values, fault = None, RowFault("bad_type", str(misfit))
        if fault is not None:
            readable = row.readable if row.values is None else row.values
            result.faults[place] = fault.of(_id_in(readable, id_column))
            result.raw[place] = row.raw or _as_text(row.values)
        for name, column in columns.items():
            column.append(None if values is None else values[name])
        result.lines.append(row.line)
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    arrays = [pa.array(columns[field.name], type=field.type) for field in nullable]
    table = pa.Table.from_arrays(arrays, schema=nullable)
    return TextChunk(table, result.lines, result.faults, result.raw)


class SchemaOfTexts:
    """The schema of text rows, inferred over all of them: what most of them say.

    With `columns`, only those are looked at: a column that nobody reads spoils no row. `numbers`
    are columns that are numbers by what they are for.
    """

    def __init__(
        self, kind: str, columns: frozenset[str] | None, *, numbers: Container[str] = ()
    ) -> None:
        self._is_csv = kind == "csv"
        self._is_fixed = kind == "openai-batch"
        self._columns = columns
        self._numbers = numbers
        self._shapes: dict[str, Shape] = {}
        self._csv: dict[str, CsvColumn] = {}
        self.seen: dict[str, None] = {}

    def observe(self, values: Mapping[str, object]) -> None:
        """Takes a row in."""
        for name, value in values.items():
            self.seen.setdefault(name)
            if self._is_fixed or (self._columns is not None and name not in self._columns):
                continue
            if self._is_csv:
                if name not in self._csv:
                    self._csv[name] = CsvColumn(is_number=name in self._numbers)
                self._csv[name].observe(str(value))
            else:
                if name not in self._shapes:
                    self._shapes[name] = Shape()
                self._shapes[name].observe(value)

    def schema(self) -> pa.Schema:
        if self._is_csv:
            return pa.schema([(name, column.to_arrow()) for name, column in self._csv.items()])
        if self._is_fixed:
            wanted = requests.SCHEMA.names if self._columns is None else self._columns
            return pa.schema([field for field in requests.SCHEMA if field.name in wanted])
        return pa.schema([(name, shape.to_arrow()) for name, shape in self._shapes.items()])

    @property
    def json_columns(self) -> tuple[str, ...]:
        """The columns whose objects have so many keys that the keys are data."""
        return tuple(name for name, shape in self._shapes.items() if shape.is_wide)


def _converted(
    values: Mapping[str, object], converters: Mapping[str, Converter]
) -> dict[str, object]:
    return {name: convert(values.get(name)) for name, convert in converters.items()}


def _id_in(values: Mapping[str, object] | None, column: str | None) -> str | None:
    value = values.get(column) if values is not None and column is not None else None
    if type(value) is int:
        return str(value)
    return value if isinstance(value, str) and value and is_encodable(value) else None


def _as_text(values: Mapping[str, object] | None) -> str:
    return "" if values is None else json.dumps(values, ensure_ascii=True)[:RAW_CHARS]


# -- JSON lines ------------------------------------------------------------------------------------


def _scan_jsonl(path: Path) -> Iterator[TextRow]:
    with path.open("rb") as file:
        yield from _json_lines(file, offset=0, line=1)


def _read_jsonl(path: Path, chunk: InputChunk) -> Iterator[TextRow]:
    with path.open("rb") as file:
        file.seek(chunk.offset)
        data = file.read(chunk.num_bytes)
    return _json_lines(io.BytesIO(data), offset=chunk.offset, line=chunk.line)


def _json_lines(file: io.BufferedIOBase, *, offset: int, line: int) -> Iterator[TextRow]:
    """Rows are the lines that are not blank; line numbers count every line from 1."""
    for data in file:
        text = data.removeprefix(BOM) if offset == 0 else data
        if text.strip():
            yield _json_line(text, line=line, offset=offset, num_bytes=len(data))
        offset += len(data)
        line += 1


def _json_line(data: bytes, *, line: int, offset: int, num_bytes: int) -> TextRow:
    def failed(code: str, message: str, readable: Mapping[str, object] | None = None) -> TextRow:
        raw = data[:RAW_CHARS].decode("utf-8", "replace").rstrip("\r\n")
        return TextRow(line, offset, num_bytes, None, RowFault(code, message), raw, readable)

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        return failed("bad_encoding", f"not UTF-8: byte 0x{byte:02x} at column {error.start + 1}")
    try:
        values = _DECODER.decode(text.rstrip("\r\n"))  # columns count on this line
    except RecursionError:
        return failed("bad_json", "nested too deeply")
    except _TooLarge as error:
        values = json.loads(text)
        return failed("bad_json", str(error), values if isinstance(values, dict) else None)
    except ValueError as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return failed("bad_json", f"not JSON: {why}{place}")
    if not isinstance(values, dict):
        return failed("bad_json", f"a row is a JSON object, got {type(values).__name__}")
    if _LONE.search(text) and not is_encodable(values):
        message = "half of a surrogate pair (a \\ud800 to \\udfff alone)"
        return failed("bad_encoding", message, values)
    return TextRow(line, offset, num_bytes, values)


class _TooLarge(ValueError):
    """A number that would be read as infinity."""


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise _TooLarge(f"the number {number} is beyond those of 64 bits")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite)
_LONE = re.compile(r"\\u[dD][89a-fA-F]")


# -- OpenAI batch requests -------------------------------------------------------------------------


def _scan_requests(path: Path) -> Iterator[TextRow]:
    return map(_request, _scan_jsonl(path))


def _request(row: TextRow) -> TextRow:
    if row.values is None:
        return row
    try:
        return replace(row, values=requests.columns_of(row.values))
    except RowFault as fault:
        return replace(row, values=None, fault=fault, raw=_as_text(row.values), readable=row.values)


# -- JSON arrays -----------------------------------------------------------------------------------


def _scan_json(path: Path) -> Iterator[TextRow]:
    try:
        text = path.read_bytes().removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise InputError(f"{path}: not JSON that can be read: nested too deeply") from None
    if not isinstance(rows, list):
        raise InputError(f"{path}: a JSON input is an array of objects; for one a line use .jsonl")
    for row in rows:
        if not isinstance(row, dict):
            fault = RowFault("bad_json", f"a row is a JSON object, got {type(row).__name__}")
            yield TextRow(0, 0, 0, None, fault, json.dumps(row)[:RAW_CHARS])
        elif not is_encodable(row):
            fault = RowFault(
                "bad_encoding", "half of a surrogate pair (a \\ud800 to \\udfff alone)"
            )
            yield TextRow(0, 0, 0, None, fault, json.dumps(row)[:RAW_CHARS], row)
        else:
            yield TextRow(0, 0, 0, row)


_SCANNERS: dict[str, Callable[[Path], Iterator[TextRow]]] = {
    "jsonl": _scan_jsonl,
    "openai-batch": _scan_requests,
    "json": _scan_json,
    "csv": scan_csv,
}
