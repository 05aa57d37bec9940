"""The same kills on a real Ray: eight runs, each resumed and compared with the undisturbed job."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.service import fleet
from spot_batch.service.actor import Actor
from spot_batch.service.progress import Exit, Silent
from spot_batch.service.run import run_job
from tests.service.jobs import group_of
from tests.service.pool import FACTS, KillAt, drive, load_stand_in, nothing, wait_gone
from tests.service.test_chaos import Tally, copied, fresh, told, undisturbed

__all__ = ["fresh", "told", "undisturbed"]  # fixtures

pytestmark = [pytest.mark.chaos, pytest.mark.ray, pytest.mark.timeout(900)]

# Not forked: gRPC does not outlive a fork of a process that has used Ray itself, as tests do.
SPAWN = multiprocessing.get_context("spawn")

STEP_FILE = "kill-step"  # beside the job: what an actor on Ray is told of it


class KilledActor(Actor):
    """An actor with the stand-in engine, killed where the file beside the job says so."""

    def __init__(self, out: str, index: int) -> None:
        folder = Path(out).parent
        reach: Callable[[str], None] = nothing
        if (folder / STEP_FILE).exists():
            step, nth = (folder / STEP_FILE).read_text().split()
            reach = KillAt(step, int(nth), folder / "spent")
        super().__init__(out, index, load_engine=load_stand_in, reach=reach)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


def _drive_on_ray(root: Path, reach: Callable[[str], None]) -> None:
    os.setsid()
    fleet.Actor = KilledActor  # type: ignore[misc]
    job = JobDirectory.open(root, reach=reach)
    with acquire_driver_lock(job) as lock:
        result = run_job(job, FACTS, Silent(), lock=lock)
    os._exit(int(result.exit_code))


@pytest.mark.parametrize(
    ("role", "step", "nth"),
    [
        ("actor", "actor.admitted", 2),
        ("actor", "data.segment.made", 1),
        ("actor", "file.linked", 3),
        ("actor", "actor.published", 2),
        ("driver", "driver.leased", 3),
        ("driver", "driver.recorded", 2),
        ("driver", "part.stats", 1),
        ("driver", "finalize.summary", 1),
    ],
)
def test_a_kill_on_ray_changes_no_byte(
    fresh: Path,
    undisturbed: tuple[Path, Path, Path],
    tmp_path: Path,
    tally: Tally,
    role: str,
    step: str,
    nth: int,
) -> None:
    root = copied(fresh, tmp_path)
    if role == "actor":
        (tmp_path / STEP_FILE).write_text(f"{step} {nth}")
    kill = KillAt(step, nth, tmp_path / "spent") if role == "driver" else nothing
    process = SPAWN.Process(target=_drive_on_ray, args=(root, kill))
    process.start()
    code = wait_gone(process, 250)
    assert (tmp_path / "spent").exists(), "nobody was killed"
    tally.counts.update(runs=1, kills=1)
    assert code == (Exit.COMPLETE if role == "actor" else -signal.SIGKILL)
    assert process.pid is not None
    end = time.monotonic() + 60
    while group_of(process.pid) and time.monotonic() < end:  # Ray's processes follow it
        time.sleep(0.2)
    if code != Exit.COMPLETE:
        assert drive(root) == Exit.COMPLETE
        tally.counts["runs"] += 1
    tally.compare(root, undisturbed[0])
