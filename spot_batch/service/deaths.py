"""What happens after a death: the deaths of a run go in, and why the run ends by them comes out.

Pure: no clock, no files, no ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spot_batch.service.progress import Exit
from spot_batch.service.verdict import Verdict

LOADS_THAT_MAY_FAIL = 2
FAILURES_WITHOUT_A_ROW = 3
# Of suspects that run alone, a half that fails is followed by the half that need not.
FAILURES_ALONE_WITHOUT_A_ROW = 8
# Isolating a row that kills its actor halves the suspects at each death.
DEATHS_ALONE_PER_RESTART = 8
RESTARTS_COUNT_FOR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How an actor was lost. An exception of its own, or else its process died."""

    message: str
    detail: str = ""
    is_exception: bool = False
    is_refusal: bool = False
    is_bad_input: bool = False
    is_full_disk: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A failure and its circumstances.

    `loaded`: the actor had its models; `alone`: it held nothing but suspects; `num_rows`: so many
    rows had been published in this run when it died.
    """

    failure: Failure
    at_s: float
    loaded: bool
    alone: bool
    num_rows: int


def verdict_after(
    deaths: Sequence[Death], *, restarts_per_hour: int, any_ready: bool
) -> Verdict | None:
    """Why the run ends with the last of these deaths; None where the actor is replaced.

    `any_ready`: an actor of this run has been ready for work at some time.
    """
    last = deaths[-1].failure
    if last.is_full_disk:
        return Verdict(Exit.RESUMABLE, last.message)
    if last.is_bad_input:
        return Verdict(Exit.BAD_INPUT, last.message)
    if not deaths[-1].loaded:
        if last.is_refusal:
            return Verdict(Exit.BAD_INPUT, last.message)
        num_failed_loads = sum(not death.loaded for death in deaths)
        if num_failed_loads >= LOADS_THAT_MAY_FAIL and not any_ready:
            return Verdict(Exit.BUG, f"no actor could start: {last.message}\n{last.detail}")
    if last.is_exception and _fails_again_and_again(deaths):
        return Verdict(Exit.BUG, f"actors fail again and again: {last.message}\n{last.detail}")
    if deaths[-1].alone:
        num_alone = sum(death.alone for death in deaths)
        if num_alone <= max(1, restarts_per_hour) * DEATHS_ALONE_PER_RESTART:
            return None
        return Verdict(
            Exit.RESUMABLE, f"stopped: too many rows kill their actor, last: {last.message}"
        )
    since_s = deaths[-1].at_s - RESTARTS_COUNT_FOR_S
    num_recent = sum(not death.alone and death.at_s >= since_s for death in deaths)
    if num_recent <= restarts_per_hour:
        return None
    return Verdict(
        Exit.RESUMABLE,
        f"stopped: {num_recent} actors died within an hour "
        f"(failure.actor_restarts_per_hour is {restarts_per_hour}); last: {last.message}",
    )


def _fails_again_and_again(deaths: Sequence[Death]) -> bool:
    """Whether exceptions end actors whatever samples they hold, so that no row is to blame."""
    since_a_row = [
        death
        for death in deaths
        if death.failure.is_exception and death.num_rows == deaths[-1].num_rows
    ]
    num_alone = sum(death.alone for death in since_a_row)
    return (
        len(since_a_row) - num_alone >= FAILURES_WITHOUT_A_ROW
        or num_alone >= FAILURES_ALONE_WITHOUT_A_ROW
    )
