"""Compressed and remote inputs: kept once, pinned by what they were."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.arrow import ArrowFSWrapper
from pyarrow import fs

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.records.input import PinnedInput
from tests.inputs import google
from tests.jobdir.jobs import make_spec, write_jsonl

ROWS = [{"prompt": f"row {i}"} for i in range(3)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def pin(source: Path | str, kept: Path, **overrides: object) -> PinnedInput:
    return pin_input(make_spec(source, **overrides), hub_dir=kept)


def prompts_of(pinned: PinnedInput) -> list[object]:
    rows = InputReader(pinned).read(range(pinned.num_rows))
    return list(rows.table["prompt"].to_pylist())


def by_arrow(codec: str) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as packed:
            packed.write(data)
        return bytes(sink.getvalue())

    return pack


def zipped(data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("rows.jsonl", data)
    return sink.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": by_arrow("zstd"),
    "lz4": by_arrow("lz4"),
    "zip": zipped,
}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_compressed_file_is_the_input_that_it_holds(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"rows.jsonl.{kind}").write_bytes(PACKERS[kind](TEXT))
    plain = write_jsonl(tmp_path / "plain.jsonl", ROWS)
    pinned = pin(tmp_path / f"rows.jsonl.{kind}", tmp_path / "kept")
    assert prompts_of(pinned) == [row["prompt"] for row in ROWS]
    assert pinned.identity == pin(plain, tmp_path / "kept").identity
    (kept,) = (tmp_path / "kept").iterdir()
    before = kept.stat().st_mtime_ns
    pin(tmp_path / f"rows.jsonl.{kind}", tmp_path / "kept")
    assert kept.stat().st_mtime_ns == before


def test_a_folder_and_a_pattern_take_compressed_files_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(TEXT))
    write_jsonl(tmp_path / "in" / "b.jsonl", ROWS)
    for source in (tmp_path / "in", f"{tmp_path}/in/*"):
        assert pin(source, tmp_path / "kept").num_rows == 6


@pytest.mark.parametrize("data", [gzip.compress(TEXT)[:-9], b"no gzip"], ids=["cut short", "none"])
def test_a_file_that_cannot_be_unpacked_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz.*cannot be"):
        pin(tmp_path / "rows.jsonl.gz", tmp_path / "kept")
    assert not list((tmp_path / "kept").iterdir())


def test_a_compressed_file_that_changed_is_refused_and_a_packed_again_one_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(TEXT))
    pinned = pin(path, tmp_path / "kept")
    path.write_bytes(gzip.compress(TEXT, compresslevel=1, mtime=7))
    check_unchanged(pinned)
    path.write_bytes(gzip.compress(TEXT.replace(b"row 1", b"row 7")))
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz: changed since the job was submitted"):
        check_unchanged(pinned)
    path.unlink()
    with pytest.raises(InputError, match="gone since"):
        check_unchanged(pinned)


def test_any_file_system_of_fsspec_is_read(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/b.jsonl.gz", gzip.compress(TEXT))
    memory.pipe("/bucket/a.jsonl", TEXT.replace(b"row", b"line"))
    memory.pipe("/bucket/_hidden.jsonl", TEXT)
    memory.pipe("/bucket/notes.txt", b"no rows")
    for url in ("memory://bucket", "memory://bucket/*.jsonl*"):
        found = prompts_of(pin(url, tmp_path / "kept"))
        assert found == ["line 0", "line 1", "line 2", "row 0", "row 1", "row 2"]
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert pin(f"file://{tmp_path}/rows.jsonl", tmp_path / "kept").num_rows == 3
    with pytest.raises(InputError, match="no such file: memory://bucket/none"):
        pin("memory://bucket/none.jsonl", tmp_path / "kept")
    with pytest.raises(InputError, match="chain of file systems"):
        pin("simplecache::memory://bucket/a.jsonl", tmp_path / "kept")


def test_a_remote_folder_with_more_in_its_folders_or_of_several_splits_is_asked_about(
    tmp_path: Path,
) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/asked/in/a.jsonl", TEXT)
    memory.pipe("/asked/in/_cache/b.jsonl", TEXT)
    memory.pipe("/asked/in/job/_spot/format", b"1")
    memory.pipe("/asked/in/job/data/part-0.arrow", b"")
    assert pin("memory://asked/in", tmp_path / "kept").num_rows == 3
    memory.pipe("/asked/in/more/deep/c.jsonl", TEXT)
    with pytest.raises(InputError) as caught:
        pin("memory://asked/in", tmp_path / "kept")
    assert str(caught.value) == (
        "input.source: memory://asked/in holds 1 file to read and its folders more "
        "(more/deep/c.jsonl); say which: 'memory://asked/in/*' or 'memory://asked/in/more/deep'"
    )
    assert pin("memory://asked/in/*", tmp_path / "kept").num_rows == 3
    for name in ("train", "test"):
        memory.pipe(f"/asked/splits/{name}-00000.jsonl", TEXT)
    with pytest.raises(InputError, match="holds several splits of a dataset"):
        pin("memory://asked/splits", tmp_path / "kept")
    assert pin("memory://asked/splits/train*", tmp_path / "kept").num_rows == 3


def test_a_pattern_matches_all_files_or_none(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("lines/a/x.jsonl", TEXT)
    put("lines/b/x.jsonl", TEXT)
    assert pin("s3://rows/lines/*/x.jsonl", tmp_path / "kept").num_rows == 6
    ls = ArrowFSWrapper.ls

    def slow_down(self: Any, path: str, **kwargs: Any) -> Any:
        if path.endswith("lines/b"):
            raise OSError("slow down")
        return ls(self, path, **kwargs)

    monkeypatch.setattr(ArrowFSWrapper, "ls", slow_down)
    with pytest.raises(InputError, match="slow down"):
        pin("s3://rows/lines/*/x.jsonl", tmp_path / "kept")


def test_googles_storage_is_read_by_name_folder_and_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"a.jsonl": TEXT.replace(b"row", b"line"), "b.jsonl.gz": gzip.compress(TEXT)}
    with google.serving({**files, "_hidden.jsonl": TEXT, "notes.txt": b"no rows"}) as endpoint:
        stub = fs.GcsFileSystem(anonymous=True, endpoint_override=endpoint, scheme="http")
        monkeypatch.setattr("spot_batch.job.remote._google_cloud", lambda: stub)
        both = ["line 0", "line 1", "line 2", "row 0", "row 1", "row 2"]
        found = {"gs://rows": both, "gs://rows/*.jsonl*": both, "gs://rows/a.jsonl": both[:3]}
        for url, prompts in found.items():
            assert prompts_of(pin(url, tmp_path / "kept")) == prompts
        check_unchanged(pin("gs://rows/b.jsonl.gz", tmp_path / "kept"))
        with pytest.raises(InputError, match="no such file: gs://rows/none"):
            pin("gs://rows/none.jsonl", tmp_path / "kept")


def test_googles_storage_without_credentials_says_so_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_ROOT", "127.0.0.1:9")
    monkeypatch.setattr("spot_batch.job.remote.GOOGLE_PATIENCE_S", 0.5)
    with pytest.raises(InputError, match=r"gs://rows/a\.jsonl cannot be read: .*authenticat"):
        pin("gs://rows/a.jsonl", tmp_path / "kept")


Put = Callable[[str, bytes], object]


@pytest.fixture
def put(s3: Any) -> Put:
    """Writes an object of bucket `rows` to a real S3 server, which the environment points at."""
    return lambda key, data: s3.put_object(Bucket="rows", Key=key, Body=data)


def test_s3_objects_are_read_and_pinned(put: Put, tmp_path: Path) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a", "b"], "n": pa.array([1, None], pa.int8())}), sink)
    put("tables/part-1.parquet", sink.getvalue())
    put("lines/a.jsonl.gz", gzip.compress(TEXT))
    put("lines/b.jsonl", TEXT)
    assert prompts_of(pin("s3://rows/tables", tmp_path / "kept")) == ["a", "b"]
    pinned = pin("s3://rows/lines/*.jsonl*", tmp_path / "kept")
    assert pinned.num_rows == 6
    assert pinned.files[1].origin == "s3://rows/lines/b.jsonl"
    check_unchanged(pinned)
    put("lines/b.jsonl", TEXT.replace(b"row", b"other row"))
    with pytest.raises(InputError, match=r"b\.jsonl: changed since"):
        check_unchanged(pinned)
    put("odd/100% é #1.jsonl", TEXT)
    assert pin("s3://rows/odd", tmp_path / "kept").num_rows == 3
    with pytest.raises(InputError, match="no such file: s3://rows/none"):
        pin("s3://rows/none.jsonl", tmp_path / "kept")


def test_a_malformed_line_ends_the_job_where_the_spec_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(TEXT + b'{"prompt": \n' + TEXT)
    assert pin(path, tmp_path).num_faults == 1
    with pytest.raises(InputError, match=r"1 rows cannot be read.*: rows\.jsonl line 4: bad_json"):
        pin(path, tmp_path, input__malformed="refuse")


def test_nulls_of_one_file_take_the_type_of_another_at_any_depth(tmp_path: Path) -> None:
    """A struct that is null in the first file and filled in the second, and so on down."""
    tables = [
        pa.table({"prompt": ["a"], "s": pa.nulls(1), "d": [{"x": None, "l": [None]}]}),
        pa.table({"prompt": ["b"], "s": [{"k": 1}], "d": [{"x": "text", "l": [{"y": 2.5}]}]}),
        pa.table({"prompt": ["c"], "s": [None], "d": [{"l": None, "more": 1}]}),
    ]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    pinned = pin(f"{tmp_path}/*.parquet", tmp_path / "kept")
    rows = InputReader(pinned).read([0, 1, 2]).table
    assert rows["s"].to_pylist() == [None, {"k": 1}, None]
    assert rows["d"].to_pylist() == [
        {"x": None, "l": [None], "more": None},
        {"x": "text", "l": [{"y": 2.5}], "more": None},
        {"x": None, "l": None, "more": 1},
    ]
