"""Results for other tools: formats, shapes, filters, snapshots, one file at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import spot_batch
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from spot_batch.results.export import ExportFormat, ExportSpec, check_holds, export, format_of
from tests.inputs.test_requests import request
from tests.jobdir.jobs import make_job, make_outcomes, prompts, write_jsonl
from tests.jobdir.test_parts import hurtful_table


@pytest.fixture(scope="module", params=[100, 3], ids=["one part", "many parts"])
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> JobDirectory:
    """Ten rows of two samples; parts of three cut between samples of a row."""
    job = make_job(
        tmp_path_factory.mktemp("job"),
        hurtful_table(10),
        generation__n=2,
        output__rows_per_part=request.param,
    )
    publish_segment(job, make_outcomes(job, range(20), failed={4, 5, 6}))
    finalize(job, check=None, facts=None)
    return job


WANT = [each for each in range(20) if each not in (4, 5, 6)]


_PLACE = ("row_index", "sample_index")


def _values(table: pa.Table) -> Callable[[str], list[int]]:
    return lambda name: table[name].to_pylist()


def _given(turn: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in turn.items() if value is not None}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_parquet_keeps_types_and_metadata(job: JobDirectory, tmp_path: Path) -> None:
    assert export(job, tmp_path / "x.parquet", ExportSpec(format="parquet")) == 17
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.schema.equals(job.schema)
    assert table.schema.metadata[b"spot_batch.complete"] == b"true"
    loaded = spot_batch.load(job.root).data.table.replace_schema_metadata(None)
    assert table.drop(["nan"]).equals(loaded.drop(["nan"]))
    assert pandas.read_parquet(tmp_path / "x.parquet")["row_index"].nunique() == 9
    counted = duckdb.sql(f"select count(*) from '{tmp_path}/x.parquet'").limit(1).fetchall()
    assert counted == [(17,)]


def test_json_lines_hold_every_value(job: JobDirectory, tmp_path: Path) -> None:
    export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl"))
    rows = lines(tmp_path / "x.jsonl")
    assert [row["row_index"] for row in rows] == [each // 2 for each in WANT]
    assert rows[0]["extreme"] == 2**63 - 1
    assert rows[0]["nan"] is None
    assert rows[0]["when"] == "2026-01-01T00:00:00+00:00"
    assert rows[2]["exact"] == "0.01"


def test_a_saved_dataset_and_a_stream(job: JobDirectory, tmp_path: Path) -> None:
    export(job, tmp_path / "saved", ExportSpec(format="hf"))
    assert len(datasets.load_from_disk(str(tmp_path / "saved"))) == 17
    export(job, tmp_path / "x.arrows", ExportSpec(format="arrow-stream"))
    with pa.ipc.open_stream(tmp_path / "x.arrows") as reader:
        assert reader.read_all().num_rows == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "x.arrows"]


def test_maps_are_lists_of_key_and_value_where_a_dataset_holds_them(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.table(
        {
            "prompt": ["a", "b"],
            "m": pa.array([[("k", 1)], None], kind),
            "deep": pa.array([[[("k", 2)]], []], pa.list_(kind)),
        }
    )
    job = make_job(tmp_path, table)
    publish_segment(job, make_outcomes(job, range(2)))
    finalize(job, check=None, facts=None)
    assert "load_dataset" not in job.readme.read_text()  # which has no type for them
    assert polars.scan_ipc(job.data / "*.arrow").collect().height == 2
    assert pyarrow.dataset.dataset(job.data, format="ipc").count_rows() == 2
    export(job, tmp_path / "saved", ExportSpec(format="hf"))
    for loaded in (datasets.load_from_disk(str(tmp_path / "saved")), spot_batch.load(job.root)):
        assert loaded["m"] == [[{"key": "k", "value": 1}], None]
        assert loaded["deep"] == [[[{"key": "k", "value": 2}]], []]
    export(job, tmp_path / "x.parquet", ExportSpec(format="parquet"))
    assert pq.read_schema(tmp_path / "x.parquet").field("m").type == kind


def test_grouped_samples_are_lists_of_their_row(job: JobDirectory, tmp_path: Path) -> None:
    spec = ExportSpec(format="jsonl", group=True, columns=("prompt", "sample_index", "generation"))
    assert export(job, tmp_path / "x.jsonl", spec) == 9
    rows = lines(tmp_path / "x.jsonl")
    assert rows[0]["generation"] == ["sample 0 is 0 é😀", "sample 1 is 1 é😀"]
    assert [row["sample_index"] for row in rows][:4] == [[0, 1], [0, 1], [1], [0, 1]]
    assert [row["prompt"] for row in rows][:3] == ["p0", "p1", "p3"]


def test_training_shapes(job: JobDirectory, tmp_path: Path) -> None:
    export(job, tmp_path / "m.jsonl", ExportSpec(format="jsonl", form="messages"))
    assert lines(tmp_path / "m.jsonl")[2] == {
        "custom_id": "1",
        "messages": [
            {"role": "user", "content": "p1"},
            {"role": "assistant", "content": "sample 2 is 4 é😀"},
        ],
    }
    spec = ExportSpec(format="jsonl", form="prompt-completion", columns=("maybe",))
    export(job, tmp_path / "p.jsonl", spec)
    first = lines(tmp_path / "p.jsonl")[2]
    assert first == {
        "custom_id": "1",
        "prompt": "p1",
        "completion": "sample 2 is 4 é😀",
        "maybe": 1,
    }


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("finish_reason == 'stop' and row_index >= 5", 5),
        ("usage.completion_tokens in (0, 1) or maybe is null", 11),
        ("deep.b.c > 1", 2),
        ("row_index = -1", 0),
        ("maybe != 1", 8),  # of a null nobody knows
    ],
)
def test_rows_are_filtered(job: JobDirectory, tmp_path: Path, where: str, count: int) -> None:
    taken = export(job, tmp_path / "x.parquet", ExportSpec(format="parquet", where=where))
    assert taken == pq.read_table(tmp_path / "x.parquet").num_rows == count


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("finish = 1", '--where: .*column "finish" not found'),
        ("usage.tokens = 1", '--where: .*"tokens"'),
        ("__import__('os')", "--where: .*__import__ does not exist"),
        ("prompt =", "--where: .*syntax error"),
        ("prompt > 1", "--where: 'prompt > 1': Binder Error: Cannot compare"),
    ],
)
def test_a_filter_that_means_nothing_is_said(
    job: JobDirectory, tmp_path: Path, where: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export(job, tmp_path / "x.parquet", ExportSpec(format="parquet", where=where))
    assert not list(tmp_path.iterdir())


def test_a_select_over_all_rows_is_exported(job: JobDirectory, tmp_path: Path) -> None:
    select = """
        select finish_reason, count(*) as num, max(generation) as last
        from data where row_index > (select min(row_index) from data)
        group by finish_reason order by num desc
    """
    taken = export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl", sql=select))
    assert taken == 2
    want = [
        {"finish_reason": "stop", "num": 8, "last": "sample 9 is 81 é😀"},
        {"finish_reason": "length", "num": 7, "last": "sample 8 is 64 é😀"},
    ]
    assert lines(tmp_path / "x.jsonl") == want
    spec = ExportSpec(format="parquet", sql="select * exclude (generation) from data")
    assert export(job, tmp_path / "x.parquet", spec) == 17
    table = pq.read_table(tmp_path / "x.parquet")
    assert [2 * row + of for row, of in zip(*map(_values(table), _PLACE), strict=True)] == WANT
    spec = ExportSpec(format="hf", sql="from data limit 3")
    assert export(job, tmp_path / "saved", spec) == 3
    assert len(datasets.load_from_disk(str(tmp_path / "saved"))) == 3


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("select finish from data", '--sql: .*column "finish" not found'),
        ("select", "--sql: "),
        ("drop table data", "--sql: wants one SELECT"),
        ("select 1; select 2", "--sql: wants one SELECT"),
        ("copy data to 'y.csv'", "--sql: wants one SELECT"),
        ("select * from read_text('/etc/hostname')", "--sql: .*disabled by configuration"),
        ("select * from '/etc/hostname'", "--sql: .*does not exist"),
        ("select * from WANT", "--sql: .*does not exist"),
        ("select cast(generation as int) from data", "--sql: .*Could not convert"),
        ("select [interval 1 day] as x", "column 'x' is .*which Parquet cannot hold"),
    ],
)
def test_a_select_sees_the_rows_and_nothing_else(
    job: JobDirectory, tmp_path: Path, select: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        export(job, tmp_path / "x.parquet", ExportSpec(format="parquet", sql=select))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_message_keeps_every_field_that_it_has(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi", "name": "ada"},
        {"role": "assistant", "content": "Yes?", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Bye"},
    ]
    job = make_job(tmp_path, [{"messages": turns}])
    publish_segment(job, make_outcomes(job, [0]))
    finalize(job, check=None, facts=None)
    export(job, tmp_path / "m.jsonl", ExportSpec(format="jsonl", form="messages"))
    answer = {"role": "assistant", "content": "sample 0 is 0 é😀"}
    made = lines(tmp_path / "m.jsonl")[0]["messages"]
    assert [_given(turn) for turn in made] == [*turns, answer]  # type: ignore[attr-defined]
    export(job, tmp_path / "p.jsonl", ExportSpec(format="jsonl", form="prompt-completion"))
    row = lines(tmp_path / "p.jsonl")[0]
    assert [_given(turn) for turn in row["prompt"]] == turns  # type: ignore[attr-defined]


def test_a_type_that_a_format_lacks_is_named_with_its_column() -> None:
    schema = pa.schema([("fine", pa.float16()), ("odd", pa.struct([]))])
    with pytest.raises(ValueError, match="column 'odd' is struct<>, which Parquet cannot hold"):
        check_holds(schema, "parquet")
    check_holds(schema, "jsonl")
    check_holds(schema, "arrow-stream")
    odd = pa.schema([("odd", pa.month_day_nano_interval())])
    with pytest.raises(ValueError, match=r"column 'odd' .* a saved dataset cannot hold"):
        check_holds(odd, "hf")


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "hf", "arrow-stream", "openai-batch"])
def test_no_rows_are_exported_too(tmp_path: Path, kind: ExportFormat) -> None:
    (tmp_path / "none.jsonl").write_text("")
    job = make_job(tmp_path, tmp_path / "none.jsonl")
    finalize(job, check=None, facts=None)
    assert export(job, tmp_path / "x", ExportSpec(format=kind)) == 0
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"format": "openai-batch", "group": True},
            "a form of its own: no --as, --group",
        ),
        ({"format": "jsonl", "sql": "select 1", "group": True}, "--sql says all of it"),
        ({"format": "jsonl", "columns": ("a", "b", "a")}, "--columns: 'a' is named twice"),
        ({"format": "jsonl", "group": True, "form": "messages"}, "exclude each other"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportSpec(**given)


def test_the_format_is_that_of_the_name() -> None:
    names = ["x.parquet", "x.JSONL", "x.arrows", "x"]
    assert [format_of(Path(name)) for name in names] == ["parquet", "jsonl", "arrow-stream", "hf"]
    for name in ("x.csv", "v1.0"):
        with pytest.raises(ValueError, match=r"known are \.parquet, \.jsonl, \.arrows"):
            format_of(Path(name))


def test_a_snapshot_says_that_it_is_one(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(9), output__rows_per_part=3)
    publish_segment(job, make_outcomes(job, range(3, 7)))
    compact(job, 1)
    with pytest.raises(OutputError, match="--partial exports the parts there are"):
        export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl"))
    assert export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl"), partial=True) == 3
    note = tmp_path / "x.jsonl.incomplete"
    assert note.read_text() == "1 of 3 parts were published\n"
    export(job, tmp_path / "x.parquet", ExportSpec(format="parquet"), partial=True)
    metadata = pq.read_schema(tmp_path / "x.parquet").metadata
    assert metadata[b"spot_batch.complete"] == b"false"
    assert "Not complete" in spot_batch.load(job.root, partial=True).info.description
    publish_segment(job, make_outcomes(job, [0, 1, 2, 6, 7, 8]))
    finalize(job, check=None, facts=None)
    export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl"))
    assert not note.exists()


def test_batch_responses_answer_every_request_in_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "b.jsonl", [request(f"request-{i}") for i in range(4)])
    job = make_job(tmp_path, path, input__format="openai-batch", output__rows_per_part=3)
    publish_segment(job, make_outcomes(job, range(4), failed={1}))
    finalize(job, check=None, facts=None)
    assert export(job, tmp_path / "out.jsonl", ExportSpec(format="openai-batch")) == 4
    first, second, *_ = lines(tmp_path / "out.jsonl")
    body = first["response"]["body"]  # type: ignore[index]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "sample 0 is 0 é😀"
    assert body["usage"]["total_tokens"] == 7
    assert second["response"] is None
    assert second["error"] == {"code": "oom", "message": "sample 1"}
