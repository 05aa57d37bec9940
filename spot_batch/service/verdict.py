"""How a run ends: its exit code and why. Pure: no files, no clock, no ray."""

from __future__ import annotations

from typing import NamedTuple

from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.summary import Summary, Totals
from spot_batch.service.progress import Exit

FAIL_EARLY_AFTER = 50


class Verdict(NamedTuple):
    """What the command's exit code will be, and the sentence that says why."""

    exit_code: int
    message: str


def verdict_at_end(spec: JobSpec, summary: Summary) -> Verdict:
    """The verdict on a job whose every sample is accounted for."""
    check, totals = summary.check, summary.totals
    if check is not None and check.num_differed and spec.equivalence.on_fail == "stop":
        return Verdict(
            Exit.CHECK_FAILED,
            f"the check failed: {check.num_differed} of {check.num_compared} rows differ when "
            "decoded again draft-free; _SUCCESS is withheld",
        )
    share = totals.num_failed / totals.num_samples if totals.num_samples else 0.0
    if share > spec.failure.max_error_fraction:
        return Verdict(
            Exit.TOO_MANY_ERRORS,
            f"{totals.num_failed} of {totals.num_samples} rows failed "
            f"(failure.max_error_fraction is {spec.failure.max_error_fraction:g}): see errors/",
        )
    return Verdict(Exit.COMPLETE, "complete")


def verdict_on_the_first(here: Totals) -> Verdict | None:
    """Why a run ends whose first rows all failed; None where it goes on."""
    if here.num_samples < FAIL_EARLY_AFTER or here.num_errors < here.num_samples:
        return None
    codes = ", ".join(f"{code} {count}" for code, count in here.error_codes.items())
    return Verdict(
        Exit.TOO_MANY_ERRORS,
        f"stopped early: each of the first {here.num_samples} rows failed ({codes}); "
        "`spot-batch validate` shows how the prompts are read",
    )
