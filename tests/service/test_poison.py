"""Rows that hurt whoever prepares them: every id ends in data/ or in errors/, and the job ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import spot_batch
from spot_batch.inputs.prepare import PreparedSample, SamplePreparer
from spot_batch.inputs.render import PromptRenderer, RenderedPrompt
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.events import read_heartbeat
from spot_batch.jobdir.summary import Summary
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request
from spot_batch.service.progress import Exit
from tests.service import pool
from tests.service.jobs import begin, prompts, small_spec, write_rows
from tests.service.poisoned import POISON

NUM_ROWS = 24
TOLERANT = {
    "input.custom_id": "id",
    "failure.max_error_fraction": 0.2,
    "scheduling.publish_seconds": 0.001,
}


class Odd(Exception):
    """Nothing that anybody foresees."""


def poisoned_rows(place: int) -> list[dict[str, object]]:
    rows = prompts(NUM_ROWS)
    rows[place]["question"] = f"How much {POISON} is too much?"
    return rows


def kill_who_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poisoned row kills whoever renders it, the driver as well: driver and actors are forked."""
    render = PromptRenderer.render

    def harmful(
        self: PromptRenderer, row: Mapping[str, object], *, max_new_tokens: int
    ) -> RenderedPrompt:
        if POISON in str(row["question"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return render(self, row, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(PromptRenderer, "render", harmful)


def errors_of(job: JobDirectory) -> list[tuple[Any, ...]]:
    wanted = ("custom_id", "row_index", "code", "stage")
    return [tuple(row[name] for name in wanted) for row in spot_batch.load(job.root, "errors")]


def test_a_row_whose_preparation_raises_is_an_error_and_costs_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, prompts(NUM_ROWS))
    job, _ = begin(tmp_path / "out", small_spec(rows, TOLERANT))
    prepare = SamplePreparer.prepare

    def harmful(
        self: SamplePreparer, sample_ids: Sequence[int], *, draft_free: bool = False
    ) -> list[PreparedSample]:
        if {5, 17} & set(sample_ids):
            raise Odd("who would have thought")
        return prepare(self, sample_ids, draft_free=draft_free)

    monkeypatch.setattr(SamplePreparer, "prepare", harmful)
    assert pool.drive(job.root) == Exit.COMPLETE
    assert errors_of(job) == [
        ("q-5", 5, "bad_prompt", "prompt"),
        ("q-17", 17, "bad_prompt", "prompt"),
    ]
    said = spot_batch.load(job.root, "errors")["message"][0]
    assert "who would have thought" in said
    assert "rows.jsonl line 6" in said
    assert Summary.read(job.summary_path).totals.num_completions == NUM_ROWS - 2


def test_a_row_that_kills_whoever_renders_it_is_an_error_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, poisoned_rows(5))
    job, _ = begin(tmp_path / "out", small_spec(rows, TOLERANT))
    kill_who_renders(monkeypatch)
    assert pool.drive(job.root) == Exit.COMPLETE
    assert errors_of(job) == [("q-5", 5, "actor_crash", "decode")]
    error = spot_batch.load(job.root, "errors")[0]
    assert error["request"] == f"How much {POISON} is too much?"
    assert error["attempts"] == job.spec.failure.row_attempts
    assert Summary.read(job.summary_path).totals.num_completions == NUM_ROWS - 1


@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_row_whose_decoding_raises_is_an_error_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_actors: int
) -> None:
    """The engine ends with each exception, and nothing tells which of its samples is to blame."""
    answer = pool.answer

    def raising(request: Request) -> Completion:
        if request.sample_id == 5:
            raise Odd("in the middle of a step")
        return answer(request)

    monkeypatch.setattr(pool, "answer", raising)
    rows = write_rows(tmp_path, prompts(NUM_ROWS))
    job, _ = begin(tmp_path / "out", small_spec(rows, TOLERANT))
    assert pool.drive(job.root, num_actors=num_actors) == Exit.COMPLETE
    assert errors_of(job) == [("q-5", 5, "actor_crash", "decode")]
    assert Summary.read(job.summary_path).totals.num_completions == NUM_ROWS - 1


def test_an_engine_that_can_decode_nothing_is_a_bug_that_is_said_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(request: Request) -> Completion:
        raise Odd(f"not even {request.sample_id}")

    monkeypatch.setattr(pool, "answer", raising)
    rows = write_rows(tmp_path, prompts(NUM_ROWS))
    job, _ = begin(tmp_path / "out", small_spec(rows, TOLERANT))
    assert pool.drive(job.root) == Exit.BUG
    heartbeat = read_heartbeat(job)
    assert heartbeat is not None
    assert "fail again and again" in heartbeat.message
    assert "not even" in heartbeat.message
