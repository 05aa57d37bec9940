"""Processes killed at every step of publication, and what else a machine does to a job.

Every run is resumed and compared with the undisturbed job: the same bytes of data/, every id once.
`pytest -m chaos -s` prints how many runs, kills and differences there were.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.jobdir.creation import create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.events import read_events
from spot_batch.jobdir.scan import scan
from spot_batch.jobdir.segments import publish_segment
from spot_batch.service import leases as driver_leases
from spot_batch.service.plan import plan_job
from spot_batch.service.progress import Exit
from tests.jobdir.jobs import make_outcomes
from tests.service.jobs import data_hash, prompts, small_spec, write_rows
from tests.service.pool import Count, KillAt, begin_drive, drive, nothing, wait_gone

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_ROWS = 40
SPEC = {
    "generation.n": 2,
    "output.rows_per_part": 23,
    "scheduling.publish_seconds": 0.001,
    "scheduling.checkpoint_seconds": 0.001,
    "engine.max_sequences": 4,
    "failure.actor_restarts_per_hour": 100,
    "failure.no_progress_seconds": 4,
}


class Tally:
    """What the whole suite did; printed at its end."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def compare(self, root: Path, want: Path) -> None:
        """The job is complete, every id stands once, and its bytes are those of `want`."""
        job = JobDirectory.open(root)
        assert job.is_complete
        assert str(scan(job, verify=True).in_parts) == f"0-{job.num_samples - 1}"
        ids: list[tuple[int, int]] = []
        for part in range(job.num_parts):
            with pa.ipc.open_file(job.data / job.part_name(part)) as reader:
                table = reader.read_all()
            ids += zip(
                table["row_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True
            )
        assert ids == [(row, sample) for row in range(NUM_ROWS) for sample in range(2)]
        self.counts["differences"] += data_hash(root) != data_hash(want)
        assert data_hash(root) == data_hash(want)
        assert not list(job.segments.iterdir())
        assert not list(job.tmp.iterdir())


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.fixture(scope="module", autouse=True)
def told(tally: Tally) -> object:
    yield
    counts = tally.counts
    print(
        f"\nchaos: {counts['runs']} runs, {counts['kills']} kills, {counts['stops']} stops, "
        f"{counts['differences']} differences"
    )
    return None


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that has been created and not run; tests copy it."""
    folder = tmp_path_factory.mktemp("fresh")
    spec = small_spec(write_rows(folder, prompts(NUM_ROWS)), SPEC)
    plan = plan_job(spec, folder / "out")
    create_or_open(
        folder / "out",
        plan.spec,
        fingerprint=plan.fingerprint,
        fields=plan.fields,
        pinned=plan.pinned,
    )
    return folder / "out"


@pytest.fixture(scope="module")
def undisturbed(fresh: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(the finished job, the steps that its driver reached, those of its one actor)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(fresh, folder / "out")
    counts = [folder / "driver", folder / "actor"]
    code = drive(folder / "out", num_actors=1, driver=Count(counts[0]), actor=Count(counts[1]))
    assert code == Exit.COMPLETE
    return folder / "out", counts[0], counts[1]


def copied(fresh: Path, folder: Path) -> Path:
    shutil.copytree(fresh, folder / "out")
    return folder / "out"


@pytest.mark.parametrize("role", ["driver", "actor"])
def test_a_kill_at_any_step_changes_no_byte(
    fresh: Path, undisturbed: tuple[Path, Path, Path], tmp_path: Path, tally: Tally, role: str
) -> None:
    want, *steps = undisturbed
    reached = Counter((steps[0] if role == "driver" else steps[1]).read_text().split())
    assert len(reached) >= (8 if role == "actor" else 14), reached
    for step, count in sorted(reached.items()):
        # How often a step is reached varies with timing: "last" leaves a little room.
        for nth in sorted({1, (count + 1) // 2, max(1, count * 9 // 10)}):
            folder = tmp_path / f"{step}-{nth}"
            root = copied(fresh, folder)
            kill = KillAt(step, nth, folder / "spent")
            code = drive(root, num_actors=1, **{role: kill})
            tally.counts["runs"] += 1
            tally.counts["kills"] += kill.spent.exists()
            if role == "driver" and kill.spent.exists():
                assert code == -signal.SIGKILL, (step, nth, code)
            if code != Exit.COMPLETE:
                assert drive(root, num_actors=1) == Exit.COMPLETE, (step, nth)
                tally.counts["runs"] += 1
            tally.compare(root, want)
            shutil.rmtree(folder)


@pytest.mark.parametrize("num_actors", [1, 2])
def test_an_actor_that_is_stopped_at_any_step_changes_no_byte(
    fresh: Path,
    undisturbed: tuple[Path, Path, Path],
    tmp_path: Path,
    tally: Tally,
    num_actors: int,
) -> None:
    """SIGSTOP: the process is there, holds its samples and says no word more."""
    want, _, steps = undisturbed
    reached = Counter(steps.read_text().split())
    assert {"actor.prepared", "actor.finished", "file.linked"} <= reached.keys()
    for step, count in sorted(reached.items()):
        folder = tmp_path / step
        root = copied(fresh, folder)
        stop = KillAt(step, (count + 3) // 4, folder / "spent", by=signal.SIGSTOP)
        assert drive(root, num_actors=num_actors, actor=stop) == Exit.COMPLETE, step
        tally.counts.update(runs=1, stops=stop.spent.exists())
        died = [
            each for each in read_events(JobDirectory.open(root)) if each["kind"] == "actor_died"
        ]
        assert len(died) == stop.spent.exists(), (step, died)
        tally.compare(root, want)
        shutil.rmtree(folder)


def test_a_kill_at_any_step_of_a_retry_changes_no_byte(
    fresh: Path, undisturbed: tuple[Path, Path, Path], tmp_path: Path, tally: Tally
) -> None:
    """Samples of three parts failed; once retried the job is that of which none ever did."""
    failed = copied(fresh, tmp_path / "failed")
    ids = [3, 30, 31, 70]
    job = JobDirectory.open(failed)
    publish_segment(job, make_outcomes(job, ids, failed=ids))
    assert drive(failed, num_actors=1) == Exit.TOO_MANY_ERRORS
    count = Count(tmp_path / "steps")
    whole = copied(failed, tmp_path / "whole")
    assert drive(whole, num_actors=1, driver=count, retry=True) == Exit.COMPLETE
    tally.counts["runs"] += 2
    tally.compare(whole, undisturbed[0])
    reached = Counter(count.path.read_text().split())
    assert {step: reached[step] for step in reached if step.startswith("retry.")} == {
        "retry.opened": 1,
        "retry.audits": 1,
        "retry.kept": 3,
        "retry.marked": 3,
    }
    for step, most in sorted(reached.items()):
        for nth in range(1, 1 + (most if step.startswith("retry.") else 1)):
            folder = tmp_path / f"{step}-{nth}"
            root = copied(failed, folder)
            kill = KillAt(step, nth, folder / "spent")
            code = drive(root, num_actors=1, driver=kill, retry=True)
            assert code == -signal.SIGKILL, (step, nth, code)
            if drive(root, num_actors=1) == Exit.TOO_MANY_ERRORS:  # parts that were not marked yet
                assert drive(root, num_actors=1, retry=True) == Exit.COMPLETE, (step, nth)
                tally.counts["runs"] += 1
            tally.counts.update(runs=2, kills=1)
            tally.compare(root, undisturbed[0])
            shutil.rmtree(folder)


def test_other_actors_and_leases_between_runs_change_no_byte(
    fresh: Path,
    undisturbed: tuple[Path, Path, Path],
    tmp_path: Path,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = copied(fresh, tmp_path)
    for number, (num_actors, depth) in enumerate([(1, 1), (3, 5)]):
        monkeypatch.setattr(driver_leases, "QUEUE_DEPTH", depth)
        kill = KillAt("driver.recorded", 4, tmp_path / f"spent-{number}")
        assert drive(root, num_actors=num_actors, driver=kill) == -signal.SIGKILL
        tally.counts.update(runs=1, kills=1)
    assert 0 < len(scan(JobDirectory.open(root)).data) < 2 * NUM_ROWS
    monkeypatch.setattr(driver_leases, "QUEUE_DEPTH", 2)
    assert drive(root, num_actors=2) == Exit.COMPLETE
    tally.counts["runs"] += 1
    tally.compare(root, undisturbed[0])


def test_two_drivers_at_once_double_work_and_no_row(
    fresh: Path, undisturbed: tuple[Path, Path, Path], tmp_path: Path, tally: Tally
) -> None:
    """The driver's lock is advisory: here it is taken away from under the first driver."""
    root = copied(fresh, tmp_path)
    first = begin_drive(root, num_actors=1)
    job = JobDirectory.open(root)
    while not job.driver_path.exists():
        time.sleep(0.001)
    job.driver_path.unlink()
    second = begin_drive(root, num_actors=2)
    codes = {wait_gone(first, 60), wait_gone(second, 60)}
    tally.counts["runs"] += 2
    if Exit.COMPLETE not in codes or codes - {Exit.COMPLETE}:
        tally.counts["runs"] += 1
        assert drive(root) == Exit.COMPLETE
    tally.compare(root, undisturbed[0])


def _small_files() -> None:
    """Files end at some bytes, as on a full disk: a process that writes on gets an error."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, resource.RLIM_INFINITY))


def test_a_full_disk_stops_the_job_and_more_room_ends_it(
    fresh: Path,
    undisturbed: tuple[Path, Path, Path],
    tmp_path: Path,
    tally: Tally,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spot_batch.jobdir.files._FULL", frozenset({errno.ENOSPC, errno.EFBIG}))
    root = copied(fresh, tmp_path)
    assert drive(root, setup=_small_files) == Exit.RESUMABLE
    assert drive(root) == Exit.COMPLETE
    tally.counts["runs"] += 2
    tally.compare(root, undisturbed[0])


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("damage", ["truncated", "deleted"])
def test_a_damaged_segment_is_made_again(
    fresh: Path,
    undisturbed: tuple[Path, Path, Path],
    tmp_path: Path,
    tally: Tally,
    damage: str,
    nth: int,
) -> None:
    root = copied(fresh, tmp_path)
    kill = KillAt("driver.recorded", nth, tmp_path / "spent")
    assert drive(root, num_actors=1, driver=kill) == -signal.SIGKILL
    segment = sorted((root / "_spot" / "segments").iterdir())[0]
    if damage == "deleted":
        segment.unlink()
    else:
        os.truncate(segment, segment.stat().st_size // 2)
    assert drive(root) == Exit.COMPLETE
    tally.counts.update(runs=2, kills=1)
    tally.compare(root, undisturbed[0])


def test_a_clock_set_back_changes_nothing(
    fresh: Path, undisturbed: tuple[Path, Path, Path], tmp_path: Path, tally: Tally
) -> None:
    root = copied(fresh, tmp_path)

    def set_back(by_s: float) -> Callable[[], None]:
        real = time.time
        return lambda: setattr(time, "time", lambda: real() - by_s)

    kill = KillAt("driver.recorded", 3, tmp_path / "spent")
    assert drive(root, driver=kill) == -signal.SIGKILL
    assert drive(root, setup=set_back(3_600.0)) == Exit.COMPLETE
    tally.counts.update(runs=2, kills=1)
    tally.compare(root, undisturbed[0])


def test_an_output_that_became_read_only_is_named(fresh: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere; tests/store has a folder that refuses root too")
    root = copied(fresh, tmp_path)
    for folder in (root, *root.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    assert drive(root) not in (Exit.COMPLETE, Exit.RESUMABLE)


def test_published_parts_keep_their_bytes_to_the_end(
    fresh: Path, undisturbed: tuple[Path, Path, Path], tmp_path: Path, tally: Tally
) -> None:
    """At a quarter, half and three quarters `load_dataset` opens data/, and no part moves."""
    import datasets

    root = copied(fresh, tmp_path)
    seen: dict[str, bytes] = {}
    for nth in (1, 2, 3):
        kill = KillAt("part.published", 1, tmp_path / f"spent-{nth}")
        assert drive(root, num_actors=1, driver=kill) == -signal.SIGKILL
        tally.counts.update(runs=1, kills=1)
        parts = {path.name: path.read_bytes() for path in sorted((root / "data").iterdir())}
        assert {name: parts[name] for name in seen} == seen
        seen = parts
        loaded = datasets.load_dataset(str(root), cache_dir=str(tmp_path / f"cache-{nth}"))
        assert loaded["train"].num_rows == 23 * len(parts)
    assert drive(root, actor=nothing) == Exit.COMPLETE
    tally.counts["runs"] += 1
    tally.compare(root, undisturbed[0])
