from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.records.input import PinnedInput
from tests.jobdir.jobs import make_spec, write_jsonl


def pin(path: Path | str, **overrides: object) -> PinnedInput:
    return pin_input(make_spec(path, **overrides))


def schema_of(pinned: PinnedInput) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(pinned.schema))


def complaint(path: Path | str, **overrides: object) -> str:
    with pytest.raises(InputError) as caught:
        pin(path, **overrides)
    return str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- sources ---------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_one_that_is_near(here: Path) -> None:
    write_jsonl(here / "prompts.jsonl", [])
    assert complaint("promts.jsonl") == (
        "input.source: no such file: promts.jsonl; did you mean prompts.jsonl?"
    )
    assert "nor is there a folder" in complaint("nowhere/at/all.jsonl")


def test_a_pattern_takes_its_files_by_name(here: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write_jsonl(here / name, [{"prompt": name}])
    pinned = pin("*.jsonl")
    assert [Path(file.path).name for file in pinned.files] == ["a.jsonl", "b.jsonl"]
    assert [file.first_row for file in pinned.files] == [0, 1]
    assert "no file matches '*.parquet'" in complaint("*.parquet")


def test_a_list_keeps_its_order_and_refuses_a_file_twice(here: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write_jsonl(here / name, [{"prompt": name}])
    pinned = pin("x", input__source=["b.jsonl", "a.jsonl"])
    assert InputReader(pinned).read([0, 1]).table["prompt"].to_pylist() == ["b.jsonl", "a.jsonl"]
    assert "named twice" in complaint("x", input__source=["a.jsonl", "./a.jsonl"])


def test_a_folder_is_its_files(here: Path) -> None:
    (here / "many").mkdir()
    write_jsonl(here / "many" / "a.jsonl", [{"prompt": "a"}])
    write_jsonl(here / "many" / ".hidden.jsonl", [{"prompt": "b"}])
    (here / "many" / "README").write_text("x")
    assert pin("many").num_rows == 1
    (here / "none").mkdir()
    assert "holds no file that can be read" in complaint("none")


def test_what_a_job_writes_among_its_input_is_no_input(here: Path) -> None:
    (here / "in" / "more").mkdir(parents=True)
    write_jsonl(here / "in" / "a.jsonl", [{"prompt": "a"}])
    write_jsonl(here / "in" / "more" / "b.jsonl", [{"prompt": "b"}])
    before = pin("in/**/*.jsonl")
    spot = here / "in" / "out" / "_spot"
    spot.mkdir(parents=True)
    write_jsonl(spot / "events.jsonl", [{"prompt": "event"}])
    assert pin("in/**/*.jsonl").identity == before.identity  # not yet known as a job's
    (spot / "format").write_text("1\n")
    write_jsonl(here / "in" / "out" / "rows.jsonl", [{"prompt": "row"}])
    for pattern in ("in/**/*.jsonl", "./in/**/*.jsonl", f"{here}/in/**/*.jsonl", "**/*.jsonl"):
        assert [Path(file.path).name for file in pin(pattern).files] == ["a.jsonl", "b.jsonl"]
    assert "2 left out as files of a job directory" in complaint("in/out/**/*.jsonl")


def test_a_job_folder_is_no_input_and_its_named_data_folder_is(here: Path) -> None:
    data = here / "out" / "data"
    data.mkdir(parents=True)
    (here / "out" / "_spot").mkdir()
    (here / "out" / "_spot" / "format").write_text("1\n")
    write_jsonl(here / "out" / "summary.json", [{"prompt": "summary"}])
    write_jsonl(data / "part.jsonl", [{"prompt": "a"}])
    assert "1 left out as files of a job directory" in complaint("out")
    assert pin("out/data").num_rows == pin("out/data/*.jsonl").num_rows == 1
    assert pin("out/data/part.jsonl").num_rows == 1


def test_files_of_two_formats_are_refused(here: Path) -> None:
    write_jsonl(here / "a.jsonl", [{"prompt": "a"}])
    pq.write_table(pa.table({"prompt": ["b"]}), here / "b.parquet")
    message = complaint("x", input__source=["a.jsonl", "b.parquet"])
    assert "a.jsonl (jsonl) and b.parquet (parquet)" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "does not show in its name; give input.format"),
        ("nope://bucket/a.jsonl", "nope://bucket/a.jsonl cannot be read"),
    ],
)
def test_a_source_that_is_not_read_says_why(here: Path, name: str, message: str) -> None:
    if "://" not in name:
        (here / name).write_bytes(b"x")
    assert message in complaint(name)


def test_input_format_settles_what_a_name_does_not_show(here: Path) -> None:
    write_jsonl(here / "a.txt", [{"prompt": "a"}])
    assert pin("a.txt", input__format="jsonl").num_rows == 1
    assert "hf reads a folder or a hub dataset" in complaint("a.txt", input__format="hf")


def test_a_hub_dataset_that_cannot_be_reached_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = make_spec("nobody/nothing-of-that-name")
    (here / "kept").mkdir()
    with pytest.raises(InputError, match=r"neither a file nor a dataset .* 'nobody/nothing-of"):
        pin_input(spec, hub_dir=here / "kept")


def test_packaged_prompts_have_a_name_of_their_own() -> None:
    pinned = pin("bundled:prompts", input__limit=3)
    assert Path(pinned.files[0].path).name == "prompts.jsonl"
    assert pinned.num_rows == 3
    assert "the package has no 'bundled:promts'; it has bundled:prompts" in (
        complaint("bundled:promts")
    )


def test_a_saved_dataset_is_kept_beside_the_job(here: Path) -> None:
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b"], "label": [0, 1]})
    datasets.DatasetDict(train=rows, test=rows.select([1])).save_to_disk(here / "saved")
    pinned = pin_input(make_spec("saved"), hub_dir=here / "kept")
    again = pin_input(make_spec("saved"), hub_dir=here / "kept")
    assert pinned == again
    assert [path.suffix for path in (here / "kept").iterdir()] == [".parquet"]
    assert InputReader(pinned).read([1]).table["label"].to_pylist() == [1]
    test = pin_input(make_spec("saved", input__split="test"), hub_dir=here / "kept")
    assert test.num_rows == 1
    with pytest.raises(InputError, match=r"has no split 'dev'; it has 'train', 'test'"):
        pin_input(make_spec("saved", input__split="dev"), hub_dir=here / "kept")


def test_a_dataset_folder_is_read_through_datasets(here: Path) -> None:
    (here / "repo").mkdir()
    write_jsonl(here / "repo" / "train.jsonl", [{"prompt": "a"}])
    write_jsonl(here / "repo" / "test.jsonl", [{"prompt": "b"}, {"prompt": "c"}])
    spec = make_spec("repo", input__format="hf", input__split="test")
    assert pin_input(spec, hub_dir=here / "kept").num_rows == 2
    other = make_spec("repo", input__format="hf", input__split="dev")
    with pytest.raises(InputError, match="has no split 'dev'; it has 'train', 'test'"):
        pin_input(other, hub_dir=here / "kept")


# -- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["messages", "prompt", "question", "instruction", "text"])
def test_a_lone_column_of_a_usual_name_is_the_prompt(here: Path, name: str) -> None:
    value = [{"role": "user", "content": "x"}] if name == "messages" else "x"
    pinned = pin(write_jsonl(here / "a.jsonl", [{"answer": 1, name: value}]))
    assert pinned.prompt_column == name
    assert pinned.prompt_kind == ("messages" if name == "messages" else "prompt")


def test_several_candidates_ask_which(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"text": "a", "question": "b"}])
    assert complaint(path) == (
        "several columns of a.jsonl could be the prompt: question, text; "
        "say which with input.prompt (--prompt)"
    )
    assert pin(path, input__prompt="text").prompt_column == "text"


def test_no_candidate_lists_the_columns_there_are(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"query": "a", "id": 1}])
    message = complaint(path)
    assert "no prompt column in a.jsonl" in message
    assert "'query', 'id'" in message
    assert "'query', 'id'" in complaint(path, input__keep=["id"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input__prompt", "quest"),
        ("input__messages", "quest"),
        ("input__custom_id", "quest"),
        ("input__keep", ["prompt", "quest"]),
    ],
)
def test_a_missing_column_lists_the_columns_there_are(here: Path, key: str, value: object) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a", "id": 1}])
    message = complaint(path, **{key: value})
    assert message == (
        f"{key.replace('__', '.')}: no column 'quest' in a.jsonl; its columns: 'prompt', 'id'"
    )


def test_an_override_column_must_be_there(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a"}])
    assert "generation.per_row: no column 'seed' in a.jsonl" in complaint(
        path, generation__per_row=["seed"]
    )


def test_a_prompt_column_of_another_type_is_refused(here: Path) -> None:
    rows = [{"prompt": 5, "chat": [{"role": "user", "content": "x"}], "other": "x"}]
    path = write_jsonl(here / "a.jsonl", rows)
    assert "column 'prompt' of a.jsonl is int64, neither text nor messages" in complaint(path)
    assert "column 'prompt' is int64, not text" in complaint(path, input__prompt="prompt")
    assert "goes with input.messages" in complaint(path, input__prompt="chat")
    assert "goes with input.prompt" in complaint(path, input__messages="other")
    assert pin(path, input__messages="chat").prompt_kind == "messages"


def test_an_id_column_must_hold_ids(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a", "id": 1.5}])
    assert "column 'id' is double; an id is text or a whole number" in complaint(
        path, input__custom_id="id"
    )


# -- ids -------------------------------------------------------------------------------------------


def test_a_duplicate_id_names_both_rows(here: Path) -> None:
    rows = [{"prompt": "a", "id": f"r{i}"} for i in range(3_000)]
    rows[2_500]["id"] = "r7"
    path = write_jsonl(here / "a.jsonl", rows)
    assert complaint(path, input__custom_id="id") == (
        "input.custom_id: 'r7' stands twice in column 'id': a.jsonl line 8 and a.jsonl line 2501"
    )


def test_duplicates_are_found_across_tables(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "id": [1, 2]}), here / "a.parquet")
    pq.write_table(pa.table({"prompt": ["c", "d"], "id": [3, 1]}), here / "b.parquet")
    assert "1 stands twice in column 'id': a.parquet row 0 (from 0) and b.parquet row 1" in (
        complaint("*.parquet", input__custom_id="id")
    )


def test_ids_that_differ_in_case_only_are_two(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a", "id": "x"}, {"prompt": "a", "id": "X"}])
    assert pin(path, input__custom_id="id").num_rows == 2


# -- JSON ------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_all_rows(here: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": "a", "late": None, "x": 1, "s": {"a": 1}}]
    rows += [{"prompt": "a", "x": i} for i in range(1_500)]
    rows += [{"prompt": "b", "late": [{"k": None}], "x": 2.5, "s": {"b": "c"}}]
    rows += [{"prompt": "b", "late": [{"k": "v"}], "never": None}]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    want = pa.schema(
        [
            ("prompt", pa.string()),
            ("late", pa.list_(pa.struct([("k", pa.string())]))),
            ("x", pa.float64()),
            ("s", pa.struct([("a", pa.int64()), ("b", pa.string())])),
            ("never", pa.null()),
        ]
    )
    assert schema_of(pinned).equals(want)
    table = InputReader(pinned).read([0, 1, 1_501, 1_502]).table
    assert table["x"].to_pylist() == [1.0, 0.0, 2.5, None]
    assert table["s"].to_pylist() == [{"a": 1, "b": None}, None, {"a": None, "b": "c"}, None]
    assert table["late"].to_pylist() == [None, None, [{"k": None}], [{"k": "v"}]]


def test_rows_that_cannot_be_used_are_counted_and_named(here: Path) -> None:
    lines = [b'{"prompt": "a", "n": 1}', b"", b'{"prompt": "b', b'{"prompt": "\xff"}', b"[1]"]
    lines += [b'{"prompt": "\\ud83d", "n": 2}', b'{"prompt": "c", "n": "two"}', b'{"prompt": "d"}']
    lines += [b'{"prompt": "e", "n": 3}']
    (here / "a.jsonl").write_bytes(b"\r\n".join(lines))
    pinned = pin(here / "a.jsonl")
    assert pinned.num_rows == 8
    assert pinned.num_faults == 5
    assert pinned.faults == (
        "a.jsonl line 3: bad_json: not JSON: Invalid control character at at column 14"
        if "control" in pinned.faults[0]
        else "a.jsonl line 3: bad_json: not JSON: Unterminated string starting at at column 12",
        "a.jsonl line 4: bad_encoding: not UTF-8: byte 0xff at column 13",
        "a.jsonl line 5: bad_json: a row is a JSON object, got list",
        "a.jsonl line 6: bad_encoding: half of a surrogate pair (a \\ud800 to \\udfff alone)",
        "a.jsonl line 7: bad_type: column 'n' is a whole number in most rows, text here",
    )


def test_a_column_that_nobody_reads_spoils_no_row(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}])
    assert pin(path).num_faults == 1
    pinned = pin(path, input__keep=["prompt"])
    assert pinned.num_faults == 0
    assert schema_of(pinned).names == ["prompt"]


def test_a_file_without_one_good_row_is_refused(here: Path) -> None:
    (here / "a.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(128, 200)))
    assert "no row of the input can be read; the first: a.jsonl line 1: bad_" in complaint(
        here / "a.jsonl"
    )


def test_whole_numbers_beyond_64_bits_do_not_fit(here: Path) -> None:
    rows = [
        {"prompt": "a", "n": 2**63 - 1},
        {"prompt": "b", "n": 2**63},
        {"prompt": "c", "n": -(2**63)},
    ]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert pinned.faults == (
        "a.jsonl line 2: bad_type: column 'n' holds a whole number beyond 64 bits",
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_a_whole_number_that_a_column_of_numbers_would_round_is_a_fault(
    here: Path, is_first: bool
) -> None:
    rows: list[object] = [{"prompt": "a", "n": 2**53 + 1}, {"prompt": "b", "n": 0.5}]
    rows += [{"prompt": "c", "n": 2**53}]
    pinned = pin(write_jsonl(here / "a.jsonl", rows if is_first else rows[::-1]))
    line = 1 if is_first else 3
    assert pinned.faults == (
        f"a.jsonl line {line}: bad_type: column 'n' is a number in other rows, which cannot hold "
        f"{2**53 + 1} exactly",
    )
    alone = pin(write_jsonl(here / "b.jsonl", [rows[0]]))
    assert InputReader(alone).read([0]).table["n"].to_pylist() == [2**53 + 1]


def test_what_most_rows_say_decides_the_type_of_a_column(here: Path) -> None:
    rows = [{"prompt": "a", "n": "N/A"}, *({"prompt": "b", "n": i} for i in range(59))]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert pinned.faults == (
        "a.jsonl line 1: bad_type: column 'n' is a whole number in most rows, text here",
    )
    assert schema_of(pinned).field("n").type == pa.int64()
    nested = [{"prompt": "a", "m": [{"k": value}]} for value in (1, "x", "y", 2.5, "z")]
    deeper = pin(write_jsonl(here / "b.jsonl", nested))
    assert [fault.partition(":")[0] for fault in deeper.faults] == [
        "b.jsonl line 1",
        "b.jsonl line 4",
    ]


@pytest.mark.parametrize("of_lists", [True, False])
def test_a_value_nested_too_deep_is_a_fault_that_names_its_column(
    here: Path, of_lists: bool
) -> None:
    def nested(depth: int) -> object:
        value: object = 1
        for _ in range(depth):
            value = [value] if of_lists else {"k": value}
        return value

    rows: list[object] = [{"prompt": "a", "deep": None, "other": nested(49)}]
    rows += [{"prompt": "b", "deep": nested(70)}]
    pinned = pin_input(
        make_spec(write_jsonl(here / "a.jsonl", rows)), hub_dir=here / "kept", is_copied=True
    )
    assert pinned.num_faults == 1
    assert pinned.faults[0].startswith("a.jsonl line 2: bad_type: column 'deep'")
    assert pinned.faults[0].endswith("is nested more than 50 deep")
    read = InputReader(pinned).read([0])
    assert read.table["other"].to_pylist() == [nested(49)]
    only = pin(here / "a.jsonl", input__keep=["prompt"])
    assert only.num_faults == 0


def test_objects_whose_keys_are_data_are_kept_as_json(here: Path) -> None:
    rows = [
        {"prompt": "a", "scores": {f"k{2 * i}": i, f"k{2 * i + 1}": None}} for i in range(1_000)
    ]
    rows += [{"prompt": "b", "scores": None}]
    pinned = pin(write_jsonl(here / "a.jsonl", rows))
    assert pinned.json_columns == ("scores",)
    read = InputReader(pinned).read([7, 1_000]).table["scores"].to_pylist()
    assert read == ['{"k14": 7, "k15": null}', None]
    assert len(pinned.schema) < 10_000


def test_a_number_that_would_be_read_as_infinity_is_a_fault(here: Path) -> None:
    (here / "a.jsonl").write_text(
        '{"prompt": "1e999 in words", "x": 1e300}\n{"prompt": "b", "x": -1e400}\n'
        '{"prompt": "c", "x": Infinity}\n'
    )
    pinned = pin(here / "a.jsonl")
    assert pinned.faults == (
        "a.jsonl line 2: bad_json: the number -1e400 is beyond those of 64 bits",
    )
    values = InputReader(pinned).read([0, 2]).table["x"].to_pylist()
    assert values == [1e300, float("inf")]


def test_a_json_file_may_be_an_array_or_lines(here: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    (here / "array.json").write_text("\n " + json.dumps(rows, indent=2))
    write_jsonl(here / "lines.json", rows)
    assert [file.format for file in pin(here / "array.json").files] == ["json"]
    assert [file.format for file in pin(here / "lines.json").files] == ["jsonl"]
    assert pin(here / "array.json").num_rows == pin(here / "lines.json").num_rows == 2


def test_a_broken_array_is_refused_with_its_line(here: Path) -> None:
    (here / "a.json").write_text('[{"prompt": "a"},\n{"prompt": }]')
    assert "a.json: not JSON: Expecting value at line 2" in complaint(here / "a.json")
    (here / "b.json").write_text('{"rows": []}')
    assert "a JSON input is an array" in complaint(here / "b.json", input__format="json")


def test_a_byte_order_mark_is_no_part_of_the_first_row(here: Path) -> None:
    (here / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    (here / "a.csv").write_bytes(b"\xef\xbb\xbfprompt\na\n")
    assert pin(here / "a.jsonl").num_faults == 0
    assert pin(here / "a.csv").prompt_column == "prompt"


# -- CSV -------------------------------------------------------------------------------------------


def test_csv_columns_are_numbers_only_where_nothing_is_lost(here: Path) -> None:
    (here / "a.csv").write_text(
        'prompt,n,zip,x,mixed\n"two\nlines, one cell",1,01234,1.5,1\nb,-2,99999,2.0,x\nc,,1,,\n'
    )
    pinned = pin(here / "a.csv")
    assert [str(each) for each in schema_of(pinned).types] == [
        "string",
        "int64",
        "string",
        "double",
        "string",
    ]
    table = InputReader(pinned).read([0, 1, 2]).table
    assert table["prompt"].to_pylist() == ["two\nlines, one cell", "b", "c"]
    assert table["n"].to_pylist() == [1, -2, None]
    assert table["zip"].to_pylist() == ["01234", "99999", "1"]
    assert table["mixed"].to_pylist() == ["1", "x", ""]


@pytest.mark.parametrize("cells", [["3.9", "3.10"], ["1.50"], ["1e5"], ["-0"], ["1", "1.5"]])
def test_a_number_that_would_be_written_otherwise_is_text(here: Path, cells: list[str]) -> None:
    (here / "a.csv").write_text("prompt,v\n" + "".join(f"a,{cell}\n" for cell in cells))
    pinned = pin(here / "a.csv")
    assert schema_of(pinned).field("v").type == pa.string()
    read = InputReader(pinned).read(range(len(cells)))
    assert read.table["v"].to_pylist() == cells


def test_cells_that_override_numbers_are_numbers_however_they_are_written(here: Path) -> None:
    (here / "a.csv").write_text("prompt,temperature\na,0.50\nb,1\n")
    pinned = pin(here / "a.csv", generation__per_row=["temperature"])
    assert InputReader(pinned).read([0, 1]).table["temperature"].to_pylist() == [0.5, 1.0]


def test_a_quote_that_is_never_closed_is_named_with_its_line(here: Path) -> None:
    start = 'id,prompt\n0,"two\nlines"\n1,Spell lamp.\n2,"Spell tree.\n3,Spell moon.\n'
    for end in ("4,Spell gold.\n", '4,"Spell gold."\n'):
        (here / "a.csv").write_text(start + end)
        assert "a.csv: line 5: a quote that opens there is not closed" in complaint(here / "a.csv")


def test_a_cell_with_text_behind_its_quotes_is_a_fault_of_its_row(here: Path) -> None:
    (here / "a.csv").write_text('prompt,n\na,1\n"b" c,2\nd,3\n')
    pinned = pin(here / "a.csv")
    assert pinned.num_rows == 3
    assert pinned.faults == ("a.csv line 3: bad_csv: not CSV: ',' expected after '\"'",)
    assert InputReader(pinned).read([0, 2]).table["n"].to_pylist() == [1, 3]


def test_a_quote_in_a_file_of_tabs_is_text_unless_it_is_closed(here: Path) -> None:
    cells = ['"Spell tree.', '"Hello" she said', 'a "b"', '"unclosed', "end"]
    lines = ["prompt\tn", *(f"{cell}\t{n}" for n, cell in enumerate(cells))]
    lines += ['"in ""quotes"""\t5', '"two\nlines"\t6', 'x"\t7']
    (here / "a.tsv").write_text("\n".join(lines) + "\n")
    pinned = pin(here / "a.tsv")
    assert pinned.num_faults == 0
    table = InputReader(pinned).read(range(pinned.num_rows)).table
    assert table["prompt"].to_pylist() == [*cells, 'in "quotes"', "two\nlines", 'x"']
    assert table["n"].to_pylist() == list(range(8))
    assert InputReader(pinned).where(7) == "a.tsv line 10"


def test_a_csv_row_of_another_length_is_a_fault_with_its_line(here: Path) -> None:
    (here / "a.csv").write_bytes(b'prompt,n\n"a\nb",1\nc\n\xff,2\nd,3\n')
    pinned = pin(here / "a.csv")
    assert pinned.num_rows == 4
    assert pinned.faults == (
        "a.csv line 4: bad_csv: 1 fields where the header has 2",
        "a.csv line 5: bad_encoding: not UTF-8",
    )


def test_columns_of_one_name_are_refused(here: Path) -> None:
    (here / "a.csv").write_text("prompt,x,x\na,1,2\n")
    assert "a.csv: two columns are named 'x'" in complaint(here / "a.csv")
    table = pa.table([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["prompt", "x", "x"])
    with pa.ipc.new_file(str(here / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert "a.arrow: two columns are named 'x'" in complaint(here / "a.arrow")


def test_tabs_part_the_cells_of_a_tsv_file(here: Path) -> None:
    (here / "a.tsv").write_text("prompt\tn\na, b\t1\n")
    assert InputReader(pin(here / "a.tsv")).read([0]).table["prompt"].to_pylist() == ["a, b"]


# -- tables ----------------------------------------------------------------------------------------


def test_a_file_that_is_no_table_is_named(here: Path) -> None:
    (here / "a.parquet").write_bytes(b"x" * 100)
    (here / "a.arrow").write_bytes(b"ARROW1" + b"x" * 100)
    assert "a.parquet: not a Parquet file" in complaint(here / "a.parquet")
    assert "a.arrow: not an Arrow file" in complaint(here / "a.arrow")


def test_a_stream_without_its_end_mark_is_refused(here: Path) -> None:
    table = pa.table({"prompt": [f"p{i}" for i in range(30)]})
    with pa.ipc.new_stream(str(here / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    data = (here / "a.arrow").read_bytes()
    assert pin(here / "a.arrow").num_rows == 30
    (here / "a.arrow").write_bytes(data[:-8])
    assert "a.arrow: an Arrow stream that is cut short" in complaint(here / "a.arrow")
    (here / "a.arrow").write_bytes(data + data)
    assert "a.arrow: an Arrow stream with more behind its end mark" in complaint(here / "a.arrow")


def test_tables_must_agree_on_the_types_of_their_columns(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "n": [1]}), here / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "n": ["x"]}), here / "b.parquet")
    assert "b.parquet: column 'n' is string, and int64 in a.parquet" in complaint("*.parquet")


def test_a_column_that_one_table_lacks_or_has_as_nulls_is_null_there(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "s": pa.nulls(1)}), here / "a.parquet")
    full = pa.table({"prompt": ["b"], "s": [{"k": 1}], "only": [1.5]})
    pq.write_table(full, here / "b.parquet")
    pinned = pin("*.parquet")
    table = InputReader(pinned).read([0, 1]).table
    assert table["s"].to_pylist() == [None, {"k": 1}]
    assert table["only"].to_pylist() == [None, 1.5]
    assert schema_of(pinned).field("s").type == pa.struct([("k", pa.int64())])


def test_a_column_type_that_cannot_pass_through_is_named(here: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    table = pa.table({"prompt": ["a"], "u": union})
    with pa.ipc.new_file(str(here / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert "column 'u' has type sparse_union" in complaint(here / "a.arrow")


# -- limit, no rows, change ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_limit_takes_the_first_rows(here: Path, kind: str) -> None:
    table = pa.table({"prompt": [f"p{i}" for i in range(2_100)]})
    for name, rows in (("a", table.slice(0, 1_500)), ("b", table.slice(1_500))):
        write_as(here / f"{name}.{kind}", rows)
    pinned = pin(f"*.{kind}", input__limit=1_600)
    assert pinned.num_rows == 1_600
    assert [file.num_rows for file in pinned.files] == [1_500, 100]
    reader = InputReader(pinned)
    assert reader.read([1_599, 0]).table["prompt"].to_pylist() == ["p1599", "p0"]
    assert sum(chunk.table.num_rows for chunk in reader.chunks()) == 1_600
    assert len(pin(f"*.{kind}", input__limit=1_500).files) == 1


def test_rows_past_the_limit_are_nobodys_business(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pinned = pin(path, input__limit=1)
    path.write_text(path.read_text() + '{"prompt": 5}\n')
    check_unchanged(pinned)
    assert pin(path, input__limit=1).identity == pinned.identity


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_no_rows_are_a_legal_input(here: Path, kind: str) -> None:
    table = pa.table({"prompt": pa.array([], pa.string()), "n": pa.array([], pa.int64())})
    write_as(here / f"a.{kind}", table)
    pinned = pin(here / f"a.{kind}")
    assert pinned.num_rows == 0
    assert pinned.prompt_column == "prompt"
    assert InputReader(pinned).read([]).table.num_rows == 0


def test_no_rows_keep_the_columns_that_the_spec_names(here: Path) -> None:
    (here / "a.jsonl").write_text("")
    pinned = pin(here / "a.jsonl", input__keep=["k"], input__custom_id="id", input__prompt="q")
    assert pinned.prompt_column == "q"
    assert schema_of(pinned).names == ["q", "id", "k"]
    assert pin(here / "a.jsonl", input__limit=0).num_rows == 0


def test_a_changed_input_is_refused_and_a_touched_one_is_not(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a"}])
    pinned = pin(path)
    os.utime(path, (1, 1))
    check_unchanged(pinned)
    path.write_text(path.read_text().replace("a", "b"))
    with pytest.raises(InputError, match=r"a\.jsonl: changed since the job was submitted"):
        check_unchanged(pinned)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: gone since the job was submitted"):
        check_unchanged(pinned)
    with pytest.raises(InputError, match="gone since"):
        InputReader(pinned).read([0])


def test_a_shrunken_input_is_noticed_while_reading(here: Path) -> None:
    path = write_jsonl(here / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pinned = pin(path)
    write_jsonl(path, [{"prompt": "a"}])
    with pytest.raises(InputError, match="changed since"):
        InputReader(pinned).read([0])


def test_the_identity_is_content_and_not_place_or_time(here: Path) -> None:
    first = pin(write_jsonl(here / "a.jsonl", [{"prompt": "a"}]))
    second = pin(write_jsonl(here / "b.jsonl", [{"prompt": "a"}]))
    other = pin(write_jsonl(here / "c.jsonl", [{"prompt": "b"}]))
    assert first.identity == second.identity != other.identity
    assert first != replace(second)


def write_as(path: Path, table: pa.Table) -> None:
    kind = path.suffix
    if kind == ".jsonl":
        write_jsonl(path, table.to_pylist())
    elif kind == ".json":
        path.write_text(json.dumps(table.to_pylist()))
    elif kind == ".csv":
        lines = [",".join(table.column_names)]
        lines += [",".join(map(str, row.values())) for row in table.to_pylist()]
        path.write_text("\n".join(lines) + "\n")
    elif kind == ".parquet":
        pq.write_table(table, path, row_group_size=1_000)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
