"""Files that people have: read right, or refused by name."""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spot_batch.inputs.chat import message_of
from spot_batch.inputs.errors import InputError
from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.sources import with_pipes_kept
from spot_batch.records.input import PinnedInput
from tests.jobdir.jobs import make_spec, write_jsonl


def pin(source: Path | str, **overrides: object) -> PinnedInput:
    return pin_input(
        make_spec(source, **overrides), hub_dir=Path("kept").absolute(), is_copied=True
    )


def complaint(source: Path | str, **overrides: object) -> str:
    with pytest.raises(InputError) as caught:
        pin(source, **overrides)
    return str(caught.value)


def rows_of(pinned: PinnedInput) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = InputReader(pinned).read(range(pinned.num_rows)).table.to_pylist()
    return rows


def write_arrow(
    path: Path, table: pa.Table, *, rows: int = 1_000, codec: str | None = None
) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- damage ----------------------------------------------------------------------------------------


def test_a_row_group_that_cannot_be_read_is_named(here: Path) -> None:
    table = pa.table({"prompt": [f"{i:0500}" for i in range(3_000)]})
    pq.write_table(table, here / "a.parquet", row_group_size=1_000, compression="snappy")
    data = bytearray((here / "a.parquet").read_bytes())
    with pq.ParquetFile(here / "a.parquet") as file:
        start = file.metadata.row_group(1).column(0).dictionary_page_offset
    data[start : start + 60] = bytes(range(60))
    (here / "a.parquet").write_bytes(data)
    assert "a.parquet: row group 1 cannot be read" in complaint("a.parquet")
    in_place = pin_input(make_spec("a.parquet"))
    with pytest.raises(InputError, match=r"a\.parquet: row group 1 cannot be read"):
        InputReader(in_place).read([1_500])
    assert InputReader(in_place).read([2_500]).faults == {}


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_arrow_batch_that_cannot_be_read_is_named(here: Path, is_stream: bool) -> None:
    table = pa.table({"prompt": [f"{i:0500}" for i in range(3_000)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new("a.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=1_000)
    data = bytearray((here / "a.arrow").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 300] = b"\x55" * 300
    (here / "a.arrow").write_bytes(data)
    assert "a.arrow: batch 1 cannot be read" in complaint("a.arrow")
    (here / "a.arrow").write_bytes(data[:middle])
    assert "a.arrow: " in complaint("a.arrow")


def test_offsets_that_point_nowhere_are_damage_and_no_row(here: Path) -> None:
    offsets = pa.array([0, 900_000, 2], pa.int32()).buffers()[1]
    bad = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    write_arrow(here / "a.arrow", pa.table({"prompt": bad}))
    assert "a.arrow: cannot be read" in complaint("a.arrow")


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.large_string(), pa.string(), pa.large_string()),
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.list_(pa.int8()), pa.list_(pa.int64()), pa.list_(pa.int64())),
    ],
)
def test_types_of_shards_are_widened_where_nothing_is_lost(
    here: Path, one: pa.DataType, other: pa.DataType, want: pa.DataType
) -> None:
    value: Any = "x" if "string" in str(one) else [7] if "list" in str(one) else 7
    for name, kind in (("a", one), ("b", other)):
        pq.write_table(
            pa.table({"prompt": [name], "v": pa.array([value], kind)}), f"{name}.parquet"
        )
    pinned = pin("*.parquet")
    schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
    assert schema.field("v").type == want
    assert [row["v"] for row in rows_of(pinned)] == [value, value]


def test_types_of_shards_that_would_lose_something_are_refused(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "v": [2**53 + 1]}), "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "v": [0.5]}), "b.parquet")
    assert "a.parquet: cannot be read: Integer value 9007199254740993" in complaint("*.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "v": ["x"]}), "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "v": [b"x"]}), "b.parquet")
    assert "b.parquet: column 'v' is binary, and string in a.parquet" in complaint("*.parquet")


def test_a_categorical_column_of_polars_is_text(here: Path) -> None:
    values = pa.array(["x", "y"], pa.string_view())
    kinds = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.uint32()), values)
    write_arrow(here / "a.arrow", pa.table({"prompt": ["a", "b", "c"], "kind": kinds}))
    assert [row["kind"] for row in rows_of(pin("a.arrow"))] == ["y", None, "x"]


def test_a_table_nested_too_deep_is_refused_by_column(here: Path) -> None:
    kind = pa.int64()
    for _ in range(51):
        kind = pa.list_(kind)
    table = pa.table({"prompt": ["a"], "deep": pa.array([None], kind)})
    write_arrow(here / "a.arrow", table)
    assert "a.arrow: column 'deep' is nested more than 50 deep" in complaint("a.arrow")


# -- saved datasets, folders, names ----------------------------------------------------------------


def test_a_saved_dataset_of_no_rows_has_its_columns(here: Path) -> None:
    none = datasets.Dataset.from_dict({"prompt": ["a"]}).select([])
    none.save_to_disk("saved")
    assert (pin("saved").num_rows, pin("saved").prompt_column) == (0, "prompt")
    full = datasets.Dataset.from_dict({"prompt": ["a"]})
    datasets.DatasetDict(train=full, test=none).save_to_disk("both")
    assert [pin("both", input__split=name).num_rows for name in ("train", "test")] == [1, 0]


def test_a_folder_with_more_in_its_folders_asks_which(here: Path) -> None:
    (here / "in" / "more").mkdir(parents=True)
    write_jsonl(here / "in" / "a.jsonl", [{"prompt": "a"}])
    write_jsonl(here / "in" / "more" / "b.jsonl", [{"prompt": "b"}])
    message = complaint("in")
    assert "holds 1 file to read and its folders 1 more (more/b.jsonl)" in message
    assert f"'{here}/in/*.jsonl*' or '{here}/in/**/*.jsonl*'" in message
    assert pin(f"{here}/in/**/*.jsonl").num_rows == 2
    assert pin(f"{here}/in/*.jsonl").num_rows == 1


def test_a_folder_of_folders_says_what_to_give(here: Path) -> None:
    (here / "in" / "data").mkdir(parents=True)
    (here / "in" / "README.md").write_text("a clone of the hub")
    write_jsonl(here / "in" / "data" / "b.jsonl", [{"prompt": "b"}])
    assert complaint("in") == (
        f"input.source: {here}/in holds no file to read and its folders 1 more (data/b.jsonl); "
        f"say which: '{here}/in/**/*.jsonl*'"
    )
    assert pin(f"{here}/in/**/*.jsonl*").num_rows == 1


@pytest.mark.parametrize(
    "names", [("train-00000-of-00001", "test-00000-of-00001"), ("train", "dev")]
)
def test_splits_side_by_side_are_asked_about(here: Path, names: tuple[str, str]) -> None:
    (here / "in").mkdir()
    for name in names:
        pq.write_table(pa.table({"prompt": [name]}), here / "in" / f"{name}.parquet")
    assert "holds several splits of a dataset" in complaint("in")
    assert [row["prompt"] for row in rows_of(pin(f"{here}/in/train*"))] == [names[0]]
    for name in ("training-notes", "tests"):
        write_jsonl(here / f"{name}.jsonl", [{"prompt": name}])
    assert pin(f"{here}/*.jsonl").num_rows == 2


def test_json_lines_by_their_long_name(here: Path) -> None:
    write_jsonl(here / "a.jsonlines", [{"prompt": "a"}])
    assert pin("a.jsonlines").num_rows == 1


def test_a_mistyped_path_is_no_dataset_of_the_hub(here: Path) -> None:
    (here / "data").mkdir()
    write_jsonl(here / "data" / "prompts", [])
    assert complaint("data/promts") == (
        "input.source: no such file: data/promts; did you mean prompts?"
    )


def test_what_a_mac_packs_beside_a_file_is_no_file(here: Path) -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("rows.jsonl", '{"prompt": "a"}\n')
        archive.writestr("__MACOSX/._rows.jsonl", b"\0\5\x16\7")
    (here / "rows.jsonl.zip").write_bytes(sink.getvalue())
    assert [row["prompt"] for row in rows_of(pin("rows.jsonl.zip"))] == ["a"]


def test_messages_name_the_file_that_was_given(here: Path) -> None:
    for name in ("rows.gz", "rows.csv.gz"):
        (here / name).write_bytes(gzip.compress(b"prompt,x,x\na,1,2\n"))
    assert f"the format of {here}/rows.gz does not show" in complaint("rows.gz")
    assert complaint("rows.csv.gz") == f"{here}/rows.csv.gz: two columns are named 'x'"


def test_a_file_url_is_decoded(here: Path) -> None:
    write_jsonl(here / "a b%.jsonl", [{"prompt": "a"}])
    assert pin(f"file://{here}/a%20b%25.jsonl").num_rows == 1
    assert "no such file" in complaint(f"file://{here}/c.jsonl")


# -- pipes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows", "rows.csv"])
def test_a_named_pipe_is_copied_once(here: Path, name: str) -> None:
    os.mkfifo(name)
    text = "prompt,n\na,1\n" if name.endswith("csv") else json.dumps({"prompt": "a", "n": 1}) + "\n"
    writer = threading.Thread(target=lambda: Path(name).write_text(text))
    writer.start()
    spec = with_pipes_kept(make_spec(name), here / "kept")
    writer.join()
    (source,) = spec.input.source
    assert Path(source).parent == here / "kept"
    pinned = pin_input(spec, hub_dir=here / "kept", is_copied=True)
    assert rows_of(pinned) == [{"prompt": "a", "n": 1}]
    assert with_pipes_kept(spec, here / "kept") == spec


def test_the_standard_input_is_a_source(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n')))
    spec = with_pipes_kept(make_spec("-"), here / "kept")
    pinned = pin_input(spec, hub_dir=here / "kept", is_copied=True)
    assert rows_of(pinned) == [{"prompt": "a"}]
    assert InputReader(pinned).where(0).startswith("stdin-")


# -- chats -----------------------------------------------------------------------------------------


def test_sharegpts_conversations_are_found(here: Path) -> None:
    rows = [{"id": 1, "conversations": [{"from": "human", "value": "a"}]}]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert (pinned.prompt_column, pinned.prompt_kind) == ("conversations", "messages")


def test_messages_that_are_stored_as_text_are_asked_about(here: Path) -> None:
    rows = [{"messages": json.dumps([{"role": "user", "content": "a"}])}]
    path = write_jsonl(here / "a.jsonl", rows)
    assert "column 'messages' of a.jsonl is text, not a list of role and content" in complaint(path)
    assert pin(path, input__prompt="messages").prompt_kind == "prompt"


def test_messages_in_text_and_in_parts_stand_beside_each_other(here: Path) -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    rows = [
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": None},
            ]
        },
        {"messages": [{"role": "user", "content": "d"}]},
    ]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert (pinned.prompt_kind, pinned.num_faults) == ("messages", 0)
    one, other = (row["messages"] for row in rows_of(pinned))
    assert [message["content"] for message in one] == [[{"type": "text", "text": "a"}], parts, None]
    assert message_of(one[1], "here") == {"role": "user", "content": "bc"}
    assert message_of(other[0], "here") == {"role": "user", "content": "d"}


def test_a_column_of_texts_with_one_list_is_no_column_of_parts(here: Path) -> None:
    rows = [{"content": "a", "role": "b", "prompt": [{"type": "text", "text": "x"}]}]
    rows += [{"content": "a", "role": "b", "prompt": text} for text in "yz"]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert [row["prompt"] for row in rows_of(pinned)] == [None, "y", "z"]
    assert pinned.num_faults == 1
