"""A pool of forked processes in Ray's place: the real driver, store and actor, and an engine that
answers at once. Any process can be killed at any named step."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import torch

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.parts import compact, delete_covered_segments
from spot_batch.jobdir.retry import begin_retry
from spot_batch.records.lending import Lease, News
from spot_batch.records.progress import ActorLoading, LoadReport, RunFacts
from spot_batch.records.results import Begun, Completion, Rounds, SampleStats
from spot_batch.records.sampling import Request
from spot_batch.service.actor import Actor
from spot_batch.service.assemble import Loaded, model_info, sample_preparer
from spot_batch.service.deaths import Failure
from spot_batch.service.fleet import Answer, Member, failure_of
from spot_batch.service.progress import Silent
from spot_batch.service.run import run_job

FORK = multiprocessing.get_context("fork")
FACTS = RunFacts(drafter="none", target="bundled")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class KillAt:
    """Ends its process, or does with it what another signal does, at the nth time that a step is
    reached, once: `spent` is made first."""

    step: str
    nth: int
    spent: Path
    by: signal.Signals = signal.SIGKILL
    seen: list[int] = dataclasses.field(default_factory=lambda: [0])

    def __call__(self, step: str) -> None:
        if step != self.step:
            return
        self.seen[0] += 1
        if self.seen[0] != self.nth:
            return
        try:
            self.spent.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), self.by)


@dataclasses.dataclass(frozen=True)
class Count:
    """Writes down every step that is reached, one a line."""

    path: Path

    def __call__(self, step: str) -> None:
        with self.path.open("a") as file:
            file.write(step + "\n")


def nothing(step: str) -> None:
    del step


@functools.cache
def _models(target: str) -> tuple[ModelInfo, object]:
    info = model_info(JobSpec.model_validate({"input": {"source": "x"}, "model": target}))
    return info, load_tokenizer(info.path)


class StandIn:
    """Answers some requests a step; what it says is a function of the request alone."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: list[Request] = []

    @property
    def num_active(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def rounds(self) -> Rounds:
        return Rounds()

    def begun(self) -> dict[int, Begun]:
        """The first half of the answer; what is begun is checked when it is answered."""
        return {
            each.sample_id: Begun(
                token_ids=answer(each).token_ids[:2],
                commit_step=(0, 1)[: len(answer(each).token_ids)],
                num_steps=2,
                stats=SampleStats(),
            )
            for each in self._waiting
            if not each.draft_free
        }

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        done, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
        return [answer(request) for request in done]


def answer(request: Request) -> Completion:
    length = request.noise_key % 5
    if request.begun is not None:
        assert request.begun == Begun(
            token_ids=tuple((request.noise_key >> at) % 200 for at in range(min(2, length))),
            commit_step=(0, 1)[:length],
            num_steps=2,
            stats=SampleStats(),
        )
    return Completion(
        sample_id=request.sample_id,
        token_ids=tuple((request.noise_key >> at) % 200 for at in range(length)),
        commit_step=tuple(range(length)),
        finish_reason="stop" if request.noise_key % 2 else "length",
        num_prompt_tokens=len(request.prompt_ids),
        num_draft_free_forwards=length,
        stats=SampleStats(num_forwards=1 + os.getpid() % 7),  # depends on who makes it
    )


def load_stand_in(job: JobDirectory, device: torch.device, report: LoadReport) -> Loaded:
    del device, report
    info, tokenizer = _models(job.spec.model.target.path)
    return Loaded(
        engine=StandIn(at_once=3),
        preparer=sample_preparer(job.spec, job.pinned, info, tokenizer),  # type: ignore[arg-type]
        text=lambda ids: " ".join(map(str, ids)),
        drafter="none",
    )


class Pool:
    """A workplace of forked actors; parts are written by the driver itself."""

    def __init__(self, num_actors: int, reach: Callable[[str], None] = nothing) -> None:
        self._num_actors = num_actors
        self._reach = reach

    def crew(self, job: JobDirectory, *, num_pending: int) -> PoolCrew:
        del num_pending
        return PoolCrew(job, self._num_actors, self._reach)

    def compaction(self, job: JobDirectory, *, done: set[int]) -> InPlace:
        return InPlace(job, done)


class InPlace:
    def __init__(self, job: JobDirectory, done: set[int]) -> None:
        self._job = job
        self._left = [part for part in range(job.num_parts) if part not in done]

    def advance(self, durable: IntervalSet) -> None:
        for part in [each for each in self._left if durable.covers(self._job.part_ids(each))]:
            self._left.remove(part)
            delete_covered_segments(self._job, [compact(self._job, part)])

    def wait(self) -> None:
        pass


class PoolCrew:
    def __init__(self, job: JobDirectory, num_wanted: int, reach: Callable[[str], None]) -> None:
        self.num_wanted = num_wanted
        self._root = str(job.root)
        self._reach = reach
        self._members: list[Member] = []
        self._next_index = 0

    @property
    def members(self) -> Sequence[Member]:
        return tuple(self._members)

    @property
    def num_live(self) -> int:
        return sum(member.info is not None for member in self._members)

    @property
    def num_in_flight(self) -> int:
        return sum(member.news.num_in_flight for member in self._members)

    @property
    def loading(self) -> tuple[ActorLoading, ...]:
        return ()

    def go_on_loading(self, member: Member) -> None:
        raise AssertionError(f"{member} loads in one go")

    @property
    def is_lost(self) -> bool:
        return False

    def start_missing(self) -> None:
        while len(self._members) < self.num_wanted:
            ours, theirs = FORK.Pipe()
            arguments = (self._root, self._next_index, theirs, self._reach)
            process = FORK.Process(target=_act, args=arguments)
            process.start()
            theirs.close()
            self._members.append(Member(self._next_index, process, ours))
            self._next_index += 1

    def exchange(self, member: Member, leases: Sequence[Lease]) -> None:
        with suppress(BrokenPipeError):  # its death is the answer
            member.pending.send(list(leases))

    def wait(self, timeout_s: float) -> Iterator[tuple[Member, Answer]]:
        by_pipe = {member.pending: member for member in self._members}
        for pipe in wait_for(list(by_pipe), timeout_s):
            yield by_pipe[pipe], _received(pipe)

    def remove(self, member: Member) -> None:
        self._members.remove(member)
        member.pending.close()
        member.handle.kill()
        member.handle.join()

    def stop(self, grace_s: float) -> Iterator[tuple[Member, News]]:
        for member in list(self._members):
            if member.info is not None and member.pending.poll(grace_s):
                answer = _received(member.pending)  # of the exchange under way
                self.exchange(member, [])
                if isinstance(answer, News):
                    yield member, answer
            self.remove(member)


def _received(pipe: Connection) -> Answer:
    try:
        answer: Answer = pipe.recv()
        return answer
    except (EOFError, ConnectionResetError):
        return Failure(message="its process died")


def _act(root: str, index: int, pipe: Connection, reach: Callable[[str], None]) -> None:
    """An actor's process: news out, leases in. It dies with its driver, as on Ray."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        actor = Actor(Path(root), index, load_engine=load_stand_in, reach=reach)
        pipe.send(actor.load(60.0))
        while True:
            pipe.send(actor.exchange(pipe.recv(), 0.02))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001  as Ray does with whatever an actor raises
        pipe.send(failure_of(error, traceback.format_exc()))
    finally:
        os._exit(0)


def drive(
    root: Path,
    *,
    num_actors: int = 2,
    driver: Callable[[str], None] = nothing,
    actor: Callable[[str], None] = nothing,
    setup: Callable[[], None] = lambda: None,
    retry: bool = False,
    timeout_s: float = 60.0,
) -> int:
    """One run of a job in a process of its own; its exit code, negative where it was killed.

    `retry` opens the complete job for its error rows first.
    """
    process = FORK.Process(target=_drive, args=(root, num_actors, driver, actor, setup, retry))
    process.start()
    process.join(timeout_s)
    assert process.exitcode is not None, "the run does not end"
    return process.exitcode


def begin_drive(root: Path, *, num_actors: int) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=_drive, args=(root, num_actors, nothing, nothing, lambda: None))
    process.start()
    return process


def _drive(
    root: Path,
    num_actors: int,
    driver: Callable[[str], None],
    actor: Callable[[str], None],
    setup: Callable[[], None],
    retry: bool = False,
) -> None:
    setup()
    job = JobDirectory.open(root, reach=driver)

    @contextmanager
    def workplace(_: JobDirectory) -> Iterator[Pool]:
        yield Pool(num_actors, actor)

    with acquire_driver_lock(job) as lock:
        if retry:
            begin_retry(job)
        result = run_job(job, FACTS, Silent(), lock=lock, workplace=workplace)
    os._exit(int(result.exit_code))


def wait_gone(process: multiprocessing.process.BaseProcess, timeout_s: float) -> int:
    end = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < end:
        process.join(0.1)
    assert process.exitcode is not None, "the run does not end"
    return process.exitcode
