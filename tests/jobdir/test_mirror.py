"""A job directory at a URL, on a real S3 server and on file systems of fsspec."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import spot_batch
from spot_batch.job.reading import load_spec
from spot_batch.job.remote import local_folder
from spot_batch.job.spec import SpecError
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.mirror import Mirror, address_of, folder_of, is_driven_from, mirrored
from spot_batch.jobdir.parts import compact, delete_covered_segments
from spot_batch.jobdir.scan import fault_of_part
from spot_batch.jobdir.segments import publish_segment
from tests.jobdir.jobs import make_job, make_outcomes, prompts

URL = "s3://rows/runs/a"
OWNER = "runs/a/_spot/mirrored-by"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def begin(folder: Path, url: str = URL) -> JobDirectory:
    """A job of twelve rows in the folder that mirrors the URL."""
    Mirror(url, folder / "out").pull()
    return make_job(folder, prompts(12), output__rows_per_part=4)


def keys(s3: Any) -> set[str]:
    listed = s3.list_objects_v2(Bucket="rows").get("Contents", ())
    found = {each["Key"].removeprefix("runs/a/") for each in listed}
    return {key for key in found if not key.endswith("/")}  # marks of folders, left by pyarrow


def files(root: Path) -> dict[str, bytes]:
    """What a job directory holds, but what is this machine's alone."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "mirror.json"
    }


def finish(job: JobDirectory) -> None:
    with mirrored(job.root):
        publish_segment(job, make_outcomes(job, range(12), failed={5}))
        finalize(job, check=None, facts=None)


def test_a_finished_job_is_whole_in_the_store_and_on_any_machine(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    finish(job)
    assert keys(s3) - {"_spot/mirrored-by"} == files(job.root).keys()
    assert not [key for key in keys(s3) if "/tmp/" in key or "segments" in key]
    elsewhere = folder_of(URL)
    assert elsewhere == local_folder(URL) != job.root
    assert files(elsewhere) == files(job.root)
    assert (address_of(elsewhere), address_of(tmp_path)) == (URL, str(tmp_path))
    rows = spot_batch.load(URL)
    assert rows["row_index"] == [row for row in range(12) if row != 5]
    assert spot_batch.load(URL, "errors")["row_index"] == [5]


@pytest.mark.parametrize("url", [URL, "memory://rows/large"])
def test_files_too_large_for_memory_and_for_one_write_are_copied_whole(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("spot_batch.jobdir.mirror._MOST_IN_MEMORY", 100)
    monkeypatch.setattr("spot_batch.jobdir.mirror._MOST_AT_ONCE", 77)
    job = begin(tmp_path, url)
    finish(job)
    assert files(folder_of(url)) == files(job.root)


def test_another_machine_goes_on_with_what_the_store_has(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    with mirrored(job.root):
        publish_segment(job, make_outcomes(job, range(6)))
        compact(job, 0)
    publish_segment(job, make_outcomes(job, [7]))  # the machine is lost with it
    there = JobDirectory.open(folder_of(URL))
    assert len(list(there.segments.iterdir())) == len(list(job.segments.iterdir())) - 1
    with mirrored(there.root):
        publish_segment(there, make_outcomes(there, range(6, 12)))
        finalize(there, check=None, facts=None)
    assert {"_SUCCESS"} < keys(s3)
    assert not [key for key in keys(s3) if "segments" in key]
    Mirror(URL, job.root).pull()  # the first machine is behind now
    assert files(job.root) == files(there.root)


def test_what_has_not_changed_is_copied_once(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    finish(job)

    def written() -> list[tuple[str, str]]:
        listed = s3.list_object_versions(Bucket="rows")["Versions"]
        return [(each["Key"], each["VersionId"]) for each in listed if each["Key"] != OWNER]

    s3.put_bucket_versioning(Bucket="rows", VersioningConfiguration={"Status": "Enabled"})
    before = written()
    with mirrored(job.root):
        pass
    assert written() == before
    elsewhere = folder_of(URL)
    times = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*.arrow")}
    assert times
    folder_of(URL)
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_job_that_is_opened_again_is_not_finished_in_the_store_first(
    s3: Any, tmp_path: Path
) -> None:
    job = begin(tmp_path)
    finish(job)
    job.success.unlink()
    (job.data / job.part_name(1)).unlink()
    Mirror(URL, job.root).push()
    assert "_SUCCESS" not in keys(s3)
    assert f"data/{job.part_name(1)}" not in keys(s3)


@pytest.mark.slow  # the S3 client tries for long
def test_this_machine_does_not_lose_what_it_could_not_copy(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(tmp_path)
    began = mirrored(job.root)
    began.__enter__()
    publish_segment(job, make_outcomes(job, range(12)))
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OutputError, match=r"cannot be written.*everything is in"):
        began.__exit__(None, None, None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    Mirror(URL, job.root).pull()
    assert len(list(job.segments.iterdir())) == 1
    with mirrored(job.root):
        pass
    assert any(key.startswith("_spot/segments/") for key in keys(s3))


def test_a_job_that_is_not_there_is_named_by_its_url(s3: Any) -> None:
    with pytest.raises(OutputError, match=rf"^{URL}: is not a job directory"):
        JobDirectory.open(folder_of(URL))


def test_a_store_that_cannot_be_used_is_named(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="rows", Key="runs/a/notes.txt", Body=b"mine")
    with pytest.raises(OutputError, match="s3://rows/runs/a: is not empty and not a job directory"):
        folder_of(URL)
    with pytest.raises(OutputError, match="s3://no-such-bucket/a: cannot be"):
        Mirror("s3://no-such-bucket/a", tmp_path / "out").claim()
    with pytest.raises(OutputError, match="nowhere://a: cannot be read"):
        folder_of("nowhere://a")
    (tmp_path / "b" / "_spot").mkdir(parents=True)
    (tmp_path / "b" / "_spot" / "mirror.json").write_text("[]")
    with pytest.raises(OutputError, match=r"mirror\.json: damaged"):
        folder_of(tmp_path / "b")


@pytest.mark.slow  # the S3 client tries for long
def test_a_store_that_does_not_answer_is_not_an_empty_one(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(tmp_path)
    finish(job)
    before = files(job.root)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OutputError, match="s3://rows/runs/a: cannot be read"):
        Mirror(URL, job.root).pull()
    assert files(job.root) == before


def test_a_folder_that_cannot_be_listed_takes_nothing_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(begin(tmp_path, "memory://runs/c"))
    elsewhere = folder_of("memory://runs/c")
    before = files(elsewhere)
    memory = type(fsspec.filesystem("memory"))
    ls = memory.ls

    def slow_down(self: Any, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if path.endswith("/data"):
            raise OSError("slow down")
        return ls(self, path, detail=detail, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "ls", slow_down)
        with pytest.raises(OutputError, match="slow down"):
            folder_of("memory://runs/c")
    assert files(elsewhere) == before
    fsspec.filesystem("memory").rm("/runs", recursive=True)


class Failing:
    """fsspec's file system in memory, whose writes (or reads) fail where `fails` says so."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mode: str, fails: Callable[[int], bool]
    ) -> None:
        self.done: list[str] = []
        memory, num_tried = type(fsspec.filesystem("memory")), itertools.count(1)
        real = memory.open

        def open(store: Any, path: str, how: str = "rb", **kwargs: Any) -> Any:
            if how == mode and not path.endswith("mirrored-by"):
                if fails(next(num_tried)):
                    raise OSError("slow down")
                self.done.append(path.rpartition("/runs/d/")[2])
            return real(store, path, how, **kwargs)

        monkeypatch.setattr(memory, "open", open)


MEMORY = "memory://runs/d"


@pytest.fixture
def in_memory() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield store
    if store.exists("/runs"):
        store.rm("/runs", recursive=True)


def tries(act: Callable[[], None]) -> int:
    """How often a store has to be asked until it has done all of it."""
    for num_tried in range(1, 200):
        try:
            act()
        except OutputError:
            continue
        else:
            return num_tried
    raise AssertionError("no end")


def test_a_store_that_fails_at_every_second_file_ends_up_whole(
    in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin(tmp_path, MEMORY)
    publish_segment(job, make_outcomes(job, range(12), failed={5}))
    finalize(job, check=None, facts=None)
    with monkeypatch.context() as patch:
        written = Failing(patch, "wb", lambda number: number % 2 == 0)
        mirror = Mirror(MEMORY, job.root)
        assert tries(mirror.push) > 5
    assert len(set(written.done)) == len(written.done) == len(files(job.root))
    with monkeypatch.context() as patch:
        read = Failing(patch, "rb", lambda number: number % 2 == 0)
        elsewhere = Mirror(MEMORY, tmp_path / "elsewhere")
        assert tries(elsewhere.pull) > 5
    assert len(set(read.done)) == len(read.done) == len(files(job.root))
    assert files(elsewhere.root) == files(job.root)


@pytest.mark.parametrize("kind", ["fails", "is stopped"])
def test_a_copy_that_ends_at_any_write_is_gone_on_with(
    in_memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What another machine reads meanwhile is a job without damage, or none yet."""

    class Stopped(BaseException):
        pass

    def ends(number: int) -> bool:
        if number == at and kind == "is stopped":
            raise Stopped
        return number == at

    for at in range(1, 100):
        root = tmp_path / str(at)
        job = begin(root, MEMORY)
        publish_segment(job, make_outcomes(job, range(6), failed={5}))
        Mirror(MEMORY, job.root).push()
        publish_segment(job, make_outcomes(job, range(6, 12)))
        finalize(job, check=None, facts=None)
        before, mark = set(in_memory.find("/runs/d")), job.spot / "mirror.json"
        known = mark.read_bytes()
        mirror = Mirror(MEMORY, job.root)
        with monkeypatch.context() as patch:
            Failing(patch, "wb", ends)
            try:
                mirror.push()
            except OutputError:
                pass
            except Stopped:
                mark.write_bytes(known)  # as a kill leaves it
                mirror = Mirror(MEMORY, job.root)
            else:
                assert at > len(set(in_memory.find("/runs/d")) - before)
                break
        elsewhere = Mirror(MEMORY, root / "elsewhere")
        elsewhere.pull()
        there = JobDirectory.open(elsewhere.root)
        assert not there.is_complete
        assert fault_of_published(there) == []
        mirror.push()
        elsewhere.pull()
        assert files(elsewhere.root) == files(job.root)
        in_memory.rm("/runs", recursive=True)
    else:
        raise AssertionError("the copy never ended")


def fault_of_published(job: JobDirectory) -> list[str]:
    faults = (
        fault_of_part(job, part, verify=True)
        for part in range(job.num_parts)
        if (job.data / job.part_name(part)).exists()
    )
    return [fault for fault in faults if fault is not None]


def test_a_bucket_that_is_gone_takes_nothing_away(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    finish(job)
    before = files(job.root)
    for key in keys(s3):
        s3.delete_object(Bucket="rows", Key=f"runs/a/{key}")
    for each in s3.list_objects_v2(Bucket="rows").get("Contents", ()):
        s3.delete_object(Bucket="rows", Key=each["Key"])
    s3.delete_bucket(Bucket="rows")
    with pytest.raises(OutputError, match=r"cannot be read: .*bucket does not exist"):
        Mirror(URL, job.root).pull()
    assert files(job.root) == before
    s3.create_bucket(Bucket="rows")
    Mirror(URL, job.root).pull()  # whoever empties the store has removed the job
    assert not files(job.root)


def test_a_file_that_goes_while_the_store_is_read(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    with mirrored(job.root):
        publish_segment(job, make_outcomes(job, range(4)))
    mirror = Mirror(URL, tmp_path / "elsewhere")
    store = mirror._store
    calls: list[str] = []

    def and_compacts() -> tuple[Any, str]:
        files, base = store()
        if not calls:
            find, calls[:] = files.ls, ["once"]

            def ls(path: str, detail: bool = True) -> Any:
                listed = find(path, detail=detail)
                if path.endswith("/segments"):  # listed, and gone before it is read
                    delete_covered_segments(job, [compact(job, 0)])
                    Mirror(URL, job.root).push()
                return listed

            files.ls = ls
        return files, base

    mirror._store = and_compacts  # type: ignore[method-assign]
    mirror.pull()
    there = JobDirectory.open(mirror.root)
    assert [each.name for each in there.data.iterdir()] == [job.part_name(0)]
    assert not list(there.segments.glob("*.arrow"))


def test_a_driver_that_was_overtaken_takes_nothing_from_the_store(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    began = mirrored(job.root)
    began.__enter__()
    finish(JobDirectory.open(folder_of(URL)))
    done = keys(s3)
    publish_segment(job, make_outcomes(job, range(3)))
    with pytest.raises(OutputError, match="another machine has gone on with this job"):
        began.__exit__(None, None, None)
    assert keys(s3) == done
    assert "_SUCCESS" in done


def test_a_driver_of_another_cache_folder_is_seen_through_the_store(
    s3: Any, tmp_path: Path
) -> None:
    job = begin(tmp_path)
    with acquire_driver_lock(job), mirrored(job.root):
        elsewhere = JobDirectory.open(folder_of(URL))
        assert not elsewhere.segments.exists()
        publish_segment(job, make_outcomes(job, range(4)))
        Mirror(URL, job.root).push()
        folder_of(URL)
        assert len(list(elsewhere.segments.iterdir())) == 1
        mirrors = [Mirror.of(each.root) for each in (job, elsewhere)]
        assert [each and is_driven_from(each) for each in mirrors] == [True, False]


def test_names_that_lead_out_of_the_folder_are_refused(s3: Any, tmp_path: Path) -> None:
    job = begin(tmp_path)
    finish(job)
    s3.put_object(Bucket="rows", Key="runs/a/data/../../../../escaped", Body=b"x")
    with pytest.raises(OutputError, match="which no job has"):
        folder_of(URL)


def test_other_file_systems_of_fsspec(tmp_path: Path) -> None:
    for url in ("memory://runs/b", f"file://{tmp_path}/there/b"):
        folder = tmp_path / url.partition(":")[0]
        folder.mkdir()
        finish(begin(folder, url))
        assert spot_batch.load(url).num_rows == 11
        shutil.rmtree(local_folder(url))
        assert spot_batch.load(url).num_rows == 11
    fsspec.filesystem("memory").rm("/runs", recursive=True)


@pytest.mark.parametrize(
    "name", ["a#b", "a?b", "a%20b", "a b", "ä", 'a"{b}', "a+b&c*[d]", "日" * 80]
)
def test_every_character_of_a_url_is_one_of_the_key(s3: Any, name: str) -> None:
    mirror = Mirror(f"s3://rows/{name}/", local_folder(f"s3://rows/{name}"))
    mirror.pull()
    (mirror.root / "_spot" / "format").write_text("1\n")
    mirror.claim()
    mirror.push()
    listed = [each["Key"] for each in s3.list_objects_v2(Bucket="rows")["Contents"]]
    assert {each.split("/")[0] for each in listed} == {name}
    other = Mirror(mirror.url, mirror.root.parent / "other")
    other.pull()
    assert (other.root / "_spot" / "format").read_text() == "1\n"


@pytest.mark.parametrize("url", ["s3://", "s3://rows/../b", "s3://rows/a/./b", "s3://rows//b"])
def test_a_url_that_names_no_folder_of_its_own_is_refused(
    s3: Any, tmp_path: Path, url: str
) -> None:
    with pytest.raises(OutputError, match="names no folder of its own"):
        Mirror(url, tmp_path / "a").pull()


@pytest.mark.parametrize("path", ["s3://rows/a.jsonl", "s3://rows/a.parquet", "zip::s3://a", ""])
def test_urls_that_are_no_job_directory_are_refused(path: str) -> None:
    with pytest.raises(SpecError, match=r"output\.path: must be"):
        load_spec(None, {"input.source": "x.jsonl", "output.path": path})


def test_a_mirror_says_nothing_of_it_in_the_fingerprint(s3: Any, tmp_path: Path) -> None:
    plain = make_job(tmp_path / "plain", prompts(12), output__rows_per_part=4)
    assert begin(tmp_path / "mirrored").fingerprint == plain.fingerprint
    mirror = Mirror.of(tmp_path / "mirrored" / "out")
    assert mirror is not None
    assert mirror.url == URL
