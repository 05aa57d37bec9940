"""Results in the formats and shapes that other tools take, streamed part by part."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spot_batch.inputs.template_process import TemplateProcess
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.scan import read_part_of
from spot_batch.results.destination import check_destination, replacing
from spot_batch.results.load import without_maps
from spot_batch.results.where import Where

Format = Literal["parquet", "jsonl", "hf", "arrow-stream", "openai-batch"]
Shape = Literal["messages", "prompt-completion"]

COMPLETE_KEY = "spot_batch.complete"
_BY_SUFFIX: dict[str, Format] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".arrows": "arrow-stream",
}
# Ours that belong to a row; every other column of ours is a sample's own, and lists under `group`.
_OF_ROWS = ("custom_id", "row_index")
_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSpec:
    """What is exported and how it looks. `columns` empty is all of them.

    `shape` makes training columns of prompt and generation; `group` puts the samples of an input
    row into one row, with lists; `where` is an expression over columns (`store.where`).
    """

    format: Format
    shape: Shape | None = None
    group: bool = False
    columns: tuple[str, ...] = ()
    where: str | None = None

    def __post_init__(self) -> None:
        if self.shape is not None and self.group:
            raise ValueError("--group and --as exclude each other: a training row is one sample")
        if self.format == "openai-batch" and (
            self.shape or self.group or self.columns or self.where
        ):
            raise ValueError(
                "openai-batch has a form of its own: no --as, --group, --columns or --where"
            )
        for name in self.columns:
            if self.columns.count(name) > 1:
                raise ValueError(f"--columns: {name!r} is named twice")


def format_of(path: Path) -> Format:
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
    tables = _Tables(job, spec)
    with replacing(final) as made:
        _WRITERS[spec.format](tables, made)
    note = path.with_name(path.name + ".incomplete")
    if not job.is_complete and spec.format in ("jsonl", "openai-batch"):
        parts = sum((job.data / job.part_name(part)).exists() for part in range(job.num_parts))
        note.write_text(f"{parts} of {job.num_parts} parts were published\n")
    else:
        note.unlink(missing_ok=True)
    return tables.num_rows


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
        self._where = Where(spec.where, job.schema) if spec.where is not None else None
        empty = self._selected(self._shaped(job.schema.empty_table()))
        metadata = {**(job.schema.metadata or {}), COMPLETE_KEY: str(job.is_complete).lower()}
        self.schema = empty.schema.with_metadata(metadata)

    def __iter__(self) -> Iterator[pa.Table]:
        self.num_rows = 0
        tables: Iterator[pa.Table] = self._parts()
        if self.spec.group:
            tables = _grouped(tables, self._name("row_index"), self._is_of_row)
        for table in tables:
            shaped = self._shaped(table) if not self.spec.group else table
            chosen = self._selected(shaped).cast(self.schema)
            self.num_rows += chosen.num_rows
            yield chosen

    def _parts(self) -> Iterator[pa.Table]:
        for part in range(self.job.num_parts):
            table = read_part_of(self.job, "data", part)
            if table is None:
                continue
            yield table if self._where is None else self._where.filter(table)

    def _name(self, own: str) -> str:
        return self.job.spec.output.prefix + own

    def _is_of_row(self, name: str) -> bool:
        return name in self.job.kept or name in map(self._name, _OF_ROWS)

    def _shaped(self, table: pa.Table) -> pa.Table:
        if self.spec.group:
            return next(_grouped(iter([table]), self._name("row_index"), self._is_of_row))
        if self.spec.shape is None:
            return table
        given = self._prompts(table)
        system = self.job.spec.input.system
        prompts = [self._turns(value, system) for value in given.to_pylist()]
        answers = table[self._name("generation")]
        says = [{"role": "assistant", "content": each} for each in answers.to_pylist()]
        ids = {self._name("custom_id"): table[self._name("custom_id")]}
        if self.spec.shape == "messages":
            made = [[*turns, answer] for turns, answer in zip(prompts, says, strict=True)]
            shaped = {"messages": pa.array(made, pa.list_(_TURN))}
        elif self.job.pinned.prompt_kind == "prompt" and system is None:
            shaped = {"prompt": given, "completion": answers}
        else:
            shaped = {
                "prompt": pa.array(prompts, pa.list_(_TURN)),
                "completion": pa.array([[answer] for answer in says], pa.list_(_TURN)),
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
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        if system is None or (turns and turns[0]["role"] == "system"):
            return list(turns)
        return [{"role": "system", "content": system}, *turns]

    def _selected(self, table: pa.Table) -> pa.Table:
        if not self.spec.columns or self.spec.shape is not None:
            return table
        return table.select([self._known(name, table.schema) for name in self.spec.columns])

    def _known(self, name: str, schema: pa.Schema) -> str:
        if name not in schema.names:
            known = ", ".join(map(repr, schema.names))
            raise ValueError(f"--columns: no column {name!r}; there are: {known}")
        return name


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
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            for batch in table.to_batches(max_chunksize=1_024):
                for row in batch.to_pylist():
                    file.write(as_json(row) + "\n")


def _write_hf(tables: _Tables, path: Path) -> None:
    """As `save_to_disk` does: stream shards, which `load_from_disk` maps."""
    import datasets

    stream = path.with_name("stream")
    _write_stream(tables, stream, of_datasets=True)
    datasets.Dataset.from_file(str(stream)).save_to_disk(str(path))
    if not tables.job.is_complete:
        (path / "README.md").write_text("**Not complete**: more parts follow.\n")


def _write_openai(tables: _Tables, path: Path) -> None:
    """One response or error a request, as OpenAI's and vLLM's batch output has them."""
    tables.num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for _, samples in groupby(_outcomes(tables.job), key=lambda row: row["row_index"]):
            file.write(as_json(_response(tables.job, list(samples))) + "\n")
            tables.num_rows += 1


def _outcomes(job: JobDirectory) -> Iterator[dict[str, Any]]:
    """Rows of data/ and errors/ in the order of the input, under our names without the prefix."""
    prefix = job.spec.output.prefix
    wanted = ("custom_id", "row_index", "sample_index", "generation", "finish_reason", "usage")
    names = [name for name in wanted if prefix + name in job.schema.names]
    for part in range(job.num_parts):
        done = read_part_of(job, "data", part)
        if done is None:
            continue
        rows = done.select([prefix + name for name in names]).rename_columns(names).to_pylist()
        failed = read_part_of(job, "errors", part)
        rows += failed.to_pylist() if failed is not None else []
        yield from sorted(rows, key=lambda row: (row["row_index"], row["sample_index"]))


def _response(job: JobDirectory, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    stem = f"{job.fingerprint[:12]}-{first['row_index']}"
    answer: dict[str, Any] = {"id": f"batch_req_{stem}", "custom_id": first["custom_id"]}
    errors = [sample for sample in samples if "code" in sample]
    if errors:
        error = {"code": errors[0]["code"], "message": errors[0]["message"]}
        return {**answer, "response": None, "error": error}
    usages = [sample.get("usage") or {} for sample in samples]
    completion = sum(usage.get("completion_tokens", 0) for usage in usages)
    prompt = usages[0].get("prompt_tokens", 0)
    body = {
        "id": f"chatcmpl-{stem}",
        "object": "chat.completion",
        "created": 0,  # no clock: the same job writes the same bytes
        "model": str(job.fields.get("model.name", job.spec.model.target.path)),
        "choices": [
            {
                "index": sample["sample_index"],
                "message": {"role": "assistant", "content": sample["generation"]},
                "logprobs": None,
                "finish_reason": sample["finish_reason"],
            }
            for sample in samples
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{stem}", "body": body}
    return {**answer, "response": response, "error": None}


_WRITERS: dict[str, Callable[[_Tables, Path], None]] = {
    "parquet": _write_parquet,
    "jsonl": _write_jsonl,
    "hf": _write_hf,
    "arrow-stream": _write_stream,
    "openai-batch": _write_openai,
}


def as_json(row: object) -> str:
    """One line; what JSON has no word for is text (times, decimals, bytes) or null (NaN)."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value
