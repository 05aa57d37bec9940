"""Pinning: what the input is, frozen before anything is generated."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from spot_batch.inputs.chat import is_messages
from spot_batch.inputs.errors import InputError, called
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.requests import looks_like_requests
from spot_batch.inputs.row_copy import GIB, copy_rows, num_copied_bytes
from spot_batch.inputs.sources import SourceFile, find_files
from spot_batch.inputs.table_files import TableScan, scan_table
from spot_batch.inputs.template import PromptTemplate
from spot_batch.inputs.text_files import LINES, TEXTS, SchemaOfTexts, scan_text
from spot_batch.inputs.types import filled_type, is_text
from spot_batch.inputs.unchanged import digest_of_file, used_bytes_of
from spot_batch.job.reading import check_spec
from spot_batch.job.spec import JobSpec
from spot_batch.records.input import CHUNK_ROWS, InputChunk, InputFile, PinnedInput, PromptKind

logger = logging.getLogger(__name__)

CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = (*CHAT_COLUMNS, "prompt", "question", "instruction", "text")

_TABLES = frozenset({"parquet", "arrow"})
_SHOWN_FAULTS = 5


def pin_input(
    spec: JobSpec, *, hub_dir: Path | None = None, is_copied: bool = False
) -> PinnedInput:
    """The input frozen: files with digests, rows, schema, prompt column. Raises InputError.

    Text formats are read to the end (or to `limit`): the schema is that of all their rows, and
    rows that cannot be used are counted, to become error rows. A hub dataset or a saved dataset
    is written once into `hub_dir` as Parquet (the job directory's `hub_input`); what is
    compressed or remote is unpacked or copied there.

    With `is_copied` the rows themselves are copied there, up to `copy_limit_gib` of them, and what
    was unpacked or fetched goes again; a dataset that was written there needs no copy.
    """
    files = find_files(spec.input, hub_dir=hub_dir)
    scan = _scan_tables if files[0].format in _TABLES else _scan_texts
    pinned = scan(spec, files)
    if is_copied:
        assert hub_dir is not None, "a copy of the rows wants a folder"
        is_ours = [Path(file.path).parent == hub_dir and not file.origin for file in pinned.files]
        if not all(is_ours) and num_copied_bytes(pinned) <= spec.input.copy_limit_gib * GIB:
            pinned = copy_rows(pinned, hub_dir)
    pinned = _looked_through(pinned)
    if pinned.num_faults and pinned.num_faults == pinned.num_rows:
        raise InputError(f"no row of the input can be read; the first: {pinned.faults[0]}")
    if pinned.num_faults and spec.input.malformed == "refuse":
        raise InputError(
            f"{pinned.num_faults:,} rows cannot be read (input.malformed): {pinned.faults[0]}"
        )
    if pinned.copy:
        drop_sources(pinned)
    return pinned


def drop_sources(pinned: PinnedInput) -> None:
    """Remove what was unpacked or fetched of an input whose rows have been copied."""
    for file in pinned.files:
        if file.origin:
            Path(file.path).unlink(missing_ok=True)


def recognised(spec: JobSpec, *, hub_dir: Path | None = None) -> JobSpec:
    """The spec with `input.format: openai-batch` where that is what its lines are.

    Only a spec that says nothing of format and columns is looked at.
    """
    given = spec.input
    named = given.prompt or given.messages or given.template or given.custom_id
    if given.format != "auto" or named:
        return spec
    first = find_files(given, hub_dir=hub_dir)[0]
    if first.format != "jsonl":
        return spec
    row = next(scan_text(first.path, "jsonl"), None)
    if row is None or row.values is None or not looks_like_requests(row.values):
        return spec
    tree = spec.model_dump()
    tree["input"]["format"] = "openai-batch"
    return check_spec(tree)


# -- scanning --------------------------------------------------------------------------------------


def _scan_texts(spec: JobSpec, files: Sequence[SourceFile]) -> PinnedInput:
    limit = spec.input.limit
    inferred = SchemaOfTexts(
        files[0].format, _looked_at(spec, _named_prompts(spec)), numbers=_number_columns(spec)
    )
    pinned_files: list[InputFile] = []
    chunks: list[InputChunk] = []
    first_fault = ""
    num_rows = 0
    for source in files:
        if pinned_files and limit is not None and num_rows >= limit:
            break
        first_row, builder = num_rows, _ChunkBuilder(len(pinned_files), source.format)
        with called(source.path, source.name):
            for row in scan_text(source.path, source.format):
                if limit is not None and num_rows >= limit:
                    break
                builder.add(num_rows, offset=row.offset, num_bytes=row.num_bytes, line=row.line)
                if row.values is not None:
                    inferred.observe(row.values)
                elif not first_fault:
                    first_fault = f"{_place(source, row.line, num_rows - first_row)}: {row.fault}"
                num_rows += 1
        made = builder.finish()
        chunks += made
        pinned_files.append(_pinned_file(source, made, first_row, num_rows - first_row))
    if num_rows and not inferred.seen:
        raise InputError(f"no row of the input can be read; the first: {first_fault}")
    schema = inferred.schema() if num_rows else _schema_of_nothing(spec)
    columns = list(inferred.seen) if num_rows else schema.names
    pinned = _pinned(spec, schema, columns, pinned_files, chunks, num_rows)
    return replace(pinned, json_columns=inferred.json_columns)


def _number_columns(spec: JobSpec) -> frozenset[str]:
    """Columns that override what is a number: their cells are numbers, however written."""
    return frozenset(spec.generation.per_row) - {"stop"}


def _scan_tables(spec: JobSpec, files: Sequence[SourceFile]) -> PinnedInput:
    limit = spec.input.limit
    pinned_files: list[InputFile] = []
    chunks: list[InputChunk] = []
    scans: list[tuple[SourceFile, TableScan]] = []
    num_rows = 0
    for source in files:
        if scans and limit is not None and num_rows >= limit:
            break
        with called(source.path, source.name):
            scan = scan_table(source.path, source.format)
        scans.append((source, scan))
        first_row, made = num_rows, []
        for group, rows in enumerate(scan.group_rows):
            if limit is not None:
                rows = min(rows, limit - num_rows)
            if rows > 0:
                made.append(
                    InputChunk(
                        file=len(pinned_files),
                        first_row=num_rows,
                        num_rows=rows,
                        offset=group,
                        num_bytes=0,
                        line=0,
                    )
                )
                num_rows += rows
        chunks += made
        pinned_files.append(_pinned_file(source, made, first_row, num_rows - first_row))
    schema = _one_schema(scans)
    return _pinned(spec, schema, schema.names, pinned_files, chunks, num_rows)


def _pinned(
    spec: JobSpec,
    schema: pa.Schema,
    columns: Sequence[str],
    files: list[InputFile],
    chunks: list[InputChunk],
    num_rows: int,
) -> PinnedInput:
    """`columns` is every column there is, for messages; `schema` may have fewer."""
    place = _Place(Path(files[0].path).name, len(files) - 1, columns)
    _check_named_columns(spec, schema, place)
    read = _template_columns(spec, schema, place)
    column: str
    kind: PromptKind
    column, kind = "", "prompt"
    if spec.input.template is None:
        column, kind = _prompt_column(spec, schema, place)
    wanted = _looked_at(spec, (column,) if column else read)
    if wanted is not None:
        schema = pa.schema([field for field in schema if field.name in wanted])
    return PinnedInput(
        files=tuple(files),
        chunks=tuple(chunks),
        num_rows=num_rows,
        schema=schema.serialize().to_pybytes(),
        prompt_column=column,
        prompt_kind=kind,
        custom_id_column=spec.input.custom_id,
        template_columns=read,
    )


def _place(source: SourceFile, line: int, row: int) -> str:
    name = Path(source.name).name
    return f"{name} line {line}" if line else f"{name} row {row} (from 0)"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where columns were looked for, in words."""

    first_file: str
    num_more: int
    columns: Sequence[str]

    def __str__(self) -> str:
        return self.first_file + (f" and {self.num_more} more" if self.num_more else "")

    @property
    def listed(self) -> str:
        shown = ", ".join(repr(name) for name in self.columns[:40])
        more = len(self.columns) - 40
        return (shown or "none") + (f" and {more} more" if more > 0 else "")


class _ChunkBuilder:
    """Gathers rows into chunks of CHUNK_ROWS. Where a row's first byte is not known (formats that
    are not of lines), a chunk's offset is the number of rows before it."""

    def __init__(self, file: int, kind: str) -> None:
        self._file = file
        self._has_offsets = kind in LINES
        self._chunks: list[InputChunk] = []
        self._first = self._rows = self._offset = self._end = self._line = 0
        self._num_before = 0

    def add(self, row: int, *, offset: int, num_bytes: int, line: int) -> None:
        if self._rows == 0:
            self._first, self._line = row, line
            self._offset = offset if self._has_offsets else self._num_before
        self._rows += 1
        self._num_before += 1
        self._end = offset + num_bytes if self._has_offsets else self._offset
        if self._rows == CHUNK_ROWS:
            self._close()

    def finish(self) -> list[InputChunk]:
        if self._rows:
            self._close()
        return self._chunks

    def _close(self) -> None:
        self._chunks.append(
            InputChunk(
                file=self._file,
                first_row=self._first,
                num_rows=self._rows,
                offset=self._offset,
                num_bytes=self._end - self._offset,
                line=self._line,
            )
        )
        self._rows = 0


def _pinned_file(
    source: SourceFile, chunks: Sequence[InputChunk], first_row: int, num_rows: int
) -> InputFile:
    stat = source.path.stat()
    num_bytes = used_bytes_of(source.format, chunks)
    return InputFile(
        path=str(source.path),
        format=source.format,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        digest=source.digest or digest_of_file(source.path, num_bytes),
        first_row=first_row,
        num_rows=num_rows,
        origin=source.origin.name if source.origin is not None else "",
        origin_mark=source.origin.mark if source.origin is not None else "",
    )


# -- columns ---------------------------------------------------------------------------------------


def _looked_at(spec: JobSpec, prompts: Sequence[str] | None) -> frozenset[str] | None:
    """The columns that a job reads, given those that may hold its prompt; None for all."""
    if spec.input.keep == "all" or prompts is None:
        return None
    named = {*prompts, spec.input.custom_id, *spec.input.keep}
    return frozenset(name for name in named if name) | set(spec.generation.per_row)


def _named_prompts(spec: JobSpec) -> Sequence[str] | None:
    """The columns that may hold a prompt, before any row is read; None where each may."""
    if spec.input.template is not None:
        return PromptTemplate(spec.input.template).columns
    named = spec.input.messages or spec.input.prompt
    return PROMPT_COLUMNS if named is None else (named,)


def _template_columns(spec: JobSpec, schema: pa.Schema, place: _Place) -> tuple[str, ...]:
    """The columns that the template reads; InputError for one that is not there."""
    if spec.input.template is None:
        return ()
    template = PromptTemplate(spec.input.template)
    for name in template.named:
        if name not in schema.names:
            raise InputError(
                f"input.template: no column {name!r} in {place}; its columns: {place.listed}"
            )
    return tuple(schema.names) if template.columns is None else template.columns


def _schema_of_nothing(spec: JobSpec) -> pa.Schema:
    """No rows tell no columns: those that the spec names are there, and hold nothing."""
    prompts = _named_prompts(spec) or ()
    if spec.input.template is None:
        prompts = (spec.input.messages or spec.input.prompt or "prompt",)
    named = [*prompts, spec.input.custom_id]
    named += [*(() if spec.input.keep == "all" else spec.input.keep), *spec.generation.per_row]
    return pa.schema([(name, pa.null()) for name in dict.fromkeys(named) if name])


def _one_schema(scans: Sequence[tuple[SourceFile, TableScan]]) -> pa.Schema:
    """The schema that holds the rows of every file: types are widened where nothing is lost."""
    schema = scans[0][1].schema
    for source, scan in scans[1:]:
        for field in scan.schema:
            was = schema.field(field.name).type if field.name in schema.names else field.type
            if not _is_of_one_kind(was, field.type):
                raise InputError(
                    f"{source.name}: column {field.name!r} is {field.type}, and "
                    f"{was} in {scans[0][0].path.name}"
                )
        schema = pa.unify_schemas(_filled(schema, scan.schema), promote_options="permissive")
    if len(scans) > 1:  # a column that one file lacks is null there
        common = set.intersection(*(set(scan.schema.names) for _, scan in scans))
        schema = pa.schema(
            [field if field.name in common else field.with_nullable(True) for field in schema]
        )
    return schema


def _is_of_one_kind(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether one type holds the values of both: text is no bytes, though Arrow would make it so.

    Whole numbers among others are looked at when they are read: all must be exact.
    """
    one, other = filled_type(one, other), filled_type(other, one)
    if ("binary" in str(one)) != ("binary" in str(other)):
        return False
    try:
        schemas = [pa.schema([("x", each)]) for each in (one, other)]
        pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid):
        return False
    return True


def _filled(one: pa.Schema, other: pa.Schema) -> list[pa.Schema]:
    """Both schemas, with what is nulls in one of them, at any depth, of the other's type."""
    return [_filled_from(one, other), _filled_from(other, one)]


def _filled_from(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.schema(
        [
            field.with_type(filled_type(field.type, other.field(field.name).type))
            if field.name in other.names
            else field
            for field in schema
        ]
    )


def _check_named_columns(spec: JobSpec, schema: pa.Schema, place: _Place) -> None:
    """Every column that the spec names must be there, with a type that can serve."""
    named = [
        ("input.messages", spec.input.messages),
        ("input.prompt", spec.input.prompt),
        ("input.custom_id", spec.input.custom_id),
        *(() if spec.input.keep == "all" else (("input.keep", each) for each in spec.input.keep)),
        *(("generation.per_row", each) for each in spec.generation.per_row),
    ]
    for key, name in named:
        if name is not None and name not in schema.names:
            raise InputError(f"{key}: no column {name!r} in {place}; its columns: {place.listed}")
    if spec.input.custom_id is not None:
        kind = schema.field(spec.input.custom_id).type
        if not (is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
            raise InputError(
                f"input.custom_id: column {spec.input.custom_id!r} is {kind}; "
                "an id is text or a whole number"
            )


def _prompt_column(spec: JobSpec, schema: pa.Schema, place: _Place) -> tuple[str, PromptKind]:
    """The column that prompts are made of: the one that is named, else the only one that may be."""
    given = spec.input
    if given.messages is not None:
        return _named_column("input.messages", given.messages, "messages", schema)
    if given.prompt is not None:
        return _named_column("input.prompt", given.prompt, "prompt", schema)
    found = [name for name in PROMPT_COLUMNS if name in schema.names]
    if not found:
        raise InputError(
            f"no prompt column in {place}: none is named {', '.join(PROMPT_COLUMNS)}; "
            "set input.prompt (--prompt) or input.messages (--messages) to one of its columns, or "
            f"input.template (--template) for several of them: {place.listed}"
        )
    if len(found) > 1:
        raise InputError(
            f"several columns of {place} could be the prompt: {', '.join(found)}; "
            "say which with input.prompt (--prompt)"
            + (" or input.messages (--messages)" if _kinds(schema, found) & {"messages"} else "")
        )
    kinds = _kinds(schema, found)
    if not kinds:
        raise InputError(
            f"column {found[0]!r} of {place} is {schema.field(found[0]).type}, neither text nor "
            f"messages; set input.prompt (--prompt) to one of its columns: {place.listed}"
        )
    if kinds == {"prompt"} and found[0] in CHAT_COLUMNS and is_text(schema.field(found[0]).type):
        raise InputError(
            f"column {found[0]!r} of {place} is text, not a list of role and content; "
            "--prompt reads it as a text"
        )
    return found[0], "messages" if kinds == {"messages"} else "prompt"


def _kinds(schema: pa.Schema, names: Sequence[str]) -> set[PromptKind]:
    """What prompts the columns can be; a column of nulls can be either, and is said to be text."""
    kinds: set[PromptKind] = set()
    for name in names:
        kind = schema.field(name).type
        if is_messages(kind):
            kinds.add("messages")
        elif is_text(kind) or pa.types.is_null(kind):
            kinds.add("prompt")
    return kinds


def _named_column(
    key: str, name: str, wanted: PromptKind, schema: pa.Schema
) -> tuple[str, PromptKind]:
    kinds = _kinds(schema, [name])
    kind = schema.field(name).type
    if kinds != {wanted} and not pa.types.is_null(kind):
        noun = "text" if wanted == "prompt" else "a list of role and content"
        other = {
            "messages": "; a list of messages goes with input.messages (--messages)",
            "prompt": "; text goes with input.prompt (--prompt)",
        }
        hint = "".join(other[each] for each in kinds)
        raise InputError(f"{key}: column {name!r} is {kind}, not {noun}{hint}")
    return name, wanted


# -- rows ------------------------------------------------------------------------------------------


def _looked_through(pinned: PinnedInput) -> PinnedInput:
    """The same with its faults counted. InputError naming both rows where a custom_id stands twice.

    Rows with a fault count too, where their id can be read: they become error rows of that id.
    Keeps 16 bytes a row.
    """
    column = pinned.custom_id_column
    schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
    if column is not None and pa.types.is_null(schema.field(column).type):
        column = None
    columns = [] if column is None else [column]
    is_text = bool(pinned.files) and pinned.files[0].format in TEXTS
    if not (pinned.copy or is_text or columns):
        return pinned  # a table in place is read when its rows are
    hashes, rows = array("Q"), array("Q")
    faults: list[str] = []
    num_faults = row = 0
    reader = InputReader(pinned, columns=columns)
    for chunk in reader.chunks():
        num_faults += len(chunk.faults)
        for place in sorted(chunk.faults)[: _SHOWN_FAULTS - len(faults)]:
            where = reader.place(row + place, chunk.lines[place])
            faults.append(f"{where}: {chunk.faults[place]}")
        values = chunk.table.column(column).to_pylist() if column is not None else ()
        for place, value in enumerate(values):
            known = chunk.faults[place].custom_id if place in chunk.faults else value
            if known is not None:
                digest = hashlib.blake2b(str(known).encode(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little"))
                rows.append(row + place)
        row += len(chunk.lines)
    _check_unique(column, hashes, rows, reader)
    return replace(pinned, num_faults=num_faults, faults=tuple(faults))


def _check_unique(
    column: str | None, hashes: array[int], rows: array[int], reader: InputReader
) -> None:
    if not hashes:
        return
    values = pa.Array.from_buffers(pa.uint64(), len(hashes), [None, pa.py_buffer(hashes)])
    order = pc.array_sort_indices(values)
    ordered = values.take(order)
    twice = pc.equal(ordered.slice(1), ordered.slice(0, len(ordered) - 1))
    for place in pc.indices_nonzero(twice).to_pylist():
        pair = sorted(rows[order[place + step].as_py()] for step in (0, 1))
        read = reader.read(pair)
        first, second = (
            read.faults[place].custom_id if place in read.faults else value
            for place, value in enumerate(read.table.column(column).to_pylist())
        )
        if str(first) == str(second):
            raise InputError(
                f"input.custom_id: {first!r} stands twice in column {column!r}: "
                f"{reader.where(pair[0])} and {reader.where(pair[1])}"
            )
