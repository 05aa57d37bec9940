"""`--where` and `--sql`: rows asked for in SQL, which DuckDB reads.

finish_reason = 'stop' and usage.completion_tokens > 20
level in (1, 2) and answer is not null
"a column's odd name" > '2026-01-31'

What is asked sees the rows of the job and nothing else: no files, no network, no variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.scan import damaged, fault_of_part

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "memory_limit": "4GB",
}
_ROW = "__spot_row"
_BATCH_ROWS = 8_192


class Filter:
    """The rows of a job's tables for which an SQL condition is true; ValueError says what is wrong.

    DuckDB says which rows they are, and Arrow takes them: columns keep their types.
    """

    def __init__(self, condition: str, schema: pa.Schema) -> None:
        self._condition = condition
        self._columns, self._left_out = _readable(schema)
        self._connection = _connected()
        self.apply(schema.empty_table())

    def apply(self, table: pa.Table) -> pa.Table:
        numbers = pa.array(np.arange(table.num_rows))
        seen = table.select(self._columns).append_column(_ROW, numbers)
        with _plainly("--where", self._condition, self._left_out):
            rows = self._connection.from_arrow(seen).filter(self._condition)
            taken = rows.project(f'"{_ROW}"').fetchnumpy()[_ROW]
        mask = np.zeros(table.num_rows, np.bool_)
        mask[taken] = True
        return table.filter(pa.array(mask))


class Query:
    """What an SQL SELECT over the published rows, as the table `data`, gives: a stream of tables.

    OutputError names a part that is damaged, ValueError says what is wrong with the SELECT.
    """

    def __init__(self, job: JobDirectory, select: str) -> None:
        self._select = select
        columns, self._left_out = _readable(job.schema)
        parts = []
        for part in range(job.num_parts):
            path = job.data / job.part_name(part)
            if job.is_complete or path.exists():
                fault = fault_of_part(job, part)
                if fault is not None:
                    raise damaged(job, fault)
                parts.append(str(path))
        schema = pa.schema([job.schema.field(name) for name in columns])
        connection = _connected()
        data = pyarrow.dataset.dataset(parts, schema=schema, format="ipc")
        connection.register("data", data if parts else schema.empty_table())
        with _plainly("--sql", self._select, self._left_out):
            statements = duckdb.extract_statements(select)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise ValueError("--sql: wants one SELECT, over the table data")
            self._rows = connection.sql(select)
            self.schema: pa.Schema = self._rows.limit(0).to_arrow_table().schema

    def __iter__(self) -> Iterator[pa.Table]:
        with _plainly("--sql", self._select, self._left_out):
            for batch in self._rows.to_arrow_reader(_BATCH_ROWS):
                yield pa.Table.from_batches([batch])


def _connected() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:", config=_SETTINGS)
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET lock_configuration = true")
    return connection


def _readable(schema: pa.Schema) -> tuple[list[str], dict[str, str]]:
    """The columns that DuckDB can read, and why it cannot read the others."""
    schema = schema.remove_metadata()
    same = Counter(name.casefold() for name in schema.names)
    left_out = {
        name: "another column's name differs in case alone"
        for name in schema.names
        if same[name.casefold()] > 1
    }
    connection = _connected()

    def fits(names: list[str]) -> bool:
        try:
            connection.from_arrow(schema.empty_table().select(names)).limit(0).fetchall()
        except duckdb.Error:
            return False
        return True

    columns = [name for name in schema.names if name not in left_out]
    if not fits(columns):
        unread = [name for name in columns if not fits([name])]
        left_out |= {name: f"DuckDB reads no {schema.field(name).type}" for name in unread}
    return [name for name in columns if name not in left_out], left_out


@contextmanager
def _plainly(option: str, asked: str, left_out: dict[str, str]) -> Iterator[None]:
    """What DuckDB raises, as one line that names the option."""
    try:
        yield
    except duckdb.Error as error:
        text = str(error).partition("\nLINE ")[0]
        said = [f"{asked[:100]!r}: {' '.join(text.split())[:300]}"]
        if isinstance(error, duckdb.ParserException | duckdb.BinderException):
            said.append("in SQL texts stand in '', and odd names in \"\"")
        said += [
            f"column {name!r} cannot be asked for ({why[:100]})"
            for name, why in left_out.items()
            if f'"{name}"'.casefold() in text.casefold()
        ]
        raise ValueError(f"{option}: {'; '.join(said)}") from None
