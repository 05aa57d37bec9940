"""One run of a job: leases out, receipts in, actors replaced, parts written, the verdict."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import NamedTuple, Protocol

from spot_batch.checkpoints.registry import load_tokenizer
from spot_batch.inputs.ids import audit_sample_ids
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.check import compare_audits, incomparable_ids
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import DriverLease
from spot_batch.jobdir.events import append_event, write_heartbeat
from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.scan import fault_of_parts, scan
from spot_batch.jobdir.segments import publish_segment
from spot_batch.jobdir.summary import Summary, Totals
from spot_batch.records.lending import Lease, News, Receipt
from spot_batch.records.progress import ActorLoading, Heartbeat, LoadProgress, RunFacts
from spot_batch.records.results import Outcome, Rounds, RowError
from spot_batch.service.actor import ActorInfo
from spot_batch.service.assemble import model_info, sample_preparer
from spot_batch.service.compaction import Compactor
from spot_batch.service.embedded import Machine, embedded_ray
from spot_batch.service.fleet import Answer, Failure, Fleet, Member, num_actors
from spot_batch.service.leases import LeasePool, room_for
from spot_batch.service.progress import (
    ESTIMATE_AFTER,
    Exit,
    Meter,
    ProgressSink,
    State,
    accepted_per_forward,
    describe_seconds,
    forwards_ratio,
    no_space,
)

logger = logging.getLogger(__name__)

POLL_S = 0.5
HEARTBEAT_S = 1.0
BEAT_S = 10.0
STOP_GRACE_S = 30.0
FAIL_EARLY_AFTER = 50
LOADS_THAT_MAY_FAIL = 2
FAILURES_WITHOUT_A_ROW = 3
# Isolating a row that kills its actor halves the suspects at each death.
DEATHS_ALONE_PER_RESTART = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a run of a job ended. `summary` is there once every sample is accounted for."""

    exit_code: int
    message: str
    totals: Totals
    elapsed_s: float
    summary: Summary | None = None


class StopRequest:
    """Whether somebody asked the run to stop, and how."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)


class Crew(Protocol):
    """The actors of a run, wherever they are; `Fleet` says what each call does."""

    num_wanted: int

    @property
    def num_live(self) -> int: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def loading(self) -> tuple[ActorLoading, ...]: ...

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


def run_job(
    job: JobDirectory,
    facts: RunFacts,
    ui: ProgressSink,
    *,
    lease: DriverLease,
    workplace: Callable[[JobDirectory], AbstractContextManager[Workplace]] = on_embedded_ray,
) -> JobResult:
    """Bring a job to its end, or to a stop that the same command resumes.

    `lease` is the job's, held by the caller. A complete job stays as it is where its parts are
    still those that were written; else it is no longer complete, and goes on.
    """
    if job.is_complete:
        complete = _result_of_complete(job)
        if complete is not None:
            return complete
    stop = StopRequest()
    run = _Run(job, facts, ui, lease=lease, stop=stop)
    try:
        with stop_on_signals(stop):
            if run.has_work:
                # Ray puts a handler of its own on SIGTERM: ours goes back on top.
                run.say_starting()
                with workplace(job) as place, stop_on_signals(stop):
                    run.keep_actors_busy(place)
            return run.end()
    except StorageFull as error:
        return run.ended("stopped", Exit.RESUMABLE, no_space(error))
    except KeyboardInterrupt:
        return run.ended("stopped", Exit.RESUMABLE, "interrupted")


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT or SIGTERM asks for a stop; the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if stop:
            raise KeyboardInterrupt
        stop.reason = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Halt(NamedTuple):
    """Why a run ends before its work is done."""

    exit_code: int
    message: str


class _Run:
    """One run of a job: what is durable, what is lent, and the actors that hold it."""

    def __init__(
        self,
        job: JobDirectory,
        facts: RunFacts,
        ui: ProgressSink,
        *,
        lease: DriverLease,
        stop: StopRequest,
    ) -> None:
        self._job = job
        self._facts = facts
        self._ui = ui
        self._lease = lease
        self._stop = stop
        self._halt: _Halt | None = None
        published = scan(job, verify=True)
        self._durable = published.data
        self._audited = published.audits
        self._incomparable = incomparable_ids(job)
        self._audits = self._choose_audits()
        self._pool = LeasePool(
            pending=published.data.gaps(job.num_samples),
            audits=sorted(each for each in self._audits if each not in published.audits),
            deaths_alone=max(1, job.spec.failure.row_attempts - 1),
        )
        self._meter = Meter(published.totals)
        self._num_before = len(published.data)
        self._rounds: dict[int, Rounds] = {}  # of each actor, also of those that died
        self._done_parts = {part.index for part in published.parts}
        self._fleet: Crew | None = None
        self._began_s = time.monotonic()
        self._next_heartbeat_s = self._next_beat_s = 0.0
        self._deaths_s: deque[float] = deque()
        self._num_deaths_alone = 0
        self._num_failed_loads = 0
        self._failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        return not self._pool.done

    def say_starting(self) -> None:
        """Before Ray starts, which takes a while."""
        self._heartbeat("starting", now=True)

    def keep_actors_busy(self, place: Workplace) -> None:
        """Lend, collect, compact, until all is published or somebody or something says stop."""
        self._fleet = fleet = place.crew(self._job, num_pending=self._pool.num_unlent)
        compaction = place.compaction(self._job, done=self._done_parts)
        self._event("started", num_actors=fleet.num_wanted, num_durable=len(self._durable))
        self._heartbeat("starting", now=True)
        self._job.reach("driver.started")
        while self._goes_on() and not self._stop and self._halt is None:
            fleet.start_missing()
            for member, answer in fleet.wait(POLL_S):
                self._take(fleet, member, answer)
            self._record_given_up()
            if not self._pool.done:  # the last parts are written without a process more
                compaction.advance(self._durable)
            self._heartbeat("running" if self._meter.has_started else "starting")
        self._heartbeat("stopping" if self._stop or self._halt else "finishing", now=True)
        for member, answer in fleet.stop(STOP_GRACE_S):
            self._rounds[member.index] = answer.rounds
            self._record(member, answer.receipts)
        compaction.wait()

    def _goes_on(self) -> bool:
        """Whether work is left, audits included that only now turn out to be needed."""
        if self._pool.done:
            self._audit_others()
        return not self._pool.done

    def _choose_audits(self) -> frozenset[int]:
        spec = self._job.spec.equivalence
        return frozenset(
            audit_sample_ids(
                self._job.num_samples,
                fraction=spec.audit_fraction,
                min_rows=spec.min_rows,
                fingerprint=self._job.fingerprint,
                passed_over=self._incomparable,
            )
        )

    def _audit_others(self) -> None:
        """In place of audited samples that turned out to be error rows: the next ones by hash."""
        before, self._incomparable = self._incomparable, incomparable_ids(self._job)
        if len(self._incomparable) == len(before):
            return
        further = self._choose_audits() - self._audits
        self._audits |= further
        self._pool.add_audits([each for each in sorted(further) if each not in self._audited])

    def end(self) -> JobResult:
        """The check, the card and the verdict; or the stop, where work is left."""
        if self._halt is not None:
            state: State = "failed" if self._halt.exit_code == Exit.BUG else "stopped"
            return self.ended(state, self._halt.exit_code, self._halt.message)
        if not self._pool.done:
            return self.ended("stopped", Exit.RESUMABLE, f"stopped by {self._stop.reason}")
        job = self._job
        self._heartbeat("finishing", now=True)
        for part in range(job.num_parts):
            compact(job, part)
        job.reach("driver.compacted")
        check = compare_audits(job)
        job.reach("driver.checked")
        rounds = sum(self._rounds.values(), Rounds())
        facts = replace(
            self._facts,
            elapsed_s=round(time.monotonic() - self._began_s, 3),
            drafted_per_round=round(rounds.budget, 3),
            drafting_share=round(rounds.drafting_share, 4),
        )
        summary = finalize(job, check=check, facts=facts)
        exit_code, message = verdict(job.spec, summary)
        return self.ended("complete", exit_code, message, summary)

    def ended(
        self, state: State, exit_code: int, message: str, summary: Summary | None = None
    ) -> JobResult:
        """Say how it ended: on disk for those who follow, and to the caller."""
        self._fleet = None
        try:
            self._heartbeat(state, now=True, exit_code=exit_code, message=message)
            self._event("ended", state=state, exit_code=exit_code, message=message)
        except StorageFull:
            logger.warning("no space left to note the end of the run")
        return JobResult(
            exit_code=exit_code,
            message=message,
            totals=self._meter.totals if summary is None else summary.totals,
            elapsed_s=time.monotonic() - self._began_s,
            summary=summary,
        )

    # -- what actors say ---------------------------------------------------------------------------

    def _take(self, fleet: Crew, member: Member, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._bury(fleet, member, answer)
            return
        if isinstance(answer, LoadProgress):
            self._note_loading(member, answer)
            fleet.go_on_loading(member)
            return
        if isinstance(answer, ActorInfo):
            self._welcome(fleet, member, answer)
        else:
            member.progress = answer
            self._rounds[member.index] = answer.rounds
            member.num_published += sum(receipt.num_rows for receipt in answer.receipts)
            self._record(member, answer.receipts)
        fleet.exchange(member, self._leases_for(member, fleet.num_wanted))
        self._job.reach("driver.leased")

    def _note_loading(self, member: Member, progress: LoadProgress) -> None:
        """Where it is goes into the heartbeat; only another stage is an event."""
        if member.loading is None or member.loading.stage != progress.stage:
            self._event("actor_loading", actor=member.index, stage=progress.stage)
        member.loading = progress

    def _welcome(self, fleet: Crew, member: Member, info: ActorInfo) -> None:
        member.info = info
        self._meter.started(time.monotonic())
        self._facts = replace(
            self._facts,
            drafter=info.drafter,
            device=info.device,
            num_actors=max(self._facts.num_actors, fleet.num_live),
        )
        self._event(
            "actor_ready",
            actor=info.index,
            pid=info.pid,
            device=info.device,
            load_s=round(info.load_s, 3),
        )

    def _leases_for(self, member: Member, num_wanted: int) -> list[Lease]:
        assert member.info is not None
        room = room_for(
            held=member.progress.num_in_flight + member.progress.num_waiting,
            max_sequences=member.info.max_sequences,
            rows_per_s=member.rows_per_s if member.num_published else None,
            lease_s=self._job.spec.scheduling.lease_seconds,
        )
        return self._pool.fill(member.index, room=room, num_actors=num_wanted)

    def _record(self, member: Member | None, receipts: Sequence[Receipt]) -> None:
        """Published is done, whoever did it."""
        if not receipts:
            return
        self._failures_in_a_row = 0
        before = len(self._durable)
        for receipt in receipts:
            done = self._durable if receipt.purpose == "data" else self._audited
            done.add_many(receipt.sample_ids)
            self._pool.published(receipt.purpose, frozenset(receipt.sample_ids))
            self._event(
                "segment",
                name=receipt.name,
                purpose=receipt.purpose,
                num_rows=receipt.num_rows,
                num_errors=receipt.num_errors,
                actor=member.index if member is not None else None,
            )
            if receipt.purpose == "data":
                self._ui.published(receipt)
        self._meter.add(
            [receipt for receipt in receipts if receipt.purpose == "data"], time.monotonic()
        )
        self._job.reach("driver.recorded")
        if before < len(self._durable):
            self._estimate(before)
            self._stop_if_all_fail()

    def _estimate(self, before: int) -> None:
        """Once, as soon as there are rows enough to say."""
        seen = before - self._num_before
        if seen < ESTIMATE_AFTER <= len(self._durable) - self._num_before:
            eta_s = self._meter.eta_s(self._job.num_samples, time.monotonic())
            if eta_s is not None and len(self._durable) < self._job.num_samples:
                left = self._job.num_samples - len(self._durable)
                self._ui.note(f"estimate: {left:,} rows left, about {describe_seconds(eta_s)}")

    def _stop_if_all_fail(self) -> None:
        here = self._meter.here
        all_failed = here.num_samples >= FAIL_EARLY_AFTER and here.num_errors == here.num_samples
        if all_failed and not self._pool.done:
            codes = ", ".join(f"{code} {count}" for code, count in here.error_codes.items())
            self._halt = _Halt(
                Exit.TOO_MANY_ERRORS,
                f"stopped early: each of the first {here.num_samples} rows failed ({codes}); "
                "`spot-batch validate` shows how the prompts are read",
            )

    # -- what goes wrong ---------------------------------------------------------------------------

    def _bury(self, fleet: Crew, member: Member, failure: Failure) -> None:
        """An actor is gone: its unpublished ids go back, and it is replaced within the budget."""
        loaded, alone = member.info is not None, self._pool.runs_alone(member.index)
        fleet.remove(member)
        published = scan(self._job)  # what it published and could not tell
        self._durable.update(published.data)
        self._audited.update(published.audits)
        self._pool.published("data", published.data)
        self._pool.published("audit", published.audits)
        self._pool.died(member.index)
        self._event(
            "actor_died",
            actor=member.index,
            loaded=loaded,
            alone=alone,
            reason=failure.message,
            detail=failure.detail,
        )
        self._halt = self._halt or self._after_death(failure, loaded=loaded, alone=alone)
        if self._halt is None:
            self._ui.note(f"actor {member.index} died and is replaced: {failure.message}")

    def _after_death(self, failure: Failure, *, loaded: bool, alone: bool) -> _Halt | None:
        if failure.is_full_disk:
            return _Halt(Exit.RESUMABLE, failure.message)
        if not loaded:
            self._num_failed_loads += 1
            if failure.is_refusal:
                return _Halt(Exit.BAD_INPUT, failure.message)
            if self._num_failed_loads >= LOADS_THAT_MAY_FAIL and not self._meter.has_started:
                return _Halt(Exit.BUG, f"no actor could start: {failure.message}\n{failure.detail}")
        if failure.is_exception:
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES_WITHOUT_A_ROW:
                return _Halt(
                    Exit.BUG, f"actors fail again and again: {failure.message}\n{failure.detail}"
                )
        budget = self._job.spec.failure.actor_restarts_per_hour
        if alone:
            self._num_deaths_alone += 1
            if self._num_deaths_alone > max(1, budget) * DEATHS_ALONE_PER_RESTART:
                return _Halt(
                    Exit.RESUMABLE,
                    f"stopped: too many rows kill their actor, last: {failure.message}",
                )
            return None
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - 3600.0:
            self._deaths_s.popleft()
        if len(self._deaths_s) > budget:
            return _Halt(
                Exit.RESUMABLE,
                f"stopped: {len(self._deaths_s)} actors died within an hour "
                f"(failure.actor_restarts_per_hour is {budget}); last: {failure.message}",
            )
        return None

    def _record_given_up(self) -> None:
        """Rows that killed their actor each time they ran alone become error rows."""
        given_up = self._pool.take_given_up()
        sample_ids = [sample_id for purpose, sample_id in given_up if purpose == "data"]
        if sample_ids:
            outcomes = crashed(self._job, sample_ids)
            self._record(None, [publish_segment(self._job, outcomes, actor="driver")])
            self._ui.note(f"{len(sample_ids)} rows crash their actor: set aside as error rows")

    # -- what is said ------------------------------------------------------------------------------

    def _heartbeat(
        self, state: State, *, now: bool = False, exit_code: int | None = None, message: str = ""
    ) -> None:
        now_s = time.monotonic()
        if now_s < self._next_heartbeat_s and not now:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self._lease.beat()
        totals, fleet = self._meter.totals, self._fleet
        rows_per_s, tokens_per_s = self._meter.speeds()
        rounds = sum(self._rounds.values(), Rounds())
        heartbeat = Heartbeat(
            state=state,
            num_samples=self._job.num_samples,
            num_durable=len(self._durable),
            num_in_flight=fleet.num_in_flight if fleet is not None else 0,
            num_errors=totals.num_errors,
            num_audits=len(self._audits),
            num_audited=len(self._audited),
            num_actors=fleet.num_live if fleet is not None else 0,
            num_actors_wanted=fleet.num_wanted if fleet is not None else 0,
            loading=fleet.loading if fleet is not None else (),
            tokens_per_s=tokens_per_s,
            rows_per_s=rows_per_s,
            accepted_per_forward=accepted_per_forward(totals),
            num_forwards_saved=totals.num_draft_free_forwards - totals.num_forwards,
            forwards_ratio=forwards_ratio(totals),
            drafted_per_round=rounds.budget,
            drafting_share=rounds.drafting_share,
            eta_s=self._meter.eta_s(self._job.num_samples, now_s),
            elapsed_s=now_s - self._began_s,
            exit_code=exit_code,
            message=message,
        )
        write_heartbeat(self._job, heartbeat)
        self._ui.update(heartbeat)

    def _event(self, kind: str, **facts: str | int | float | bool | None) -> None:
        append_event(self._job, kind, **facts)


def _result_of_complete(job: JobDirectory) -> JobResult | None:
    """The result that stands in the directory; None, and no `_SUCCESS`, where it is damaged."""
    fault = fault_of_parts(job)
    if fault is None:
        try:
            summary = Summary.read(job.summary_path)
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
            fault = f"{job.summary_path.name}: cannot be read ({error})"
    if fault is not None:
        logger.warning("%s; the job is not complete and goes on", fault)
        job.success.unlink(missing_ok=True)
        return None
    exit_code, _ = verdict(job.spec, summary)
    return JobResult(
        exit_code=exit_code,
        message="complete already",
        totals=summary.totals,
        elapsed_s=0.0,
        summary=summary,
    )


def verdict(spec: JobSpec, summary: Summary) -> tuple[int, str]:
    """(exit code, why) of a job whose every sample is accounted for."""
    check, totals = summary.check, summary.totals
    if check is not None and check.num_differed and spec.equivalence.on_fail == "stop":
        return Exit.CHECK_FAILED, (
            f"the check failed: {check.num_differed} of {check.num_compared} rows differ when "
            "decoded again draft-free; _SUCCESS is withheld"
        )
    share = totals.num_failed / totals.num_samples if totals.num_samples else 0.0
    if share > spec.failure.max_error_fraction:
        return Exit.TOO_MANY_ERRORS, (
            f"{totals.num_failed} of {totals.num_samples} rows failed "
            f"(failure.max_error_fraction is {spec.failure.max_error_fraction:g}): see errors/"
        )
    return Exit.COMPLETE, "complete"


def crashed(job: JobDirectory, sample_ids: Sequence[int]) -> list[Outcome]:
    """Error rows for samples that killed their actor each time they ran alone."""
    info = model_info(job.spec)
    preparer = sample_preparer(job.spec, job.pinned, info, load_tokenizer(info.path))
    error = RowError(
        code="actor_crash",
        stage="decode",
        message="the actor's process died each time this sample ran alone",
        attempts=job.spec.failure.row_attempts,
    )
    return [prepared.outcome(error) for prepared in preparer.prepare(sample_ids)]
