"""How a run ends: its exit code and why. Pure: no files, no clock, no ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.summary import Summary
from spot_batch.service.progress import Exit

NUM_DRAWN = 50
"""Rows that are judged early; a job of less than twice as many is over soon enough."""
LEAST_JUDGED = 20
_SIGMAS = 3.0


class Verdict(NamedTuple):
    """What the command's exit code will be, and the sentence that says why."""

    exit_code: int
    message: str


def verdict_at_end(spec: JobSpec, summary: Summary) -> Verdict:
    """The verdict on a job whose every sample is accounted for."""
    check, totals = summary.check, summary.totals
    differ = ""
    if check is not None and check.num_differed:
        differ = (
            f"{check.num_differed} of {check.num_compared} rows differ when decoded again "
            "draft-free"
        )
    if differ and spec.stops_on_difference:
        return Verdict(Exit.CHECK_FAILED, f"the check failed: {differ}; _SUCCESS is withheld")
    share = totals.num_failed / totals.num_samples if totals.num_samples else 0.0
    if share > spec.failure.max_error_fraction:
        return Verdict(
            Exit.TOO_MANY_ERRORS,
            f"{totals.num_failed} of {totals.num_samples} rows failed "
            f"(failure.max_error_fraction is {spec.failure.max_error_fraction:g}): see errors/",
        )
    return Verdict(Exit.COMPLETE, f"complete, but {differ}" if differ else "complete")


def verdict_on_the_drawn(
    failed: Mapping[str, int], num_judged: int, *, max_error_fraction: float
) -> Verdict | None:
    """Why a run ends early: of the rows drawn from the whole input, far more failed than may.

    `failed` counts failures by code. None where the run goes on: rows that the spec asked to skip
    are none, and a share between what may fail and half of what is beyond is left to the end.
    """
    if num_judged < LEAST_JUDGED:
        return None
    may = max_error_fraction
    chance = _SIGMAS * math.sqrt(may * (1.0 - may) / num_judged)
    num_failed = sum(failed.values())
    if num_failed / num_judged <= may + max((1.0 - may) / 2, chance):
        return None
    codes = ", ".join(f"{code} {count}" for code, count in sorted(failed.items()))
    return Verdict(
        Exit.TOO_MANY_ERRORS,
        f"stopped early: {num_failed} of {num_judged} rows drawn from the whole input failed "
        f"({codes}; failure.max_error_fraction is {may:g}): `spot-batch validate` shows how the "
        "prompts are read; a resume goes on with the rest all the same",
    )
