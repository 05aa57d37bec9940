"""When an actor counts as lost: by what it answers and when, told by the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_batch.job.reading import load_spec
from spot_batch.job.spec import SpecError
from spot_batch.records.lending import News
from spot_batch.service.signs import FIRST_IDLE_S, LEAST_IDLE_S, Patience, SignsOfLife
from tests.service.jobs import small_spec

QUICK = Patience(unanswered_s=90.0, loading_s=600.0, first_s=1_800.0, idle_s=300.0)


def working(num_steps: int, *, num_prepared: int = 8) -> News:
    return News(num_in_flight=8, num_prepared=num_prepared, num_steps=num_steps)


def ready_at(now_s: float) -> SignsOfLife:
    signs = SignsOfLife()
    signs.ready(now_s)
    return signs


def test_patience_is_a_few_leases_or_what_the_spec_says() -> None:
    usual = Patience.of(small_spec(Path("x")))
    assert (usual.unanswered_s, usual.idle_s, usual.first_s) == (90.0, LEAST_IDLE_S, FIRST_IDLE_S)
    long = Patience.of(small_spec(Path("x"), {"scheduling.lease_seconds": 200}))
    assert long.unanswered_s == 600.0
    given = Patience.of(small_spec(Path("x"), {"failure.no_progress_seconds": 7}))
    assert given == Patience(unanswered_s=7.0, loading_s=7.0, first_s=7.0, idle_s=7.0)
    with pytest.raises(SpecError, match="no_progress_seconds"):
        load_spec(None, {"input.source": "x", "failure.no_progress_seconds": 0})


def test_an_actor_that_waits_for_its_place_is_not_lost() -> None:
    assert SignsOfLife().fault(QUICK, 1e9) is None
    assert SignsOfLife().silent_s(1e9) == 0.0


def test_an_actor_that_answers_no_more_is_lost_sooner_once_it_has_loaded() -> None:
    signs = SignsOfLife()
    signs.loading(0.0)
    assert signs.fault(QUICK, 599.0) is None
    assert signs.fault(QUICK, 601.0) == "it has not answered for 601 s"
    signs.ready(601.0)
    assert signs.fault(QUICK, 690.0) is None
    assert signs.fault(QUICK, 692.0) == "it has not answered for 91 s"


def test_an_actor_that_owes_nothing_may_idle() -> None:
    signs = ready_at(0.0)
    for second in range(0, 10_000, 10):
        signs.heard(News(), float(second))
    assert signs.fault(QUICK, 9_990.0) is None
    assert signs.silent_s(9_995.0) == 5.0


def test_an_actor_that_answers_and_gets_nothing_done_is_lost() -> None:
    signs = ready_at(0.0)
    signs.heard(working(1), 0.0)
    for second in range(1, 400):
        signs.heard(working(2), float(second))
    assert signs.silent_s(399.0) == 398.0
    assert signs.fault(QUICK, 300.0) is None
    assert signs.fault(QUICK, 302.0) == "it has got nothing done for 301 s, though it owes samples"


def test_the_first_step_and_an_actor_of_long_steps_have_more_time() -> None:
    signs = ready_at(0.0)
    signs.heard(working(0, num_prepared=0), 0.0)
    signs.heard(working(0), 100.0)
    signs.heard(working(0), 1_890.0)
    assert signs.fault(QUICK, 1_899.0) is None, "the first forward may be long"
    signs.heard(working(1), 1_900.0)  # it took 1,800 s
    end_s = 1_900.0 + 20 * 1_800.0
    signs.heard(working(1), end_s - 10.0)
    assert signs.fault(QUICK, end_s - 1.0) is None
    assert signs.fault(QUICK, end_s + 1.0) is not None
