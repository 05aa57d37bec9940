"""Results in the formats and shapes that other tools take, streamed part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spot_batch.inputs.chat import SHAREGPT, in_roles
from spot_batch.inputs.template_process import TemplateProcess
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.scan import read_part_of
from spot_batch.results.destination import check_destination, replacing
from spot_batch.results.json_lines import write_lines
from spot_batch.results.load import without_maps
from spot_batch.results.query import Filter, Query
from spot_batch.results.responses import responses

ExportFormat = Literal["parquet", "jsonl", "hf", "arrow-stream", "openai-batch"]
TrainingForm = Literal["messages", "prompt-completion"]

COMPLETE_KEY = "spot_batch.complete"
_BY_SUFFIX: dict[str, ExportFormat] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".arrows": "arrow-stream",
}
_FULL_NAMES = {"parquet": "Parquet", "hf": "a saved dataset"}
# Ours that belong to a row; every other column of ours is a sample's own, and lists under `group`.
_OF_ROWS = ("custom_id", "row_index")
_TURN = {"role": pa.string(), "content": pa.string()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpec:
    """What is exported and how it looks. `columns` empty is all of them.

    `form` makes training columns of prompt and generation; `group` puts the samples of an input
    row into one row, with lists; `where` is an SQL condition, and `sql` a SELECT over the rows as
    the table `data`.
    """

    format: ExportFormat
    form: TrainingForm | None = None
    group: bool = False
    columns: tuple[str, ...] = ()
    where: str | None = None
    sql: str | None = None

    def __post_init__(self) -> None:
        if self.form is not None and self.group:
            raise ValueError("--group and --as exclude each other: a training row is one sample")
        has_form = bool(self.form or self.group or self.columns or self.where)
        if self.format == "openai-batch" and (has_form or self.sql):
            raise ValueError(
                "openai-batch has a form of its own: no --as, --group, --columns, --where or --sql"
            )
        if self.sql is not None and has_form:
            raise ValueError("--sql says all of it: no --as, --group, --columns or --where")
        for name in self.columns:
            if self.columns.count(name) > 1:
                raise ValueError(f"--columns: {name!r} is named twice")


def format_of(path: Path) -> ExportFormat:
    """By the name; one without an ending is a folder for `load_from_disk`.

    ValueError for an ending that is none of ours.
    """
    suffix = path.suffix.lower()
    if suffix and suffix not in _BY_SUFFIX:
        raise ValueError(
            f"{path}: no format goes by the ending {suffix!r}; known are {', '.join(_BY_SUFFIX)}, "
            "and a name without an ending for a folder (--format says it for any name)"
        )
    return _BY_SUFFIX.get(suffix, "hf")


def check_holds(schema: pa.Schema, kind: ExportFormat) -> None:
    """ValueError for the first column whose type a format lacks; JSON has text for what it lacks.

    Parquet lacks few types, and datasets' saved form lacks others.
    """
    for field in schema:
        empty = pa.schema([field]).empty_table()
        try:
            if kind == "parquet":
                pq.write_table(empty, pa.BufferOutputStream())
            elif kind == "hf":
                _features(without_maps(empty).schema)
        except (pa.ArrowException, ValueError, TypeError) as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(
                f"column {field.name!r} is {str(field.type)[:200]}, which {_FULL_NAMES[kind]} "
                f"cannot hold ({why}); leave it out, or take another format"
            ) from None


def _features(schema: pa.Schema) -> object:
    import datasets

    return datasets.Features.from_arrow_schema(schema)


def export(job: JobDirectory, path: Path, spec: ExportSpec, *, partial: bool = False) -> int:
    """Writes the published rows to `path`, whole or not at all; returns how many rows.

    A job that is not complete is refused unless `partial`; what is written then says so: in its
    schema's metadata, in a card, or for lines of JSON in a file `PATH.incomplete` beside it.
    Raises OutputError for a `path` that may not be taken (`check_destination`) and for parts that
    cannot be read, ValueError for a `spec` that does not fit the job.
    """
    if not job.is_complete and not partial:
        raise OutputError(f"{job.root}: not complete yet; --partial exports the parts there are")
    final = check_destination(job, path, is_folder=spec.format == "hf")
    with replacing(final) as made:
        if spec.format == "openai-batch":
            num_rows = write_lines(made, responses(job))
        else:
            tables = _Tables(job, spec)
            _WRITERS[spec.format](tables, made)
            num_rows = tables.num_rows
    note = path.with_name(path.name + ".incomplete")
    if not job.is_complete and spec.format in ("jsonl", "openai-batch"):
        parts = sum((job.data / job.part_name(part)).exists() for part in range(job.num_parts))
        note.write_text(f"{parts} of {job.num_parts} parts were published\n")
    else:
        note.unlink(missing_ok=True)
    return num_rows


def as_dataset(job: JobDirectory, spec: ExportSpec, scratch: Path) -> Any:
    """The rows as a `datasets.Dataset` over a file at `scratch`, for pushing."""
    import datasets

    _write_stream(_Tables(job, spec), scratch, of_datasets=True)
    return datasets.Dataset.from_file(str(scratch))


class _Tables:
    """The tables of an export, one a part at most; counts the rows that were taken."""

    def __init__(self, job: JobDirectory, spec: ExportSpec) -> None:
        self.job = job
        self.spec = spec
        self.num_rows = 0
        self._filter = Filter(spec.where, job.schema) if spec.where is not None else None
        self._query = Query(job, spec.sql) if spec.sql is not None else None
        if self._query is not None:
            schema = self._query.schema
        else:
            schema = self._selected(self._formed(job.schema.empty_table())).schema
        metadata = {**(job.schema.metadata or {}), COMPLETE_KEY: str(job.is_complete).lower()}
        self.schema = schema.with_metadata(metadata)
        check_holds(schema, spec.format)

    def __iter__(self) -> Iterator[pa.Table]:
        self.num_rows = 0
        for table in self._chosen() if self._query is None else self._query:
            self.num_rows += table.num_rows
            yield table.cast(self.schema)

    def _chosen(self) -> Iterator[pa.Table]:
        if self.spec.group:
            tables = _grouped(self._parts(), self._name("row_index"), self._is_of_row)
        else:
            tables = (self._formed(table) for table in self._parts())
        return (self._selected(table) for table in tables)

    def _parts(self) -> Iterator[pa.Table]:
        for part in range(self.job.num_parts):
            table = read_part_of(self.job, "data", part)
            if table is None:
                continue
            yield table if self._filter is None else self._filter.apply(table)

    def _name(self, own: str) -> str:
        return self.job.spec.output.prefix + own

    def _is_of_row(self, name: str) -> bool:
        return name in self.job.kept or name in map(self._name, _OF_ROWS)

    def _formed(self, table: pa.Table) -> pa.Table:
        if self.spec.group:
            return next(_grouped(iter([table]), self._name("row_index"), self._is_of_row))
        if self.spec.form is None:
            return table
        given = self._prompts(table)
        system = self.job.spec.input.system
        prompts = [self._turns(value, system) for value in given.to_pylist()]
        answers = table[self._name("generation")]
        kind = _turns_type(given.type)
        says = [_answer(kind, each) for each in answers.to_pylist()]
        ids = {self._name("custom_id"): table[self._name("custom_id")]}
        if self.spec.form == "messages":
            made = [[*turns, answer] for turns, answer in zip(prompts, says, strict=True)]
            shaped = {"messages": pa.array(made, kind)}
        elif self.job.pinned.prompt_kind == "prompt" and system is None:
            shaped = {"prompt": given, "completion": answers}
        else:
            shaped = {
                "prompt": pa.array(prompts, kind),
                "completion": pa.array([[answer] for answer in says], kind),
            }
        extra = {
            name: table[self._known(name, table.schema)]
            for name in self.spec.columns
            if name not in shaped and name not in ids
        }
        return pa.table({**ids, **shaped, **extra})

    def _prompts(self, table: pa.Table) -> pa.ChunkedArray:
        """What stood in the place of the user's turns: a column, or a text of several."""
        pinned, text = self.job.pinned, self.job.spec.input.template
        for name in pinned.prompt_columns:
            if name not in table.column_names:
                raise ValueError(
                    f"--as wants the prompt column {name!r}, which input.keep left out"
                )
        if text is None:
            return table[pinned.prompt_column]
        template = TemplateProcess(text)
        rows = table.select(pinned.prompt_columns).to_pylist()
        return pa.chunked_array([[template.render(row) for row in rows]], pa.string())

    def _turns(self, prompt: Any, system: str | None) -> list[Any]:
        if isinstance(prompt, str):
            turns = [{"role": "user", "content": prompt}]
        else:
            turns = [in_roles(each) for each in prompt or ()]
        if system is None or (turns and turns[0]["role"] == "system"):
            return list(turns)
        return [{"role": "system", "content": system}, *turns]

    def _selected(self, table: pa.Table) -> pa.Table:
        if not self.spec.columns or self.spec.form is not None:
            return table
        return table.select([self._known(name, table.schema) for name in self.spec.columns])

    def _known(self, name: str, schema: pa.Schema) -> str:
        if name not in schema.names:
            known = ", ".join(map(repr, schema.names))
            raise ValueError(f"--columns: no column {name!r}; there are: {known}")
        return name


def _turns_type(prompt: pa.DataType) -> pa.ListType:
    """Lists of role and content and of whatever else the messages of the input have."""
    fields = dict(_TURN)
    if pa.types.is_list(prompt) or pa.types.is_large_list(prompt):
        given = [field for field in prompt.value_type if field.name not in SHAREGPT]
        fields |= {field.name: field.type for field in given}
    return pa.list_(pa.struct(list(fields.items())))


def _answer(kind: pa.ListType, text: str) -> dict[str, Any]:
    """The generation as a message, in parts where the input's messages are in parts."""
    is_text = kind.value_type.field("content").type in (pa.string(), pa.large_string())
    content = text if is_text else [{"type": "text", "text": text}]
    return {"role": "assistant", "content": content}


def _grouped(
    tables: Iterator[pa.Table], key: str, is_of_row: Callable[[str], bool]
) -> Iterator[pa.Table]:
    """Neighbouring rows of one `key` become one; a group may reach over the end of a table."""
    before: pa.Table | None = None
    for table in tables:
        if before is not None:
            table = pa.concat_tables([before, table])
        keys = table[key].combine_chunks()
        if not len(keys):
            before = table
            continue
        new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        starts = [0, *(at + 1 for at in pc.indices_nonzero(new).to_pylist())]
        before = table.slice(starts[-1])
        if len(starts) > 1:
            yield _folded(table.slice(0, starts[-1]), starts, is_of_row)
    if before is not None:
        yield _folded(before, [0, before.num_rows] if before.num_rows else [0], is_of_row)


def _folded(table: pa.Table, bounds: list[int], is_of_row: Callable[[str], bool]) -> pa.Table:
    firsts, offsets = pa.array(bounds[:-1], pa.int64()), pa.array(bounds, pa.int32())
    columns = {}
    for name in table.column_names:
        chunks = table[name].chunks
        values = pa.concat_arrays(chunks) if chunks else pa.array([], table[name].type)
        columns[name] = (
            values.take(firsts) if is_of_row(name) else pa.ListArray.from_arrays(offsets, values)
        )
    return pa.table(columns)


# -- writing ---------------------------------------------------------------------------------------


def _write_parquet(tables: _Tables, path: Path) -> None:
    with pq.ParquetWriter(path, tables.schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def _write_stream(tables: _Tables, path: Path, *, of_datasets: bool = False) -> None:
    schema = tables.schema
    if of_datasets:
        schema = without_maps(schema.empty_table()).schema
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for table in tables:
            writer.write_table(without_maps(table) if of_datasets else table)


def _write_jsonl(tables: _Tables, path: Path) -> None:
    batches = (batch for table in tables for batch in table.to_batches(max_chunksize=1_024))
    write_lines(path, (row for batch in batches for row in batch.to_pylist()))


def _write_hf(tables: _Tables, path: Path) -> None:
    """As `save_to_disk` does: stream shards, which `load_from_disk` maps."""
    import datasets

    stream = path.with_name("stream")
    _write_stream(tables, stream, of_datasets=True)
    datasets.Dataset.from_file(str(stream)).save_to_disk(str(path))
    if not tables.job.is_complete:
        (path / "README.md").write_text("**Not complete**: more parts follow.\n")


_WRITERS: dict[ExportFormat, Callable[[_Tables, Path], None]] = {
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "hf": _write_hf,
    "arrow-stream": _write_stream,
}
