"""`export` as it is typed: what it writes, what it says, and what it refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from tests.cli.test_commands import Done
from tests.jobdir.jobs import make_job, make_outcomes, prompts


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    job = make_job(tmp_path, prompts(5))
    publish_segment(job, make_outcomes(job, range(5), failed={1, 2}))
    finalize(job, check=None, facts=None)
    return job


def test_error_rows_that_are_left_out_are_counted(job: JobDirectory, tmp_path: Path) -> None:
    done = Done(["export", job.root, "-o", tmp_path / "x.jsonl", "--columns", " level , prompt "])
    assert done.code == 0, done.wrong
    assert f"x.jsonl: 3 rows (jsonl); 2 error rows are not in it, but in {job.errors}" in done.shown
    first = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert list(first) == ["level", "prompt"]
    kind = ["--format", "openai-batch"]
    done = Done(["export", job.root, "-o", tmp_path / "responses.jsonl", *kind])
    assert "responses.jsonl: 5 rows (openai-batch)\n" in done.shown


def test_a_saved_dataset_is_one_line_without_a_librarys_progress(
    job: JobDirectory, tmp_path: Path
) -> None:
    command = "from spot_batch.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", command, "export", str(job.root), "-o", str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_what_a_running_job_has_in_no_part_yet_is_counted(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(9), output__rows_per_part=4)
    publish_segment(job, make_outcomes(job, range(7)))
    compact(job, 0)
    done = Done(["export", job.root, "-o", tmp_path / "x.jsonl", "--partial"])
    assert done.code == 0, done.wrong
    assert "4 rows (jsonl, not complete); 3 more are durable and in no part yet" in done.shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.csv"], "no format goes by the ending '.csv'; known are .parquet, .jsonl"),
        (["-o", "x.jsonl", "--format", "xml"], "--format must be one of parquet"),
        (["-o", "x.jsonl", "--as", "chat"], "--as must be one of messages"),
        (["-o", "x.jsonl", "--columns", "level,level"], "'level' is named twice"),
        (["-o", "x.jsonl", "--columns", "nothing"], "--columns: no column 'nothing'"),
        (["-o", "x.jsonl", "--where", "level ="], "--where: 'level =': Parser Error"),
        (["-o", "x.jsonl", "--format", "openai-batch", "--group"], "no --as, --group"),
        (["-o", "there.jsonl"], "is there already; --force writes over it"),
        (["-o", "out", "--force"], "is in the job directory"),
        (["-o", "out"], "is in the job directory"),
        (["-o", ".", "--force", "--format", "hf"], "holds the job directory"),
        ([], "export wants a file or folder"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    job: JobDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.jsonl").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = Done(["export", "out", *arguments])
    assert done.code == 2, done.shown
    assert message in done.wrong
    assert done.wrong.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("there.jsonl").read_text() == "mine"


def test_force_writes_over_an_export(job: JobDirectory, tmp_path: Path) -> None:
    for name in ("x.jsonl", "saved"):
        command = ["export", job.root, "-o", tmp_path / name]
        assert Done(command).code == 0
        assert "is there already" in Done(command).wrong
        assert Done([*command, "--force"]).code == 0


def test_a_retry_of_codes_that_cannot_change_starts_nothing(job: JobDirectory) -> None:
    for codes, message in (
        ("too_long", "--code: too_long is a fault of the row"),
        ("oom, ooom", "--code: no error code is named 'ooom'; codes there are: oom"),
        ("actor_crash", "no error rows that a retry could mend"),
    ):
        done = Done(["retry", job.root, "--code", codes])
        assert (done.code, done.shown) == (2, "")
        assert message in done.wrong
    assert job.is_complete
