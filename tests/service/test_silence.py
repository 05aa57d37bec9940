"""Actors that say nothing more, or answer and get nothing done: their samples are lent again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import spot_batch
from spot_batch.inputs.prepare import PreparedSample, SamplePreparer
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.events import read_events, read_heartbeat
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request
from spot_batch.service.progress import Exit
from tests.service import pool
from tests.service.jobs import (
    actor_pids,
    begin,
    data_hash,
    events,
    flags,
    is_running,
    prompts,
    run,
    small_spec,
    start,
    wait_until,
    write_rows,
)
from tests.service.poisoned import POISON

IMPATIENT = {"failure.no_progress_seconds": 3, "failure.max_error_fraction": 0.2}


def deaths(job: JobDirectory) -> list[str]:
    return [str(each["reason"]) for each in read_events(job) if each["kind"] == "actor_died"]


def test_a_stopped_actor_is_named_and_its_samples_are_lent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP as soon as it has published: it is there, and never says a word more."""
    monkeypatch.setattr("spot_batch.service.chronicle.SHOWN_AFTER_S", 1.0)
    job, _ = begin(
        tmp_path / "out",
        small_spec(write_rows(tmp_path, prompts(48)), {**IMPATIENT, "generation.n": 2}),
    )
    spent, named = tmp_path / "spent", []

    def stop_once(step: str) -> None:
        if step == "actor.published" and not spent.exists():
            spent.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def watch() -> None:
        while not ended.wait(0.05):
            heartbeat = read_heartbeat(job)
            named.extend(heartbeat.silent if heartbeat is not None else ())

    ended = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert pool.drive(job.root, actor=stop_once) == Exit.COMPLETE
    finally:
        ended.set()
        watcher.join()
    assert [reason[:24] for reason in deaths(job)] == ["it has not answered for "]
    assert named
    assert len({each.actor for each in named}) == 1
    assert len(spot_batch.load(job.root)) == 96


@pytest.mark.parametrize("where", ["engine", "preparation"])
def test_a_row_at_which_an_actor_hangs_is_an_error_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rows = prompts(10)
    rows[6]["question"] = f"How much {POISON} is too much?"
    given = {**IMPATIENT, "failure.no_progress_seconds": 1.5, "engine.max_sequences": 2}
    job, _ = begin(tmp_path / "out", small_spec(write_rows(tmp_path, rows), given))
    if where == "engine":
        answer = pool.answer

        def hang(request: Request) -> Completion:
            if request.sample_id == 6:
                time.sleep(600)
            return answer(request)

        monkeypatch.setattr(pool, "answer", hang)
    else:
        prepare = SamplePreparer.prepare

        def hang_before(
            self: SamplePreparer, sample_ids: Sequence[int], *, draft_free: bool = False
        ) -> list[PreparedSample]:
            if 6 in sample_ids:
                time.sleep(600)
            return prepare(self, sample_ids, draft_free=draft_free)

        monkeypatch.setattr(SamplePreparer, "prepare", hang_before)
    assert pool.drive(job.root, timeout_s=120.0) == Exit.COMPLETE
    assert {reason[:28] for reason in deaths(job)} == {"it has got nothing done for "}
    errors = [(row["row_index"], row["code"]) for row in spot_batch.load(job.root, "errors")]
    assert errors == [(6, "actor_crash")]
    assert len(spot_batch.load(job.root)) == 9


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_a_stopped_actor_is_replaced_and_costs_no_row(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, prompts())
    out = tmp_path / "out"
    impatient = flags({"failure.no_progress_seconds": 15})
    process = start(["submit", "-i", str(rows), "-o", "out", *impatient], tmp_path)
    wait_until(lambda: events(out, "segment"))
    stopped = actor_pids(out)[0]
    os.kill(stopped, signal.SIGSTOP)
    shown, wrong = process.communicate(timeout=200)
    assert process.returncode == Exit.COMPLETE, shown + wrong
    assert deaths(JobDirectory.open(out))[0].startswith("it has not answered for ")
    assert not is_running(stopped)
    assert run(tmp_path / "whole", small_spec(rows)).exit_code == Exit.COMPLETE
    assert data_hash(out) == data_hash(tmp_path / "whole")


def test_a_run_whose_ray_has_died_stops_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node is left: nobody can replace an actor there, however long one waits."""
    job, _ = begin(tmp_path / "out", small_spec(write_rows(tmp_path, prompts(4))))

    def die(step: str) -> None:
        if step == "actor.admitted":
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(pool.PoolCrew, "is_lost", property(lambda crew: True))
        assert pool.drive(job.root, num_actors=1, actor=die) == Exit.RESUMABLE
    heartbeat = read_heartbeat(job)
    assert heartbeat is not None
    assert heartbeat.message == "stopped: Ray itself has died"
    assert pool.drive(job.root) == Exit.COMPLETE
