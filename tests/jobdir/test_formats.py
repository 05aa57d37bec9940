"""Directories that earlier versions wrote open, load and go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import spot_batch
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.scan import scan
from spot_batch.jobdir.segments import publish_segment
from tests.jobdir.jobs import make_outcomes
from tests.jobdir.test_parts import read

DATA = Path(__file__).parent.parent / "data"


@pytest.mark.parametrize("name", sorted(each.name for each in DATA.glob("format-*")))
def test_a_directory_of_an_earlier_version_opens_and_goes_on(tmp_path: Path, name: str) -> None:
    root = tmp_path / "job"
    shutil.copytree(DATA / name / "out", root)
    shutil.copy(DATA / name / "rows.jsonl", tmp_path / "rows.jsonl")
    # Where the input was when it was made is nobody's business: it was made relative to the folder.
    text = (root / "_spot" / "input.json").read_text()
    (root / "_spot" / "input.json").write_text(text.replace("FOLDER", str(tmp_path)))
    job = JobDirectory.open(root)
    published = scan(job, verify=True)
    assert (str(published.data), str(published.in_parts)) == ("0-3", "0-2")
    before = (job.data / job.part_name(0)).read_bytes()
    assert spot_batch.load(root, partial=True)["row_index"][:] == [0, 2]
    publish_segment(job, make_outcomes(job, [4, 5]))
    summary = finalize(job, check=None, facts=None)
    assert (summary.totals.num_completions, summary.totals.num_errors) == (5, 1)
    assert (job.data / job.part_name(0)).read_bytes() == before
    assert spot_batch.load(root)["generation"][:][-1] == "sample 5 is 25 é😀"
    assert spot_batch.load(root, "errors")["code"][:] == ["oom"]
    assert read(job.data / job.part_name(1)).num_rows == 3


def test_no_secret_of_the_environment_or_the_home_reaches_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.service.jobs import prompts, run_here, small_spec, write_rows

    canary = "canary-9f31c7"
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "OPENAI_API_KEY")
    for name in (*names, "RAY_AUTH_TOKEN", "SPOT_BATCH_ANYTHING"):
        monkeypatch.setenv(name, f"{canary}-{name}")
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "credentials").write_text(f"aws_secret_access_key = {canary}")
    monkeypatch.setenv("HOME", str(home))
    spec = small_spec(write_rows(tmp_path, prompts(2)), {"generation.max_new_tokens": 4})
    job = run_here(tmp_path / "out", spec)
    holding = [
        path
        for path in job.root.rglob("*")
        if canary in path.name or (path.is_file() and canary.encode() in path.read_bytes())
    ]
    assert holding == []
    assert job.is_complete
