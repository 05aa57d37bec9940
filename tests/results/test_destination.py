"""Exports replace exports, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import datasets
import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.segments import publish_segment
from spot_batch.results.export import ExportSpec, export
from tests.jobdir.jobs import make_job, make_outcomes, prompts

HF = ExportSpec(format="hf")
LINES = ExportSpec(format="jsonl")


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    (tmp_path / "home").mkdir()
    job = make_job(tmp_path / "home" / "work", prompts(4))
    publish_segment(job, make_outcomes(job, range(4)))
    finalize(job, check=None, facts=None)
    return job


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("spec", [HF, LINES], ids=["folder", "file"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("out", "is in the job directory"),
        ("out/data", "is in the job directory"),
        ("out/rows.jsonl", "is in the job directory"),
        (".", "holds the job directory"),
        ("..", "holds the job directory"),
        ("link", "is in the job directory"),
        ("rows.jsonl", "is the job's input"),
    ],
)
def test_a_job_what_is_in_it_and_what_holds_it_are_refused(
    job: JobDirectory, tmp_path: Path, spec: ExportSpec, place: str, message: str
) -> None:
    work = job.root.parent
    (work / "link").symlink_to(job.root)
    before = files_below(tmp_path)
    with pytest.raises(OutputError, match=message):
        export(job, work / place, spec)
    assert files_below(tmp_path) == before


def test_another_job_is_refused_too(job: JobDirectory, tmp_path: Path) -> None:
    other = make_job(tmp_path / "other", prompts(2))
    for place in (other.root, other.data, other.root / "x.jsonl"):
        with pytest.raises(OutputError, match="is in the job directory"):
            export(job, place, HF)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("thesis", HF, r"is not a saved dataset \(it holds 'thesis.tex'\)"),
        ("mixed", HF, r"is not a saved dataset \(it holds 'thesis.tex'\)"),
        ("thesis", LINES, "is a folder, and this format is a file"),
        ("file", HF, "is a file, and this format is a folder"),
        ("pipe", LINES, "is no plain file"),
    ],
)
def test_what_no_export_wrote_is_left_alone(
    job: JobDirectory, tmp_path: Path, name: str, spec: ExportSpec, message: str
) -> None:
    for folder in ("thesis", "mixed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "thesis.tex").write_text("years of work")
    for saved in ("state.json", "dataset_info.json"):
        (tmp_path / "mixed" / saved).write_text("{}")
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    before = files_below(tmp_path)
    with pytest.raises(OutputError, match=message):
        export(job, tmp_path / name, spec)
    assert files_below(tmp_path) == before


def test_an_export_is_replaced_and_a_link_followed(job: JobDirectory, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for _ in range(2):
        assert export(job, tmp_path / "link", HF) == 4
    assert (tmp_path / "link").is_symlink()
    assert len(datasets.load_from_disk(str(tmp_path / "empty"))) == 4
    (tmp_path / "dangling.jsonl").symlink_to("x.jsonl")
    for _ in range(2):
        assert export(job, tmp_path / "dangling.jsonl", LINES) == 4
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 4
    assert not list(tmp_path.glob(".export-*"))


def test_a_saved_dataset_stays_where_writing_another_fails(
    job: JobDirectory, tmp_path: Path
) -> None:
    export(job, tmp_path / "saved", HF)
    before = files_below(tmp_path / "saved")
    os.truncate(job.data / job.part_name(0), 100)
    with pytest.raises(ValueError, match=r"."):
        export(job, tmp_path / "saved", HF)
    assert files_below(tmp_path / "saved") == before


def test_any_name_will_do_for_a_saved_dataset(job: JobDirectory, tmp_path: Path) -> None:
    export(job, tmp_path / "rows.arrows", HF)
    assert len(datasets.load_from_disk(str(tmp_path / "rows.arrows"))) == 4
