"""Compactors of one part at once that listed other segments: copies that differ, at every step."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact, delete_covered_segments
from spot_batch.jobdir.retry import begin_retry
from spot_batch.jobdir.scan import PartInfo, scan
from spot_batch.jobdir.segments import publish_segment
from tests.jobdir.jobs import make_job, make_outcomes, prompts

STEPS = ("part.written", "part.stats", "part.errors", "part.data", "part.published", "segment.gone")
FAILED = {1, 2}
WAIT_S = 60.0


class Other:
    """Another driver: compacts part 0 on a thread of its own to a step, and later to its end."""

    def __init__(self, root: Path, stop_at: str) -> None:
        self._stop_at = stop_at
        self._root = root
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self._made: list[PartInfo] = []
        self._thread = threading.Thread(target=self._run)

    def begin(self) -> None:
        self._thread.start()
        assert self._stopped.wait(WAIT_S)

    def end(self) -> PartInfo:
        self._go_on.set()
        self._thread.join(WAIT_S)
        assert self._made, "the other compactor failed"
        return self._made[0]

    def _run(self) -> None:
        try:
            job = JobDirectory.open(self._root, reach=self._reach)
            made = compact(job, 0)
            delete_covered_segments(job, [made])
            self._reach("segment.gone")
            self._made.append(made)
        finally:
            self._stopped.set()

    def _reach(self, step: str) -> None:
        if step == self._stop_at and not self._stopped.is_set():
            self._stopped.set()
            assert self._go_on.wait(WAIT_S)


def row_indices(folder: Path) -> list[int]:
    found: list[int] = []
    for path in folder.glob("*.arrow"):
        with pa.ipc.open_file(path) as reader:
            found += reader.read_all()["row_index"].to_pylist()
    return sorted(found)


@pytest.mark.parametrize("mine", ["part.written", "part.stats", "part.errors", "part.data"])
@pytest.mark.parametrize("theirs", STEPS)
@pytest.mark.parametrize("is_retried", [False, True], ids=["first", "revision"])
def test_whoever_listed_less_takes_the_copies_of_who_published(
    tmp_path: Path, mine: str, theirs: str, is_retried: bool
) -> None:
    """One lists a segment with errors alone; before it goes on, the samples' completions are
    published, and the other one lists both, and gets as far as `theirs`."""
    job = make_job(tmp_path, prompts(4))
    publish_segment(job, make_outcomes(job, range(4), failed=FAILED))
    if is_retried:
        finalize(job, check=None, facts=None)
        begin_retry(job)
        publish_segment(job, make_outcomes(job, sorted(FAILED), failed=FAILED, drafted=4))
    other = Other(job.root, theirs)

    def reach(step: str) -> None:
        if step == mine and not began:
            began.append(step)
            publish_segment(job, make_outcomes(job, sorted(FAILED)))
            other.begin()

    began: list[str] = []
    me = JobDirectory.open(job.root, reach=reach)
    made = compact(me, 0)
    delete_covered_segments(me, [made])
    assert len(scan(job, verify=True).data) == 4
    other.end()
    published = scan(job, verify=True)
    assert (len(published.in_parts), len(published.data)) == (4, 4)
    data, errors = row_indices(job.data), row_indices(job.errors)
    assert sorted(data + errors) == [0, 1, 2, 3]
    assert errors in ([], sorted(FAILED))
    finalize(job, check=None, facts=None)
    assert job.is_complete
