"""Deaths in, a verdict out: no process is needed to say what follows from how others ended."""

from __future__ import annotations

from typing import Any

import pytest

from spot_batch.service.deaths import (
    DEATHS_ALONE_PER_RESTART,
    FAILURES_ALONE_WITHOUT_A_ROW,
    FAILURES_WITHOUT_A_ROW,
    LOADS_THAT_MAY_FAIL,
    Death,
    Failure,
    verdict_after,
)
from spot_batch.service.progress import Exit
from spot_batch.service.verdict import Verdict

GONE = Failure(message="its process died")
RAISED = Failure(message="ZeroDivisionError()", detail="trace", is_exception=True)


def death(failure: Failure = GONE, **how: Any) -> Death:
    usual = {"at_s": 0.0, "loaded": True, "alone": False, "num_rows": 0}
    return Death(failure=failure, **{**usual, **how})


def after(*deaths: Death, restarts: int = 6, any_ready: bool = True) -> Verdict | None:
    return verdict_after(deaths, restarts_per_hour=restarts, any_ready=any_ready)


def code(verdict: Verdict | None) -> int | None:
    return None if verdict is None else verdict.exit_code


def test_an_actor_that_dies_is_replaced() -> None:
    assert after(death()) is None


def test_a_full_disk_is_said_and_ends_in_what_can_be_resumed() -> None:
    full = Failure(message="segments: no space left", is_exception=True, is_full_disk=True)
    assert after(death(full)) == (Exit.RESUMABLE, "segments: no space left")


@pytest.mark.parametrize("any_ready", [True, False])
def test_an_actor_that_refuses_to_load_ends_the_run(any_ready: bool) -> None:
    refusal = Failure(message="hardware differs", is_exception=True, is_refusal=True)
    found = after(death(refusal, loaded=False), any_ready=any_ready)
    assert found == (Exit.BAD_INPUT, "hardware differs")
    assert after(death(refusal)) is None, "loaded, it is an exception as any other"


def test_an_input_that_is_not_what_it_was_ends_the_run_at_once() -> None:
    changed = Failure(
        message="a.jsonl: changed", is_exception=True, is_refusal=True, is_bad_input=True
    )
    assert after(death(), death(changed)) == (Exit.BAD_INPUT, "a.jsonl: changed")


def test_loads_that_fail_end_a_run_of_which_nobody_was_ever_ready() -> None:
    loads = [death(loaded=False)] * LOADS_THAT_MAY_FAIL
    assert code(after(*loads[:-1], any_ready=False)) is None
    assert code(after(*loads, any_ready=False)) == Exit.BUG
    assert code(after(*loads, any_ready=True)) is None


def test_exceptions_in_a_row_are_a_bug_but_not_where_rows_are_published_between() -> None:
    raised = [death(RAISED)] * FAILURES_WITHOUT_A_ROW
    found = after(*raised)
    assert code(found) == Exit.BUG
    assert found is not None
    assert "ZeroDivisionError" in found.message
    assert "trace" in found.message
    assert after(*raised[1:], death(RAISED, num_rows=1)) is None
    alone = [death(RAISED, alone=True)] * FAILURES_WITHOUT_A_ROW
    assert after(*raised[1:], *alone) is None, "a row among the suspects may be to blame"
    assert code(after(*[death(RAISED, alone=True)] * FAILURES_ALONE_WITHOUT_A_ROW)) == Exit.BUG
    assert after(*[death()] * FAILURES_WITHOUT_A_ROW) is None, "killed is no exception"


def test_the_budget_is_of_an_hour() -> None:
    assert code(after(death(), death(), restarts=1)) == Exit.RESUMABLE
    assert after(death(), death(at_s=3_601.0), restarts=1) is None
    assert code(after(death(), restarts=0)) == Exit.RESUMABLE


def test_deaths_while_suspects_run_alone_have_a_budget_of_their_own() -> None:
    alone = [death(alone=True)] * DEATHS_ALONE_PER_RESTART
    assert after(death(), *alone, restarts=1) is None
    assert after(*alone, death(), restarts=1) is None, "they do not use up the others'"
    found = after(death(), *alone, death(alone=True), restarts=1)
    assert code(found) == Exit.RESUMABLE
    assert found is not None
    assert "too many rows kill their actor" in found.message
