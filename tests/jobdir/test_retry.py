"""Error rows made again: the next revision of their parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spot_batch.jobdir.check import compare_audits
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.retry import begin_retry, retried_parts
from spot_batch.jobdir.scan import read_part, scan
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.results import RowError
from tests.jobdir.jobs import make_job, make_outcomes, prompts
from tests.jobdir.test_parts import flip, hurtful_table, sha256s


def finished(root: Path, failed: set[int]) -> JobDirectory:
    job = make_job(root, hurtful_table(40), output__rows_per_part=17)
    publish_segment(job, make_outcomes(job, range(40), failed=failed))
    finalize(job, check=None, facts=None)
    return job


def test_retried_rows_leave_the_bytes_of_a_job_that_never_failed(tmp_path: Path) -> None:
    want = finished(tmp_path / "want", failed=set())
    job = finished(tmp_path / "job", failed={3, 5, 30})
    untouched = sha256s(job)[job.part_name(2)]
    assert begin_retry(job, ["oom"]) == 3
    assert not job.is_complete
    assert [str(scan(job).data), [part.index for part in scan(job).parts]] == [
        "0-2,4,6-29,31-39",
        [2],
    ]
    assert len(list(job.data.iterdir())) == 3  # readers see the old revision
    publish_segment(job, make_outcomes(job, [3, 5, 30]))
    summary = finalize(job, check=None, facts=None)
    assert (summary.totals.num_completions, summary.totals.num_errors) == (40, 0)
    assert sha256s(job) == sha256s(want)
    assert sha256s(job)[job.part_name(2)] == untouched
    assert not list(job.errors.glob("*.arrow"))
    assert [part.revision for i in range(3) if (part := read_part(job, i))] == [1, 1, 0]
    assert job.is_complete


def test_audits_that_failed_are_made_again_and_others_stay(tmp_path: Path) -> None:
    job = make_job(tmp_path, hurtful_table(40))
    publish_segment(job, make_outcomes(job, range(40), failed={3, 5}))
    publish_segment(job, make_outcomes(job, [1, 3], failed={3}), purpose="audit")
    publish_segment(job, make_outcomes(job, [5], failed={5}), purpose="audit")
    publish_segment(job, make_outcomes(job, [7]), purpose="audit")
    finalize(job, check=None, facts=None)
    assert str(scan(job).audits) == "1,3,5,7"
    begin_retry(job)
    assert str(scan(job).audits) == "1,7"
    publish_segment(job, make_outcomes(job, [3, 5]))
    publish_segment(job, make_outcomes(job, [3, 5]), purpose="audit")
    finalize(job, check=None, facts=None)
    found = compare_audits(job).check
    assert (found.num_compared, found.num_differed) == (4, 0)


def test_rows_that_fail_again_stay_errors_and_others_are_kept(tmp_path: Path) -> None:
    job = finished(tmp_path / "job", failed={3, 5})
    want = finished(tmp_path / "want", failed={5})
    begin_retry(job)
    publish_segment(job, make_outcomes(job, [3, 5], failed={5}))
    finalize(job, check=None, facts=None)
    assert sha256s(job) == sha256s(want)
    assert sha256s(job, "errors") == sha256s(want, "errors")
    begin_retry(job)
    publish_segment(job, make_outcomes(job, [5]))
    finalize(job, check=None, facts=None)
    part = read_part(job, 0)
    assert part is not None
    assert part.revision == 2


def test_what_cannot_be_retried_is_said(tmp_path: Path) -> None:
    job = finished(tmp_path / "job", failed={3})
    for code, message in (
        ("actor_crash", "no error rows that a retry could mend; codes there are: oom"),
        ("ooom", "--code: no error code is named 'ooom'; codes there are: oom"),
        ("too_long", "--code: too_long is a fault of the row, which would fail again"),
    ):
        with pytest.raises(ValueError, match=message):
            begin_retry(job, [code])
    with pytest.raises(ValueError, match="no error code is named 'ooom'"):
        begin_retry(job, ["oom", "ooom"])
    assert job.is_complete
    assert retried_parts(job, ["oom", "actor_crash"])
    begin_retry(job)
    with pytest.raises(OutputError, match="not complete yet"):
        begin_retry(job)


def test_rows_whose_fault_is_their_own_are_not_retried(tmp_path: Path) -> None:
    job = make_job(tmp_path / "job", prompts(6))
    outcomes = make_outcomes(job, range(6), failed={1, 2})
    own = RowError(code="empty_prompt", stage="prompt", message="nothing")
    outcomes[1] = replace(outcomes[1], result=own)
    publish_segment(job, outcomes)
    finalize(job, check=None, facts=None)
    assert begin_retry(job) == 1
    publish_segment(job, [make_outcomes(job, [2])[0]])
    totals = finalize(job, check=None, facts=None).totals
    assert totals.error_codes == {"empty_prompt": 1}
    with pytest.raises(ValueError, match=r"no error rows that .* empty_prompt"):
        begin_retry(job)


@pytest.mark.parametrize("folder", ["data", "errors"])
def test_a_damaged_part_is_not_republished(tmp_path: Path, folder: str) -> None:
    job = finished(tmp_path / "job", failed={3})
    path = job.root / folder / job.part_name(0)
    flip(path, path.stat().st_size // 3)
    with pytest.raises(OutputError, match=f"{folder}/{path.name}.*resume .* makes it again"):
        begin_retry(job)
    assert job.is_complete
    assert path.exists()


class Stopped(BaseException):
    """As a kill: nothing in between handles it."""


def test_a_retry_that_was_stopped_anywhere_goes_on(tmp_path: Path) -> None:
    want = finished(tmp_path / "want", failed=set())
    num_stops = 0
    while True:
        job = finished(tmp_path / str(num_stops), failed={3, 5, 30})
        left = num_stops

        def stop(step: str) -> None:
            nonlocal left
            if left == 0:
                raise Stopped(step)
            left -= 1

        hindered = JobDirectory.open(job.root, reach=stop)
        try:
            begin_retry(hindered)
            publish_segment(hindered, make_outcomes(job, [3, 5, 30]))
            for part in (0, 1, 2):
                compact(hindered, part)
            finalize(hindered, check=None, facts=None)
        except Stopped:
            num_stops += 1
        else:
            break
        if not job.is_complete:  # what `resume` does, then `retry` where not all was marked
            _make_missing(job)
            if any(part.num_errors for part in scan(job).parts):
                begin_retry(job)
                _make_missing(job)
        assert sha256s(job) == sha256s(want), num_stops
        assert job.is_complete
    assert num_stops > 20


def _make_missing(job: JobDirectory) -> None:
    missing = [each for gap in scan(job).data.gaps(40) for each in gap]
    if missing:
        publish_segment(job, make_outcomes(job, missing))
    finalize(job, check=None, facts=None)
