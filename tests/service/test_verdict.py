"""How a job ends once every sample is published; no Ray is started where no work is left."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from spot_batch.inputs.ids import audit_sample_ids
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.events import read_heartbeat
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.lending import Lease
from spot_batch.records.results import Completion, SampleStats
from spot_batch.service.actor import Actor
from spot_batch.service.leases import LeasePool
from spot_batch.service.plan import JobPlan
from spot_batch.service.progress import Exit, Silent
from spot_batch.service.run import JobResult, run_job
from spot_batch.service.verdict import verdict_on_the_drawn
from tests.service.jobs import begin, prompts, small_spec, write_rows
from tests.service.pool import Pool, PoolCrew

SHORT = {"generation.max_new_tokens": 6, "equivalence.min_rows": 0}


def published(
    folder: Path, rows: Sequence[object], overrides: Mapping[str, object] | None = None
) -> tuple[JobDirectory, JobPlan]:
    """A job whose samples are all published, as after a kill just before its end."""
    spec = small_spec(write_rows(folder, rows), {**SHORT, **(overrides or {})})
    job, plan = begin(folder / "out", spec)
    actor = Actor(job.root, 0)
    every = tuple(range(job.num_samples))
    leases = [Lease(sample_ids=every)]
    if spec.equivalence.audit_fraction:
        leases.append(Lease(sample_ids=every, purpose="audit"))
    count = 0
    wanted = job.num_samples * (2 if spec.equivalence.audit_fraction else 1)
    while count < wanted:
        count += sum(receipt.num_rows for receipt in actor.exchange(leases, 60).receipts)
        leases = []
    actor.stop()
    return job, plan


def finish(job: JobDirectory, plan: JobPlan) -> JobResult:
    with acquire_driver_lock(job) as lock:
        return run_job(job, plan.facts, Silent(), lock=lock)


def publish_wrong_audit(job: JobDirectory, plan: JobPlan) -> None:
    wrong = Completion(
        sample_id=1,
        token_ids=(5, 5, 5),
        commit_step=(0, 1, 2),
        finish_reason="length",
        num_prompt_tokens=3,
        num_draft_free_forwards=3,
        stats=SampleStats(num_forwards=3),
    )
    publish_segment(job, [plan.first(2)[1].outcome(wrong, "no")], purpose="audit")


def test_a_job_of_equal_audits_is_complete(tmp_path: Path) -> None:
    job, plan = published(tmp_path, prompts(3))
    result = finish(job, plan)
    assert result.exit_code == Exit.COMPLETE
    assert result.summary is not None
    assert result.summary.check is not None
    assert (result.summary.check.num_compared, result.summary.check.num_differed) == (3, 0)
    assert job.is_complete
    heartbeat = read_heartbeat(job)
    assert heartbeat is not None
    assert (heartbeat.state, heartbeat.exit_code) == ("complete", 0)


@pytest.mark.parametrize(
    ("on_fail", "numerics", "code"),
    [
        ("stop", "canonical", Exit.CHECK_FAILED),
        ("warn", "canonical", Exit.COMPLETE),
        ("auto", "canonical", Exit.CHECK_FAILED),
        ("auto", "fast", Exit.COMPLETE),
        ("stop", "fast", Exit.CHECK_FAILED),
    ],
)
def test_a_differing_audit_withholds_success_unless_it_is_to_warn(
    tmp_path: Path, on_fail: str, numerics: str, code: int
) -> None:
    given = {"equivalence.on_fail": on_fail, "speculation.numerics": numerics}
    job, plan = published(tmp_path, prompts(3), given)
    publish_wrong_audit(job, plan)
    result = finish(job, plan)
    assert result.exit_code == code
    assert result.summary is not None
    assert result.summary.check is not None
    assert result.summary.check.differing == (1,)
    assert job.is_complete == (code == Exit.COMPLETE)
    assert "1 of 3 rows differ when decoded again draft-free" in result.message
    assert "differ" in job.readme.read_text()


def test_error_rows_over_the_threshold_show_in_the_exit_code(tmp_path: Path) -> None:
    rows = [*prompts(3), {"id": "empty", "question": ""}]
    job, plan = published(tmp_path, rows)
    result = finish(job, plan)
    assert result.exit_code == Exit.TOO_MANY_ERRORS
    assert "1 of 4 rows failed" in result.message
    assert job.is_complete
    assert finish(job, plan).exit_code == Exit.TOO_MANY_ERRORS


def test_error_rows_below_the_threshold_do_not(tmp_path: Path) -> None:
    rows = [*prompts(3), {"id": "empty", "question": ""}]
    job, plan = published(tmp_path, rows, {"failure.max_error_fraction": 0.5})
    assert finish(job, plan).exit_code == Exit.COMPLETE


EMPTY = {"id": "empty", "question": ""}
TOO_LONG = {"id": "long", "question": "fig " * 5_000}


def run_by(num_actors: int, folder: Path, rows: Sequence[object], **given: object) -> JobResult:
    overrides = {name.replace("__", "."): value for name, value in given.items()}
    job, plan = begin(folder / "out", small_spec(write_rows(folder, rows), overrides))
    with acquire_driver_lock(job) as lock:
        return run_job(
            job,
            plan.facts,
            Silent(),
            lock=lock,
            workplace=lambda job: nullcontext(Pool(num_actors)),
        )


def test_rows_that_were_to_be_skipped_are_no_failures(tmp_path: Path) -> None:
    rows = [*[TOO_LONG] * 150, *prompts(10)]
    result = run_by(1, tmp_path, rows, input__overlong="skip")
    assert result.exit_code == Exit.COMPLETE, result.message
    assert result.totals.num_skipped == 150


def test_failures_that_stand_first_are_judged_by_their_share_of_the_whole(tmp_path: Path) -> None:
    rows = [*[EMPTY] * 60, *prompts(240)]
    result = run_by(2, tmp_path, rows, failure__max_error_fraction=0.3)
    assert result.exit_code == Exit.COMPLETE, result.message
    assert result.totals.num_failed == 60


@pytest.mark.parametrize("num_actors", [1, 3])
def test_a_job_of_which_far_too_much_fails_stops_early_and_says_why(
    tmp_path: Path, num_actors: int
) -> None:
    """Whatever stands first and whoever is fastest; the same command goes on with the rest."""
    rows = [*prompts(200), *[EMPTY] * 600]
    result = run_by(num_actors, tmp_path, rows)
    assert result.exit_code == Exit.TOO_MANY_ERRORS
    assert re.search(
        r"stopped early: [34]\d of 50 rows .* \(empty_prompt [34]\d; .*0.01", result.message
    )
    assert result.totals.num_samples < 800
    again = run_by(num_actors, tmp_path, rows)
    assert again.exit_code == Exit.TOO_MANY_ERRORS
    assert "600 of 800 rows failed" in again.message
    assert again.summary is not None


@pytest.mark.parametrize(
    ("num_failed", "num_judged", "may", "stops"),
    [
        (19, 19, 0.01, False),
        (50, 50, 0.01, True),
        (26, 50, 0.01, True),
        (25, 50, 0.01, False),
        (37, 50, 0.5, False),
        (38, 50, 0.5, True),
        (50, 50, 0.95, False),
        (50, 50, 1.0, False),
    ],
)
def test_how_many_of_the_drawn_may_fail_follows_from_how_many_rows_may(
    num_failed: int, num_judged: int, may: float, stops: bool
) -> None:
    failed = {"empty_prompt": num_failed}
    found = verdict_on_the_drawn(failed, num_judged, max_error_fraction=may)
    assert (found is not None) == stops


def test_error_rows_among_the_audited_are_made_up_for_by_others(tmp_path: Path) -> None:
    rows = [*prompts(6), *({"id": f"empty-{each}", "question": ""} for each in range(18))]
    given = {"failure.max_error_fraction": 1.0, "equivalence.min_rows": 5}
    job, plan = begin(tmp_path / "out", small_spec(write_rows(tmp_path, rows), given))
    first = audit_sample_ids(24, fraction=0.01, min_rows=5, fingerprint=job.fingerprint)
    assert max(first) >= 6, "want one of the audited to fail"
    with acquire_driver_lock(job) as lock:
        result = run_job(
            job, plan.facts, Silent(), lock=lock, workplace=lambda job: nullcontext(Pool(2))
        )
    assert result.exit_code == Exit.COMPLETE
    assert result.summary is not None
    assert result.summary.check is not None
    assert (result.summary.check.num_compared, result.summary.check.num_differed) == (5, 0)


def test_a_job_of_errors_alone_says_that_nothing_was_compared(tmp_path: Path) -> None:
    rows = [{"id": f"empty-{each}", "question": ""} for each in range(3)]
    job, plan = published(tmp_path, rows, {"equivalence.min_rows": 2})
    result = finish(job, plan)
    assert result.summary is not None
    assert result.summary.check is not None
    assert result.summary.check.num_compared == 0
    assert "No sample was compared" in job.readme.read_text()


class Lonely(Pool):
    """A workplace that is asked for eight actors and has room for one."""

    def crew(self, job: JobDirectory, *, num_pending: int) -> PoolCrew:
        crew = super().crew(job, num_pending=num_pending)
        crew.start_missing()
        crew.num_wanted = 8
        return crew


def test_the_end_of_a_job_is_shared_out_among_actors_that_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolCrew, "start_missing", started_once(PoolCrew.start_missing))
    shares: list[int] = []
    fill = LeasePool.fill

    def noting(self: LeasePool, actor: int, *, room: int, num_actors: int) -> list[Lease]:
        shares.append(num_actors)
        return fill(self, actor, room=room, num_actors=num_actors)

    monkeypatch.setattr(LeasePool, "fill", noting)
    job, plan = begin(tmp_path / "out", small_spec(write_rows(tmp_path, prompts(24))))
    with acquire_driver_lock(job) as lock:
        result = run_job(
            job, plan.facts, Silent(), lock=lock, workplace=lambda job: nullcontext(Lonely(1))
        )
    assert result.exit_code == Exit.COMPLETE
    assert set(shares) == {1}


def started_once(start_missing: Callable[[PoolCrew], None]) -> Callable[[PoolCrew], None]:
    """Starts the missing actors at the first call alone."""
    calls: list[PoolCrew] = []

    def start(crew: PoolCrew) -> None:
        if not calls:
            start_missing(crew)
        calls.append(crew)

    return start
