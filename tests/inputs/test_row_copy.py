from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
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
from tests.inputs.test_pin import write_as
from tests.inputs.test_requests import request
from tests.jobdir.jobs import make_spec, write_jsonl

NUM_ROWS = 2_600


def pin(source: Path | str, kept: Path, **overrides: object) -> PinnedInput:
    return pin_input(make_spec(source, **overrides), hub_dir=kept, is_copied=True)


def everything(pinned: PinnedInput) -> tuple[object, ...]:
    """All that a reader says of all rows."""
    reader = InputReader(pinned)
    rows = reader.read(range(pinned.num_rows))
    faults = {
        place: (fault.code, fault.message, fault.custom_id) for place, fault in rows.faults.items()
    }
    places = [reader.where(row) for row in range(pinned.num_rows)]
    return rows.table.schema, rows.table.to_pylist(), faults, dict(rows.raw), places


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "openai-batch"])
def test_a_copy_is_read_as_its_files_are(tmp_path: Path, kind: str) -> None:
    suffix = "jsonl" if kind == "openai-batch" else kind
    columns = {"id": [f"r{i}" for i in range(NUM_ROWS)], "n": list(range(NUM_ROWS))}
    table = pa.table({"prompt": [f"p{i}" for i in range(NUM_ROWS)], **columns})
    for name, rows in (("a", table.slice(0, 1_500)), ("b", table.slice(1_500))):
        if kind == "openai-batch":
            write_jsonl(
                tmp_path / f"{name}.jsonl", [request(each) for each in rows["id"].to_pylist()]
            )
        else:
            write_as(tmp_path / f"{name}.{suffix}", rows)
    if suffix in ("jsonl", "csv"):
        with (tmp_path / "a.jsonl" if suffix == "jsonl" else tmp_path / "a.csv").open("ab") as file:
            file.write(b'\n{"id": "bad", \xff\n7\n')
    given = {"input__format": kind, "input__limit": 2_550}
    given |= {} if kind == "openai-batch" else {"input__custom_id": "id"}
    pinned = pin(f"{tmp_path}/*.{suffix}", tmp_path / "kept", **given)
    in_place = pin_input(make_spec(f"{tmp_path}/*.{suffix}", **given))
    assert pinned.copy
    assert not in_place.copy
    assert pinned.identity == in_place.identity
    assert everything(pinned) == everything(in_place)
    assert [chunk.num_rows for chunk in pinned.chunks] == [1_024, 1_024, 502]
    assert [chunk.first_row for chunk in pinned.chunks] == [0, 1_024, 2_048]


def test_rows_that_are_not_utf8_are_copied_as_the_faults_that_they_are(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    pq.write_table(pa.table({"prompt": bad, "n": [1, 2, 3]}), tmp_path / "a.parquet")
    pinned = pin(tmp_path / "a.parquet", tmp_path / "kept", input__custom_id="n")
    read = InputReader(pinned).read([0, 1, 2])
    assert read.table["prompt"].to_pylist() == ["good", None, "fine"]
    assert {place: str(fault) for place, fault in read.faults.items()} == {
        1: "bad_encoding: column 'prompt': not UTF-8"
    }
    assert read.faults[1].custom_id == "2"


def test_what_becomes_of_the_files_does_not_matter_to_a_copy(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pinned = pin(path, tmp_path / "kept")
    write_jsonl(path, [{"prompt": "c"}, {"prompt": "d"}])
    check_unchanged(pinned)
    path.unlink()
    check_unchanged(pinned)
    assert InputReader(pinned).read([1, 0]).table["prompt"].to_pylist() == ["b", "a"]
    Path(pinned.copy).unlink()
    with pytest.raises(InputError, match="gone since the job was submitted"):
        check_unchanged(pinned)


def test_what_was_unpacked_goes_when_its_rows_are_copied(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    pinned = pin(tmp_path / "a.jsonl.gz", tmp_path / "kept")
    assert [str(path) for path in (tmp_path / "kept").iterdir()] == [pinned.copy]
    assert InputReader(pinned).where(0) == "a.jsonl.gz line 1"


def test_a_dataset_that_was_written_beside_the_job_needs_no_copy(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["a"]}).save_to_disk(tmp_path / "saved")
    pinned = pin(tmp_path / "saved", tmp_path / "kept")
    assert not pinned.copy
    shutil.rmtree(tmp_path / "saved")
    check_unchanged(pinned)
    assert InputReader(pinned).read([0]).table["prompt"].to_pylist() == ["a"]


def test_an_input_beyond_the_limit_stays_where_it_is_and_is_looked_at(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    pinned = pin(path, tmp_path / "kept", input__copy_limit_gib=path.stat().st_size / 2**30 / 2)
    assert not pinned.copy
    assert pin(path, tmp_path / "kept", input__copy_limit_gib=path.stat().st_size / 2**30).copy
    reader = InputReader(pinned)
    assert reader.read([0]).table["prompt"].to_pylist() == ["a"]
    os.utime(path, ns=(1, 1))  # touched, and what it was
    assert InputReader(pinned).read([0]).table["prompt"].to_pylist() == ["a"]
    path.write_text(path.read_text().replace("b", "c"))  # as long as it was
    for each in (InputReader(pinned), _with_nothing_held(reader)):
        with pytest.raises(InputError, match=r"a\.jsonl: changed since the job was submitted"):
            each.read([0])


def _with_nothing_held(reader: InputReader) -> InputReader:
    reader._held.clear()
    return reader


def test_a_pin_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"prompt": "x" * 900, "n": i} for i in range(25_000)))
    code = (
        "from pathlib import Path\n"
        "from tests.inputs.test_row_copy import pin\n"
        f"pin(Path({str(path)!r}), Path({str(tmp_path / 'kept')!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while process.poll() is None and not list((tmp_path / "kept").glob("*.partial")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    pinned = pin(path, tmp_path / "kept")
    assert [str(each) for each in (tmp_path / "kept").iterdir()] == [pinned.copy]
    made = Path(pinned.copy).stat().st_mtime_ns
    assert pin(path, tmp_path / "kept") == pinned
    assert Path(pinned.copy).stat().st_mtime_ns == made
    assert InputReader(pinned).read([24_999]).table["n"].to_pylist() == [24_999]


def test_rows_of_other_types_are_another_copy(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "n": 1, "m": 2}])
    one, other = (pin(path, tmp_path / "kept", input__keep=[name]) for name in ("n", "m"))
    assert one.copy != other.copy
    assert InputReader(one).read([0]).table.to_pylist() == [{"prompt": "a", "n": 1}]
    assert InputReader(other).read([0]).table.to_pylist() == [{"prompt": "a", "m": 2}]


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "n": 1, "m": 2}])
    reader = InputReader(pin(path, tmp_path / "kept"), columns=["m", "prompt"])
    assert reader.read([0]).table.to_pydict() == {"m": [2], "prompt": ["a"]}


def test_one_batch_is_unpacked_for_the_rows_of_one_batch(tmp_path: Path) -> None:
    """In place too: an Arrow file's batch has an address, and the others are left alone."""
    table = pa.table({"prompt": [f"{i:01000}" for i in range(20_000)]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=500)
    in_place = pin_input(make_spec(tmp_path / "a.arrow"))
    pool = pa.default_memory_pool()
    for pinned in (in_place, pin(tmp_path / "a.arrow", tmp_path / "kept")):
        reader = InputReader(pinned)
        before = pool.total_bytes_allocated()
        assert reader.read([19_999]).table["prompt"].to_pylist() == [f"{19_999:01000}"]
        assert pool.total_bytes_allocated() - before < 5_000_000


def test_a_damaged_copy_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    pinned = pin(path, tmp_path / "kept")
    data = Path(pinned.copy).read_bytes()
    Path(pinned.copy).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"\.arrow: damaged"):
        InputReader(pinned)
    with pytest.raises(InputError, match=r"\.arrow: damaged"):
        pin(path, tmp_path / "kept")


def test_no_rows_are_copied_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    pinned = pin(tmp_path / "a.jsonl", tmp_path / "kept", input__prompt="q")
    assert pinned.copy
    assert InputReader(pinned).read([]).table.column_names == ["q"]


def test_a_file_that_grows_between_two_readings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.csv", [])
    path.write_text("prompt\na\n")
    pinned = pin_input(make_spec(path))
    longer = replace(pinned, files=(replace(pinned.files[0], size=1, digest="other"),))
    from spot_batch.inputs.row_copy import copy_rows

    with pytest.raises(InputError, match=r"a\.csv: changed since"):
        copy_rows(longer, tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_json_rows_of_a_copy_are_plain_arrow(tmp_path: Path) -> None:
    """Any reader of Arrow files opens the copy: columns, then line and fault."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\nnot json\n")
    pinned = pin(path, tmp_path / "kept")
    with pa.ipc.open_file(pinned.copy) as file:
        table = file.read_all()
    assert table.column_names == ["prompt", "line", "fault"]
    assert table["line"].to_pylist() == [1, 2]
    assert table["fault"].to_pylist()[0] is None
    assert table["fault"].to_pylist()[1]["code"] == "bad_json"
