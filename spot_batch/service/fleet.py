"""Actors through ray: calls go out, answers and failures come back as values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from spot_batch.inputs.errors import InputError
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import StorageFull
from spot_batch.records.lending import Lease, News
from spot_batch.records.progress import ActorLoading, LoadProgress
from spot_batch.service.actor import Actor, ActorInfo
from spot_batch.service.deaths import Failure
from spot_batch.service.embedded import Machine
from spot_batch.service.progress import no_space
from spot_batch.service.signs import SignsOfLife

EXCHANGE_S = 0.5
LOAD_REPORT_S = 1.0
ROWS_TO_AN_ACTOR = 8


Answer = ActorInfo | LoadProgress | News | Failure


@dataclass(slots=True)
class Member:
    """An actor as the driver knows it. `pending` is the one call that it owes an answer to."""

    index: int
    handle: Any
    pending: Any
    info: ActorInfo | None = None
    loading: LoadProgress | None = None
    news: News = field(default_factory=News)
    num_published: int = 0
    signs: SignsOfLife = field(default_factory=SignsOfLife)

    @property
    def rows_per_s(self) -> float:
        """Its speed so far; 0 where it has published nothing."""
        return self.num_published / max(1e-3, self.news.elapsed_s)


class Fleet:
    """The actors of a run. Indices count on: a replacement is another actor."""

    def __init__(self, job: JobDirectory, machine: Machine, *, num_wanted: int) -> None:
        self.num_wanted = num_wanted
        self._job = job
        self._machine = machine
        self._members: list[Member] = []
        self._next_index = 0

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members)

    @property
    def num_live(self) -> int:
        return sum(member.info is not None for member in self._members)

    @property
    def loading(self) -> tuple[ActorLoading, ...]:
        """Those that are not ready, as far as they have said how far they are."""
        return tuple(
            ActorLoading(member.index, member.loading)
            for member in self._members
            if member.info is None and member.loading is not None
        )

    @property
    def num_in_flight(self) -> int:
        return sum(member.news.num_in_flight for member in self._members)

    @property
    def is_lost(self) -> bool:
        """Whether Ray has no live node left, so that no actor can ever start there again."""
        import ray

        return not any(node["Alive"] for node in ray.nodes())

    def start_missing(self) -> None:
        """Start actors up to the number wanted; nobody waits for them."""
        while len(self._members) < self.num_wanted:
            handle = start_actor(
                str(self._job.root),
                self._next_index,
                num_gpus=gpus_per_actor(self._job.spec, self._machine),
            )
            self._members.append(Member(self._next_index, handle, _load(handle)))
            self._next_index += 1

    def go_on_loading(self, member: Member) -> None:
        member.pending = _load(member.handle)

    def exchange(self, member: Member, leases: Sequence[Lease]) -> None:
        member.pending = member.handle.exchange.remote(leases, EXCHANGE_S)

    def wait(self, timeout_s: float) -> Iterator[tuple[Member, Answer]]:
        """Answers that came within the time, with who gave them."""
        import ray

        waiting = {member.pending: member for member in self._members}
        if not ray.wait(list(waiting), num_returns=1, timeout=timeout_s)[0]:
            return
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in ready:
            yield waiting[ref], self._answer(waiting[ref], ref)

    def remove(self, member: Member) -> None:
        import ray

        self._members.remove(member)
        ray.kill(member.handle, no_restart=True)

    def stop(self, grace_s: float) -> Iterator[tuple[Member, News]]:
        """Let every loaded actor publish what it has finished, then end all of them."""
        import ray

        calls = {}
        for member in self._members:
            if member.info is not None:
                calls[member.pending] = member
                calls[member.handle.stop.remote()] = member
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=grace_s)
            for ref in ready:
                answer = self._answer(calls[ref], ref)
                if isinstance(answer, News):
                    yield calls[ref], answer
        for member in list(self._members):
            self.remove(member)

    def _answer(self, member: Member, ref: Any) -> Answer:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        try:
            answer: ActorInfo | LoadProgress | News = ray.get(ref)
            return answer
        except RayTaskError as error:
            return failure_of(error.cause, str(error))
        except RayActorError:
            pid = member.info.pid if member.info is not None else None
            log = self._machine.worker_log(pid) if pid is not None else ""
            return Failure(message="its process died", detail=log)
        except RayError as error:
            return Failure(message=str(error).partition("\n")[0], detail=str(error))


def _load(handle: Any) -> Any:
    return handle.load.remote(LOAD_REPORT_S)


def failure_of(cause: BaseException, trace: str) -> Failure:
    """The failure of an actor that an exception of its own has ended."""
    message = f"{cause}" if isinstance(cause, ValueError) else repr(cause)
    return Failure(
        message=no_space(cause) if isinstance(cause, StorageFull) else message,
        detail=trace,
        is_exception=True,
        is_refusal=isinstance(cause, ValueError),
        is_bad_input=isinstance(cause, InputError),
        is_full_disk=isinstance(cause, StorageFull),
    )


def start_actor(out: str, index: int, *, num_gpus: float) -> Any:
    """An Actor in a process of its own. Ray restarts nothing: restarts are the driver's."""
    import ray

    return (
        ray.remote(Actor)
        .options(
            num_cpus=0,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=2,  # `stop` may be called while an exchange waits
            name=None,
        )
        .remote(out, index)
    )


def num_actors(spec: JobSpec, machine: Machine, num_pending: int) -> int:
    """How many actors a run wants: `auto` is one a GPU, else one for each `cpu_threads` cores."""
    if spec.resources.actors != "auto":
        return spec.resources.actors
    part = gpus_per_actor(spec, machine)
    if machine.num_gpus:
        room = int(machine.num_gpus / part) if part else 1  # uncounted, all would take the first
    else:
        room = machine.num_cpus // spec.resources.num_threads
    return max(1, min(room, math.ceil(num_pending / ROWS_TO_AN_ACTOR)))


def gpus_per_actor(spec: JobSpec, machine: Machine) -> float:
    if spec.resources.gpus_per_actor != "auto":
        return spec.resources.gpus_per_actor
    return 1.0 if machine.num_gpus else 0.0
