"""One run of a job: leases out, receipts in, actors replaced, parts written, the verdict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.prepare import unprepared
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.jobdir.check import compare_audits
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import DriverLock
from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.scan import fault_of_parts
from spot_batch.jobdir.segments import publish_segment
from spot_batch.jobdir.summary import Summary, Totals
from spot_batch.records.lending import Lease, News, Receipt
from spot_batch.records.progress import LoadProgress, RunFacts
from spot_batch.records.results import Outcome, RowError
from spot_batch.service.actor import ActorInfo
from spot_batch.service.beating import beating
from spot_batch.service.chronicle import Chronicle
from spot_batch.service.deaths import Death, Failure, verdict_after
from spot_batch.service.fleet import Answer, Member
from spot_batch.service.leases import room_for
from spot_batch.service.ledger import Ledger
from spot_batch.service.progress import Exit, ProgressSink, State, no_space
from spot_batch.service.signs import Patience
from spot_batch.service.stopping import StopRequest, stop_on_signals
from spot_batch.service.verdict import Verdict, verdict_at_end
from spot_batch.service.workplace import Crew, Workplace, on_embedded_ray

logger = logging.getLogger(__name__)

POLL_S = 0.5
STOP_GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a run of a job ended. `summary` is there once every sample is accounted for."""

    exit_code: int
    message: str
    totals: Totals
    elapsed_s: float
    summary: Summary | None = None


def run_job(
    job: JobDirectory,
    facts: RunFacts,
    ui: ProgressSink,
    *,
    lock: DriverLock,
    workplace: Callable[[JobDirectory], AbstractContextManager[Workplace]] = on_embedded_ray,
) -> JobResult:
    """Bring a job to its end, or to a stop that the same command resumes.

    `lock` is the job's, held by the caller. A complete job stays as it is where its parts are
    still those that were written; else it is no longer complete, and goes on.
    """
    complete = result_of_complete(job)
    if complete is not None:
        return complete
    with beating(lock):
        run = _Run(job, facts, ui)
        try:
            with stop_on_signals(run.stop):
                if run.has_work:
                    run.say("starting")  # Ray takes a while
                    # It puts a handler of its own on SIGTERM: ours goes back on top.
                    with workplace(job) as place, stop_on_signals(run.stop):
                        run.keep_actors_busy(place)
                return run.end()
        except StorageFull as error:
            return run.ended("stopped", Verdict(Exit.RESUMABLE, no_space(error)))
        except KeyboardInterrupt:
            return run.ended("stopped", Verdict(Exit.RESUMABLE, "interrupted"))


class _Run:
    """One run of a job, from the books that it opens to the verdict."""

    def __init__(self, job: JobDirectory, facts: RunFacts, ui: ProgressSink) -> None:
        self.stop = StopRequest()
        self._job = job
        self._facts = facts
        self._patience = Patience.of(job.spec)
        self._ledger = Ledger(job)
        self._chronicle = Chronicle(job, ui, self._ledger)
        self._deaths: list[Death] = []
        self._halt: Verdict | None = None

    @property
    def has_work(self) -> bool:
        return not self._ledger.is_done

    def say(self, state: State, *, now: bool = True) -> None:
        self._chronicle.heartbeat(state, now=now)

    def keep_actors_busy(self, place: Workplace) -> None:
        """Lend, collect, compact, until all is published or somebody or something says stop."""
        crew = place.crew(self._job, num_pending=self._ledger.num_unlent)
        compaction = place.compaction(self._job, done=self._ledger.done_parts)
        self._chronicle.started(crew)
        self._job.reach("driver.started")
        while self._ledger.has_work() and not self.stop and self._halt is None:
            crew.start_missing()
            for member, answer in crew.wait(POLL_S):
                self._hear(crew, member, answer)
                if isinstance(answer, LoadProgress):
                    crew.go_on_loading(member)
                elif not isinstance(answer, Failure):
                    crew.exchange(member, self._leases_for(member, crew))
                    self._job.reach("driver.leased")
            self._bury_the_silent(crew)
            if crew.num_live == 0 and crew.is_lost:
                self._halt = self._halt or Verdict(Exit.RESUMABLE, "stopped: Ray itself has died")
            self._set_aside_given_up()
            if not self._ledger.is_done:  # the last parts are written without a process more
                compaction.advance(self._ledger.durable)
            self.say("running" if self._chronicle.meter.has_started else "starting", now=False)
        self.say("stopping" if self.stop or self._halt else "finishing")
        for member, news in crew.stop(STOP_GRACE_S):
            self._hear(crew, member, news)
        compaction.wait()

    def end(self) -> JobResult:
        """The check, the card and the verdict; or the stop, where work is left."""
        if self._halt is not None:
            return self.ended(
                "failed" if self._halt.exit_code == Exit.BUG else "stopped", self._halt
            )
        if self.has_work:
            return self.ended("stopped", Verdict(Exit.RESUMABLE, f"stopped by {self.stop.reason}"))
        job = self._job
        try:
            check_unchanged(job.pinned)
        except InputError as error:
            return self.ended("stopped", Verdict(Exit.BAD_INPUT, str(error)))
        self.say("finishing")
        for part in range(job.num_parts):
            compact(job, part)
        job.reach("driver.compacted")
        compared = compare_audits(job)
        job.reach("driver.checked")
        rounds = self._chronicle.all_rounds
        facts = replace(
            self._facts,
            elapsed_s=round(self._chronicle.elapsed_s, 3),
            drafted_per_round=round(rounds.budget, 3),
            drafting_share=round(rounds.drafting_share, 4),
        )
        summary = finalize(job, check=compared.check, facts=facts, verified=compared.verified)
        return self.ended("complete", verdict_at_end(job.spec, summary), summary)

    def ended(self, state: State, verdict: Verdict, summary: Summary | None = None) -> JobResult:
        """Say how it ended: on disk for those who follow, and to the caller."""
        self._chronicle.ended(state, verdict)
        return JobResult(
            exit_code=verdict.exit_code,
            message=verdict.message,
            totals=self._chronicle.meter.totals if summary is None else summary.totals,
            elapsed_s=self._chronicle.elapsed_s,
            summary=summary,
        )

    # -- what actors say ---------------------------------------------------------------------------

    def _hear(self, crew: Crew, member: Member, answer: Answer) -> None:
        if isinstance(answer, Failure):
            self._bury(crew, member, answer)
        elif isinstance(answer, LoadProgress):
            member.signs.loading(time.monotonic())
            self._chronicle.loading(member, answer)
        elif isinstance(answer, ActorInfo):
            self._welcome(crew, member, answer)
        else:
            self._note(member, answer)

    def _welcome(self, crew: Crew, member: Member, info: ActorInfo) -> None:
        member.info = info
        member.signs.ready(time.monotonic())
        self._facts = replace(
            self._facts,
            drafter=info.drafter,
            device=info.device,
            num_actors=max(self._facts.num_actors, crew.num_live),
        )
        self._chronicle.ready(info)

    def _note(self, member: Member, news: News) -> None:
        member.news = news
        member.signs.heard(news, time.monotonic())
        member.num_published += sum(receipt.num_rows for receipt in news.receipts)
        self._chronicle.rounds[member.index] = news.rounds
        self._record(news.receipts, actor=member.index)

    def _record(self, receipts: Sequence[Receipt], *, actor: int | None) -> None:
        if not receipts:
            return
        self._ledger.settle(receipts)
        self._chronicle.published(receipts, actor=actor)
        self._job.reach("driver.recorded")
        self._halt = self._halt or self._ledger.early_verdict()

    def _leases_for(self, member: Member, crew: Crew) -> list[Lease]:
        assert member.info is not None
        room = room_for(
            held=member.news.num_in_flight + member.news.num_waiting,
            max_sequences=member.info.max_sequences,
            rows_per_s=member.rows_per_s if member.num_published else None,
            lease_s=self._job.spec.scheduling.lease_seconds,
        )
        # Those that only were asked for may never come: they get no share of the end.
        num_actors = max(1, crew.num_live + len(crew.loading))
        return self._ledger.lend(member.index, room=room, num_actors=num_actors)

    # -- what goes wrong ---------------------------------------------------------------------------

    def _bury(self, crew: Crew, member: Member, failure: Failure) -> None:
        """An actor is gone: its unpublished ids go back, and it is replaced or the run ends."""
        death = Death(
            failure=failure,
            at_s=time.monotonic(),
            loaded=member.info is not None,
            alone=self._ledger.runs_alone(member.index),
            num_rows=self._ledger.num_here,
        )
        crew.remove(member)
        self._ledger.take_back(member.index)
        self._deaths.append(death)
        self._halt = self._halt or verdict_after(
            self._deaths,
            restarts_per_hour=self._job.spec.failure.actor_restarts_per_hour,
            any_ready=self._chronicle.meter.has_started,
        )
        self._chronicle.died(member.index, death, is_replaced=self._halt is None)

    def _bury_the_silent(self, crew: Crew) -> None:
        """Actors that answer no more, or get nothing done, are lost: others do what they held."""
        now_s = time.monotonic()
        for member in crew.members:
            fault = member.signs.fault(self._patience, now_s)
            if fault is not None:
                self._bury(crew, member, Failure(message=fault))

    def _set_aside_given_up(self) -> None:
        """Rows that killed their actor each time they ran alone become error rows."""
        sample_ids = self._ledger.take_given_up()
        if sample_ids:
            outcomes = crashed(self._job, sample_ids)
            self._record([publish_segment(self._job, outcomes, actor="driver")], actor=None)
            self._chronicle.given_up(len(sample_ids))


def result_of_complete(job: JobDirectory) -> JobResult | None:
    """The result that stands in the directory; None, and no `_SUCCESS`, where it is damaged."""
    if not job.is_complete:
        return None
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
    return JobResult(
        exit_code=verdict_at_end(job.spec, summary).exit_code,
        message="complete already",
        totals=summary.totals,
        elapsed_s=0.0,
        summary=summary,
    )


def crashed(job: JobDirectory, sample_ids: Sequence[int]) -> list[Outcome]:
    """Error rows for samples that killed their actor each time they ran alone."""
    error = RowError(
        code="actor_crash",
        stage="decode",
        message="its actor died, or got nothing done, each time this sample ran alone",
        attempts=job.spec.failure.row_attempts,
    )
    reader = InputReader(job.pinned)
    failed = unprepared(job.spec, job.pinned, reader, sample_ids, error)
    return [sample.outcome(sample.error or error) for sample in failed]
