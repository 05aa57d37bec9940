"""Where a run finds its actors and its compaction: on a Ray of the job's own, or in a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.records.lending import Lease, News
from spot_batch.records.progress import ActorLoading
from spot_batch.service.compaction import Compactor
from spot_batch.service.embedded import Machine, embedded_ray
from spot_batch.service.fleet import Answer, Fleet, Member, num_actors


class Crew(Protocol):
    """The actors of a run, wherever they are; `Fleet` says what each call does."""

    num_wanted: int

    @property
    def members(self) -> Sequence[Member]: ...

    @property
    def num_live(self) -> int: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def loading(self) -> tuple[ActorLoading, ...]: ...

    @property
    def is_lost(self) -> bool: ...

    def go_on_loading(self, member: Member) -> None: ...

    def start_missing(self) -> None: ...

    def exchange(self, member: Member, leases: Sequence[Lease]) -> None: ...

    def wait(self, timeout_s: float) -> Iterator[tuple[Member, Answer]]: ...

    def remove(self, member: Member) -> None: ...

    def stop(self, grace_s: float) -> Iterator[tuple[Member, News]]: ...


class Compaction(Protocol):
    """Writes parts while the job runs; `Compactor` says what each call does."""

    def advance(self, durable: IntervalSet) -> None: ...

    def wait(self) -> None: ...


class Workplace(Protocol):
    """Where a run's actors and its compaction are started."""

    def crew(self, job: JobDirectory, *, num_pending: int) -> Crew: ...

    def compaction(self, job: JobDirectory, *, done: set[int]) -> Compaction: ...


class OnRay:
    """A workplace on a Ray that runs."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def crew(self, job: JobDirectory, *, num_pending: int) -> Crew:
        wanted = num_actors(job.spec, self._machine, num_pending)
        return Fleet(job, self._machine, num_wanted=wanted)

    def compaction(self, job: JobDirectory, *, done: set[int]) -> Compaction:
        return Compactor(job, done=done)


@contextmanager
def on_embedded_ray(job: JobDirectory) -> Iterator[Workplace]:
    """A Ray of the job's own on this machine, for as long as it is needed."""
    with embedded_ray(cpu_threads=job.spec.resources.num_threads) as machine:
        yield OnRay(machine)
