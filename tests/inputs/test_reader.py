from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.records.input import PinnedInput
from tests.inputs.test_pin import write_as
from tests.jobdir.jobs import make_spec, write_jsonl

NUM_ROWS = 2_600


def pin(path: Path, **overrides: object) -> PinnedInput:
    return pin_input(make_spec(path, **overrides))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PinnedInput:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    return pin(write_jsonl(path, ({"prompt": f"p{i}"} for i in range(NUM_ROWS))))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, NUM_ROWS - 1), max_size=20))
def test_rows_come_in_the_order_asked_for(rows: PinnedInput, wanted: list[int]) -> None:
    read = InputReader(rows).read(wanted)
    assert read.table["prompt"].to_pylist() == [f"p{i}" for i in wanted]
    assert read.row_indices == tuple(wanted)
    assert read.faults == {}


def test_the_index_has_a_chunk_for_every_1024_rows(rows: PinnedInput) -> None:
    assert [chunk.num_rows for chunk in rows.chunks] == [1_024, 1_024, 552]
    assert [chunk.line for chunk in rows.chunks] == [1, 1_025, 2_049]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_chunks_of_a_file_without_addresses_are_read_in_any_order(
    tmp_path: Path, kind: str
) -> None:
    for name, start in (("a", 0), ("b", NUM_ROWS)):
        table = pa.table({"prompt": [f"p{i}" for i in range(start, start + NUM_ROWS)]})
        write_as(tmp_path / f"{name}.{kind}", table)
    pinned = pin(tmp_path / f"*.{kind}")
    assert [chunk.num_rows for chunk in pinned.chunks] == [1_024, 1_024, 552] * 2
    reader = InputReader(pinned)
    for row in (2_599, 0, 5_199, 1_100, 2_600, 3_700, 5_000, 7):
        assert reader.read([row]).table["prompt"].to_pylist() == [f"p{row}"]
    lines = [chunk.line for chunk in pinned.chunks]
    assert lines == ([2, 1_026, 2_050] * 2 if kind == "csv" else [0] * 6)


def test_a_faulty_row_is_nulls_beside_its_neighbours(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "a", "n": 1}',
        b"not json",
        b'{"prompt": "\xfe"}',
        b'{"prompt": "b", "n": 2}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n\n".join(lines))
    reader = InputReader(pin(tmp_path / "a.jsonl"))
    read = reader.read([3, 2, 1, 0])
    assert read.table["prompt"].to_pylist() == ["b", None, None, "a"]
    assert {place: fault.code for place, fault in read.faults.items()} == {
        1: "bad_encoding",
        2: "bad_json",
    }
    assert read.raw == {1: '{"prompt": "\ufffd"}', 2: "not json"}
    assert [reader.where(row) for row in range(4)] == [f"a.jsonl line {n}" for n in (1, 3, 5, 7)]


def test_types_of_a_table_pass_through_untouched(tmp_path: Path) -> None:
    struct = pa.struct([pa.field("x", pa.list_(pa.large_string())), pa.field("y", pa.int8())])
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"], pa.large_string()),
            "small": pa.array([1, None], pa.int8()),
            "deep": pa.array([{"x": ["é", None], "y": 1}, None], struct),
            "when": pa.array([datetime.datetime(2026, 1, 1), None], pa.timestamp("ms", "UTC")),
            "day": pa.array([datetime.date(2026, 1, 1), None]),
            "exact": pa.array([Decimal("1.50"), None], pa.decimal128(5, 2)),
            "bytes": pa.array([b"\xff\x00", None]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "fixed": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
            "nothing": pa.nulls(2),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        read = InputReader(pin(tmp_path / name)).read([0, 1]).table
        assert read.schema.types == table.schema.types, name
        for column in table.column_names:
            assert read[column].to_pylist() == table[column].to_pylist(), (name, column)


def test_dictionaries_views_and_runs_become_plain(tmp_path: Path) -> None:
    nested = pa.array([{"d": "x"}, {"d": "y"}]).cast(
        pa.struct([("d", pa.dictionary(pa.int32(), pa.string()))])
    )
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"], pa.string_view()),
            "kind": pa.array(["x", "x"]).dictionary_encode(),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([7])),
            "nested": nested,
        }
    )
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    read = InputReader(pin(tmp_path / "a.arrow")).read([1, 0]).table
    assert [str(kind) for kind in read.schema.types] == [
        "string",
        "string",
        "int64",
        "struct<d: string>",
    ]
    assert read.to_pylist()[0] == {"prompt": "b", "kind": "x", "runs": 7, "nested": {"d": "y"}}


def test_a_table_row_that_is_not_utf8_is_a_fault(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"prompt": bad, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    reader = InputReader(pin(tmp_path / "a.parquet"))
    read = reader.read([0, 1, 2])
    assert read.table["prompt"].to_pylist() == ["good", None, "fine"]
    assert str(read.faults[1]) == "bad_encoding: column 'prompt': not UTF-8"
    assert reader.where(1) == "a.parquet row 1 (from 0)"


def test_only_the_columns_asked_for_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "n": [1]}), tmp_path / "a.parquet")
    reader = InputReader(pin(tmp_path / "a.parquet"), columns=["n"])
    assert reader.read([0]).table.column_names == ["n"]


def test_a_ten_megabyte_prompt_is_a_row_like_any_other(tmp_path: Path) -> None:
    long = "é" * 5_000_000
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": long}])
    assert InputReader(pin(path)).read([1]).table["prompt"][0].as_py() == long
