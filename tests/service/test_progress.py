from __future__ import annotations

import dataclasses

from spot_batch.jobdir.summary import Totals
from spot_batch.records.lending import Receipt
from spot_batch.records.progress import ActorLoading, Heartbeat, LoadProgress
from spot_batch.records.results import Rounds, SampleStats
from spot_batch.service.progress import (
    LOADS_SHOWN,
    Meter,
    describe,
    describe_drafting,
    describe_load,
    describe_loads,
    describe_seconds,
)


def receipt(num_rows: int, num_tokens: int) -> Receipt:
    return Receipt(
        name="s",
        purpose="data",
        sample_ids=tuple(range(num_rows)),
        num_tokens=num_tokens,
        stats=SampleStats(num_forwards=num_tokens // 2, num_accepted=num_tokens // 2),
        num_draft_free_forwards=num_tokens,
    )


def test_speed_leaves_out_what_earlier_runs_did() -> None:
    meter = Meter(Totals(num_samples=1_000, num_tokens=50_000))
    meter.started(100.0)
    meter.add([receipt(10, 200)], 110.0)
    assert meter.speeds() == (1.0, 20.0)
    assert meter.totals.num_samples == 1_010
    assert meter.here.num_samples == 10
    assert meter.eta_s(1_040, 115.0) == 25.0


def test_speed_is_that_of_the_last_minutes() -> None:
    meter = Meter(Totals())
    meter.started(0.0)
    for minute in range(1, 11):
        meter.add([receipt(60 if minute > 4 else 600, 0)], 60.0 * minute)
    rows_per_s, _ = meter.speeds()
    assert rows_per_s == 1.0


def test_no_speed_means_no_estimate() -> None:
    meter = Meter(Totals())
    assert meter.speeds() == (0.0, 0.0)
    assert meter.eta_s(10, 5.0) is None


def test_the_progress_line_keeps_durable_and_in_flight_apart() -> None:
    line = describe(
        Heartbeat(
            state="running",
            num_samples=2_000,
            num_durable=500,
            num_in_flight=64,
            num_forwards_saved=1_234,
            forwards_ratio=2.5,
            eta_s=75.0,
            num_actors=1,
            num_actors_wanted=2,
        )
    )
    assert line.startswith("rows 500/2,000 (25.0 %) durable · in flight 64 · ")
    assert "forwards saved 1,234 (2.50x)" in line
    assert line.endswith("ETA 1 min 15 s · actors 1/2")


def test_the_line_of_a_job_at_rest_leaves_out_what_only_a_running_one_has() -> None:
    ended = Heartbeat(state="complete", num_samples=4, num_durable=4, num_forwards_saved=9)
    assert describe(ended) == (
        "rows 4/4 (100.0 %) durable · errors 0 · accepted drafts 0.00 a forward · "
        "forwards saved 9 (1.00x)"
    )
    stopped = dataclasses.replace(ended, state="stopped", tokens_per_s=12.0)
    assert "12 tokens/s" in describe(stopped)


def test_drafting_is_said_by_sample_and_round() -> None:
    one = Rounds(num_rounds=4, num_drafting=3, num_samples=8, num_drafted_slots=12)
    both = one + Rounds(num_rounds=6, num_samples=4)
    assert (both.budget, both.drafting_share) == (1.0, 0.3)
    assert describe_drafting(both.budget, both.drafting_share) == (
        "1.00 drafted slots a sample a round, in 30 % of rounds"
    )
    assert (Rounds().budget, Rounds().drafting_share) == (0.0, 0.0)


def test_a_load_is_said_in_bytes_where_it_has_any() -> None:
    assert [
        describe_load(each)
        for each in (
            LoadProgress("waiting"),
            LoadProgress("downloading", 9_100_000_000, 16_381_470_720),
            LoadProgress("checking", 0, 500_000),
            LoadProgress("loading", 3_140_000_000, 16_381_470_720),
            LoadProgress("measuring"),
        )
    ] == [
        "waiting for another process's download",
        "downloading 9.1 of 16.4 GB",
        "checking weights 0.0 of 0.5 MB",
        "loading target 3.1 of 16.4 GB",
        "measuring numerics",
    ]


def test_of_many_actors_that_load_the_first_are_shown() -> None:
    def loads(count: int) -> list[str]:
        loading = tuple(ActorLoading(index, LoadProgress("measuring")) for index in range(count))
        return describe_loads(
            Heartbeat(state="starting", num_samples=9, num_durable=0, loading=loading)
        )

    assert loads(0) == []
    assert loads(LOADS_SHOWN)[-1] == f"actor {LOADS_SHOWN - 1}: measuring numerics"
    assert loads(LOADS_SHOWN + 60)[LOADS_SHOWN:] == ["and 60 more actors loading"]


def test_durations_are_written_as_people_write_them() -> None:
    assert [describe_seconds(each) for each in (3.4, 61, 7_260)] == [
        "3 s",
        "1 min 01 s",
        "2 h 01 min",
    ]
