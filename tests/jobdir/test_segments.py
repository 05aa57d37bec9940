from __future__ import annotations

import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.scan import scan
from spot_batch.jobdir.segments import publish_segment, read_segment
from spot_batch.records.results import Completion
from tests.jobdir.jobs import make_job, make_outcomes, prompts


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    return make_job(tmp_path, prompts(20))


def rows_of(job: JobDirectory, name: str, folder: str = "_spot/segments") -> pa.RecordBatch:
    path = job.root / folder / name
    return read_segment(path, fingerprint=job.fingerprint, num_samples=job.num_samples)[1]


def test_a_published_segment_says_itself_what_it_holds(job: JobDirectory) -> None:
    receipt = publish_segment(job, make_outcomes(job, [3, 4, 9], failed={4}), actor="actor-1")
    assert receipt.sample_ids == (3, 4, 9)
    assert (receipt.num_rows, receipt.num_errors) == (3, 1)
    assert receipt.errors == {4: "oom"}
    assert receipt.num_tokens == 3 + 4
    published = scan(job)
    assert str(published.data) == "3-4,9"
    (segment,) = published.segments
    assert segment.name == receipt.name
    assert segment.name.startswith("000000000003-000000000009-")
    assert published.totals.num_errors == 1
    assert published.totals.num_tokens == receipt.num_tokens
    assert list(job.tmp.iterdir()) == []


def test_rows_come_in_order_of_sample_id_with_their_input(job: JobDirectory) -> None:
    outcomes = [*make_outcomes(job, [9, 1]), *make_outcomes(job, [4])]
    batch = rows_of(job, publish_segment(job, outcomes).name)
    assert batch["row_index"].to_pylist() == [1, 4, 9]
    assert batch["prompt"].to_pylist() == [f"How much is {i}?" for i in (1, 4, 9)]
    assert batch["level"].to_pylist() == [1, 1, 0]


def test_publishing_again_changes_nothing(job: JobDirectory) -> None:
    outcomes = make_outcomes(job, range(5))
    assert publish_segment(job, outcomes) == publish_segment(job, outcomes)
    assert len(list(job.segments.iterdir())) == 1


def test_audits_stand_apart(job: JobDirectory) -> None:
    publish_segment(job, make_outcomes(job, [1, 2]), purpose="audit")
    published = scan(job)
    assert len(published.data) == 0
    assert list(published.audits) == [1, 2]


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -40])
def test_a_torn_segment_is_ignored_with_a_warning(
    job: JobDirectory, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = publish_segment(job, make_outcomes(job, range(5))).name
    publish_segment(job, make_outcomes(job, range(5, 8)))
    path = job.segments / name
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        assert str(scan(job).data) == "5-7"
    assert name in caplog.text
    assert "made again" in caplog.text


def test_an_altered_segment_is_ignored_and_replaced_when_published_again(
    job: JobDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = make_outcomes(job, range(5))
    path = job.segments / publish_segment(job, outcomes).name
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    assert len(scan(job).data) == 0
    publish_segment(job, outcomes)
    assert path.read_bytes() == whole
    assert "damaged; replaced" in caplog.text
    assert len(scan(job).data) == 5


def test_a_segment_of_another_job_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = make_job(tmp_path / "a", prompts(5))
    theirs = make_job(tmp_path / "b", prompts(5), generation__seed=1)
    name = publish_segment(theirs, make_outcomes(theirs, range(5))).name
    (ours.segments / name).write_bytes((theirs.segments / name).read_bytes())
    assert len(scan(ours).data) == 0
    assert "another job" in caplog.text


def test_files_of_other_names_are_ignored(job: JobDirectory) -> None:
    (job.segments / "notes.arrow").write_text("x")
    (job.segments / ".hidden").write_text("x")
    assert len(scan(job).data) == 0


def test_text_that_utf8_cannot_hold_is_replaced_and_flagged(job: JobDirectory) -> None:
    first, second, third, fourth = make_outcomes(job, range(4))
    texts = [
        replace(first, text="half \ud83d of a pair"),
        replace(second, text="a pair \ud83d\ude00 in halves"),
        replace(third, text="NUL \x00 and ﷽ and 🜁"),
        replace(fourth, text="decoded to \ufffd already"),
    ]
    batch = rows_of(job, publish_segment(job, texts).name)
    assert batch["generation"].to_pylist() == [
        "half \ufffd of a pair",
        "a pair 😀 in halves",
        "NUL \x00 and ﷽ and 🜁",
        "decoded to \ufffd already",
    ]
    assert batch["text_lossy"].to_pylist() == [True, False, False, True]


def test_several_samples_of_a_row_share_it(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(3), generation__n=3)
    batch = rows_of(job, publish_segment(job, make_outcomes(job, [2, 3, 4, 8])).name)
    assert batch["row_index"].to_pylist() == [0, 1, 1, 2]
    assert batch["sample_index"].to_pylist() == [2, 0, 1, 2]
    assert batch["prompt"].to_pylist() == [f"How much is {i}?" for i in (0, 1, 1, 2)]


def test_commit_steps_go_up_to_the_longest_generation_there_is(job: JobDirectory) -> None:
    (outcome,) = make_outcomes(job, [0])
    assert isinstance(outcome.result, Completion)
    long = replace(outcome.result, token_ids=(1, 2), commit_step=(0, 32_767))
    batch = rows_of(job, publish_segment(job, [replace(outcome, result=long)]).name)
    assert batch["commit_step"].to_pylist() == [[0, 32_767]]


def _publish_many(root: str, first: int) -> None:
    job = JobDirectory.open(root)
    for start in range(first, first + 40, 4):
        ids = [each % 100 for each in range(start, start + 7)]
        publish_segment(job, make_outcomes(job, ids), actor=str(first))


def test_processes_that_publish_at_once_lose_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(100))
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_publish_many, args=(str(job.root), first)) for first in (0, 20, 60)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert str(scan(job).data) == "0-99"
    assert list(job.tmp.iterdir()) == []
