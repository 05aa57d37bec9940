from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spot_batch.jobdir import driver_lock
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import (
    DriverAlive,
    DriverWatch,
    acquire_driver_lock,
    read_driver,
)
from spot_batch.jobdir.events import append_event, read_events, read_heartbeat, write_heartbeat
from spot_batch.jobdir.layout import Layout
from spot_batch.records.progress import Heartbeat
from tests.jobdir.jobs import make_job, prompts

ELSEWHERE = "elsewhere/pid:[1]"
HOLD = """
import sys, time
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.layout import Layout
with acquire_driver_lock(Layout(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    return make_job(tmp_path, prompts(2))


def alter_record(job: JobDirectory, **changes: object) -> None:
    record = json.loads(job.driver_path.read_text())
    job.driver_path.write_text(json.dumps({**record, **changes}))


def test_a_second_driver_is_told_who_the_first_one_is(job: JobDirectory) -> None:
    with (
        acquire_driver_lock(job),
        pytest.raises(DriverAlive, match=f"driven by process {os.getpid()}"),
        acquire_driver_lock(job),
    ):
        pass


def test_the_lock_ends_with_its_block(job: JobDirectory) -> None:
    with acquire_driver_lock(job):
        assert read_driver(job) is not None
    assert read_driver(job) is None
    with acquire_driver_lock(job) as lock:
        assert lock.is_held


def test_a_driver_that_was_killed_holds_nothing(job: JobDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(job.root)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DriverAlive, match=str(holder.pid)), acquire_driver_lock(job):
            pass
        holder.kill()
    with acquire_driver_lock(job) as lock:
        assert lock.is_held


def test_a_process_that_took_over_the_pid_does_not_hold_the_lock(job: JobDirectory) -> None:
    with acquire_driver_lock(job) as first:
        alter_record(job, start_time="1")
        with acquire_driver_lock(job) as second:
            assert second.is_held
            assert not first.is_held
            first.beat()  # says nothing
            assert second.is_held


def test_a_driver_on_another_host_lives_while_its_heart_beats(job: JobDirectory) -> None:
    with acquire_driver_lock(job):
        alter_record(job, host=ELSEWHERE)
        with pytest.raises(DriverAlive, match="on elsewhere, last"), acquire_driver_lock(job):
            pass


@pytest.mark.parametrize("off_s", [-3600.0, -61.0, 3600.0])
def test_a_clock_that_is_wrong_makes_no_second_driver(
    job: JobDirectory, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    monkeypatch.setattr(driver_lock, "LOOK_S", 0.01)
    with acquire_driver_lock(job):
        alter_record(job, host=ELSEWHERE, heartbeat=time.time() + off_s)
        num_looks = itertools.count(1)

        def beats() -> None:
            if next(num_looks) == 3:
                alter_record(job, heartbeat=time.time() + off_s)

        with (
            pytest.raises(DriverAlive, match="on elsewhere"),
            acquire_driver_lock(job, look_again=beats),
        ):
            pass


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_driver_on_another_host_that_stays_silent_holds_nothing(
    job: JobDirectory, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    monkeypatch.setattr(driver_lock, "STALE_AFTER_S", 0.2)
    with acquire_driver_lock(job) as first:
        alter_record(job, host=ELSEWHERE, heartbeat=time.time() + off_s)
        with acquire_driver_lock(job) as second:
            assert (first.is_held, second.is_held) == (False, True)


def test_a_driver_that_was_watched_for_long_enough_is_not_watched_again(
    job: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lock, "STALE_AFTER_S", 0.2)
    with acquire_driver_lock(job):
        alter_record(job, host=ELSEWHERE, heartbeat=time.time())
        record, watch = read_driver(job), DriverWatch()
        assert record is not None
        while watch.is_alive(record):
            time.sleep(0.01)

        def never() -> None:
            raise AssertionError("looked again")

        with acquire_driver_lock(job, watch=watch, look_again=never) as lock:
            assert lock.is_held


def test_a_torn_record_holds_nothing(job: JobDirectory) -> None:
    job.driver_path.write_text('{"pid": 1')
    with acquire_driver_lock(job) as lock:
        assert lock.is_held


def test_a_beat_moves_the_heartbeat(job: JobDirectory) -> None:
    with acquire_driver_lock(job) as lock:
        alter_record(job, heartbeat=5.0)
        lock.beat()
        record = read_driver(job)
        assert record is not None
        assert time.time() - record.heartbeat < 10


def test_a_job_may_be_locked_before_it_is_created(tmp_path: Path) -> None:
    with acquire_driver_lock(Layout(tmp_path / "out")) as lock:
        assert make_job(tmp_path, prompts(1)).num_samples == 1
        assert lock.is_held


def test_events_of_several_processes_stand_whole(job: JobDirectory) -> None:
    append_event(job, "started", actors=2)
    with job.events_path.open("a") as file:
        file.write('{"kind": "to')  # a crash in the midst of a line
    append_event(job, "lost with the line before it")
    append_event(job, "ended", code=0)
    events = list(read_events(job))
    assert [event["kind"] for event in events] == ["started", "ended"]
    assert events[0]["actors"] == 2


def test_the_last_heartbeat_is_read_back(job: JobDirectory) -> None:
    assert read_heartbeat(job) is None
    write_heartbeat(job, Heartbeat(state="running", num_samples=2, num_durable=1))
    write_heartbeat(job, Heartbeat(state="running", num_samples=2, num_durable=2))
    heartbeat = read_heartbeat(job)
    assert heartbeat is not None
    assert heartbeat.num_durable == 2
    assert abs(time.time() - heartbeat.time) < 10
