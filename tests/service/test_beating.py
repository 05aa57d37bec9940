"""The driver's sign of life, from a thread of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_batch.jobdir.driver_lock import DriverLock, acquire_driver_lock, read_driver
from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.layout import Layout
from spot_batch.service.beating import beating
from tests.service.jobs import wait_until


def test_a_busy_driver_beats_and_a_beat_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spot_batch.service.beating.BEAT_S", 0.01)
    beat, failed = DriverLock.beat, []

    def fails_once(self: DriverLock) -> None:
        if not failed:
            failed.append(self)
            raise StorageFull(28, "no space left", "driver.json")
        beat(self)

    monkeypatch.setattr(DriverLock, "beat", fails_once)
    job = Layout(tmp_path / "out")
    with acquire_driver_lock(job) as lock:
        first = read_driver(job)
        assert first is not None
        with beating(lock):  # this thread does nothing at all

            def has_beaten() -> bool:
                now = read_driver(job)
                return now is not None and now.heartbeat > first.heartbeat

            wait_until(has_beaten, timeout_s=30.0)
    assert failed
    assert read_driver(job) is None, "a beat does not outlive the lock"
