"""How a job ends once every sample is published; no Ray is started where no work is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from spot_batch.service.plan import JobPlan
from spot_batch.service.progress import Exit, Silent
from spot_batch.service.run import JobResult, run_job
from tests.service.jobs import begin, prompts, small_spec, write_rows
from tests.service.pool import Pool

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


@pytest.mark.parametrize(("on_fail", "code"), [("stop", Exit.CHECK_FAILED), ("warn", 0)])
def test_a_differing_audit_withholds_success_unless_told_to_warn(
    tmp_path: Path, on_fail: str, code: int
) -> None:
    job, plan = published(tmp_path, prompts(3), {"equivalence.on_fail": on_fail})
    publish_wrong_audit(job, plan)
    result = finish(job, plan)
    assert result.exit_code == code
    assert result.summary is not None
    assert result.summary.check is not None
    assert result.summary.check.differing == (1,)
    assert job.is_complete == (on_fail == "warn")
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
