"""What the driver and the job directory cost: a job whose engine answers at once.

One process leases, publishes and compacts; no model, no ray. The rate is therefore that of all of
it on one core, and the memory that of a driver which also does its actors' publishing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.job.fingerprint import fingerprint
from spot_batch.job.reading import load_spec, with_model_defaults
from spot_batch.jobdir.creation import create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.parts import compact, delete_covered_segments
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.lending import Lease, News, Receipt
from spot_batch.records.progress import ActorLoading, RunFacts
from spot_batch.records.results import Completion, Outcome, SampleStats
from spot_batch.service.actor import ActorInfo
from spot_batch.service.fleet import Answer, Member
from spot_batch.service.progress import Exit, Silent
from spot_batch.service.run import run_job

_ANSWER = "The answer is forty-two, as it was the last time that somebody asked. "
_FACTS = RunFacts(drafter="none", target="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFigures:
    """`rows_per_s` counts published and compacted rows over the whole of the second half's run,
    the end of the job included; `recovery_s` is from its start to its first lease."""

    num_samples: int
    rows_per_s: float
    recovery_s: float
    growth_mib: float
    finish_s: float


def bench_store(folder: Path, *, num_samples: int, lease_rows: int) -> StoreFigures:
    """Runs a job to its half, stops it as a Ctrl-C would, and resumes it to its end."""
    job = _begun(folder, num_samples)
    half = _Bench(lease_rows, stop_after=num_samples // 2)
    with acquire_driver_lock(job) as lock:
        first = run_job(job, _FACTS, Silent(), lock=lock, workplace=half.workplace)
    assert first.exit_code == Exit.RESUMABLE, first.message
    rest = _Bench(lease_rows, stop_after=None)
    began_s = time.monotonic()
    with acquire_driver_lock(job) as lock:
        result = run_job(job, _FACTS, Silent(), lock=lock, workplace=rest.workplace)
    elapsed_s = time.monotonic() - began_s
    assert result.exit_code == Exit.COMPLETE, result.message
    recovery_s = rest.began_s - began_s
    return StoreFigures(
        num_samples=num_samples,
        rows_per_s=rest.num_published / (elapsed_s - recovery_s),
        recovery_s=recovery_s,
        growth_mib=max(half.growth_mib, rest.growth_mib),
        finish_s=elapsed_s - (rest.ended_s - began_s),
    )


def _begun(folder: Path, num_rows: int) -> JobDirectory:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "rows.parquet"
    prompts = pa.array([f"What is the answer to question {i}?" for i in range(num_rows)])
    levels = pa.array([i % 7 if i % 3 else None for i in range(num_rows)], pa.int16())
    pq.write_table(pa.table({"prompt": prompts, "level": levels}), source, row_group_size=16_384)
    given = {"input.source": str(source), "equivalence.audit_fraction": 0.0}
    spec = with_model_defaults(load_spec(None, given))
    pinned = pin_input(spec)
    mark, fields = fingerprint(spec, pinned.identity, {"name": "bench"})
    return create_or_open(folder / "out", spec, fingerprint=mark, fields=fields, pinned=pinned)


class _Bench:
    """A workplace of one actor in this process; parts are written as soon as they are whole."""

    def __init__(self, lease_rows: int, *, stop_after: int | None) -> None:
        self._lease_rows = lease_rows
        self._stop_after = stop_after
        self._first_mib = 0.0
        self.began_s = self.ended_s = 0.0
        self.growth_mib = 0.0
        self.num_published = 0
        self.num_wanted = 1
        self.num_live = 1
        self.num_in_flight = 0
        self.loading: tuple[ActorLoading, ...] = ()
        self._owed: deque[int] = deque()

    @contextmanager
    def workplace(self, job: JobDirectory) -> Iterator[_Bench]:
        self._job = job
        self._reader = InputReader(job.pinned)
        self.began_s = time.monotonic()
        self._first_mib = _resident_mib()
        yield self
        self.ended_s = time.monotonic()

    # -- a crew ------------------------------------------------------------------------------------

    def crew(self, job: JobDirectory, *, num_pending: int) -> _Bench:
        del job, num_pending
        info = ActorInfo(
            index=0,
            pid=os.getpid(),
            device="none",
            max_sequences=self._lease_rows,
            drafter="none",
            load_s=0.0,
        )
        self._member = Member(0, None, None)
        self.members = [self._member]
        self._answers: deque[Answer] = deque([info])
        return self

    @property
    def is_lost(self) -> bool:
        return False

    def start_missing(self) -> None:
        pass

    def go_on_loading(self, member: Member) -> None:
        raise AssertionError(f"{member} has nothing to load")

    def exchange(self, member: Member, leases: Sequence[Lease]) -> None:
        del member
        self._owed.extend(itertools.chain.from_iterable(lease.sample_ids for lease in leases))

    def wait(self, timeout_s: float) -> Iterator[tuple[Member, Answer]]:
        del timeout_s
        if self._answers:
            yield self._member, self._answers.popleft()
            return
        if self._stop_after is not None and self.num_published >= self._stop_after:
            raise KeyboardInterrupt
        self.growth_mib = max(self.growth_mib, _resident_mib() - self._first_mib)
        receipt = self._publish()
        yield self._member, News(receipts=(receipt,), num_waiting=len(self._owed))

    def remove(self, member: Member) -> None:
        del member

    def stop(self, grace_s: float) -> Iterator[tuple[Member, News]]:
        del grace_s
        yield from ()

    def _publish(self) -> Receipt:
        ids = [self._owed.popleft() for _ in range(min(self._lease_rows, len(self._owed)))]
        rows = self._reader.read(ids).table
        outcomes = [_answered(each, rows, place) for place, each in enumerate(ids)]
        self.num_published += len(ids)
        return publish_segment(self._job, outcomes, actor="bench")

    # -- compaction --------------------------------------------------------------------------------

    def compaction(self, job: JobDirectory, *, done: set[int]) -> _Compaction:
        return _Compaction(job, done)


class _Compaction:
    def __init__(self, job: JobDirectory, done: set[int]) -> None:
        self._job = job
        self._left = deque(part for part in range(job.num_parts) if part not in done)

    def advance(self, durable: IntervalSet) -> None:
        while self._left and durable.covers(self._job.part_ids(self._left[0])):
            delete_covered_segments(self._job, [compact(self._job, self._left.popleft())])

    def wait(self) -> None:
        pass


_COMPLETIONS = [
    Completion(
        sample_id=0,
        token_ids=tuple(range(length)),
        commit_step=tuple(range(length)),
        finish_reason="stop",
        num_prompt_tokens=12,
        num_draft_free_forwards=length,
        stats=SampleStats(num_forwards=length),
    )
    for length in range(8, 16)
]
"""What the engine says, ready: a thousand answers take it a millisecond or two."""


def _answered(sample_id: int, rows: pa.Table, position: int) -> Outcome:
    completion = _COMPLETIONS[sample_id % len(_COMPLETIONS)]
    return Outcome(
        sample_id=sample_id,
        custom_id=str(sample_id),
        seed=0,
        result=completion,
        rows=rows,
        position=position,
        text=_ANSWER[: len(completion.token_ids) * 5],
    )


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
