"""What a run says of itself: events and heartbeats in the directory, lines for whoever watches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.events import append_event, write_heartbeat
from spot_batch.jobdir.files import StorageFull
from spot_batch.records.lending import Receipt
from spot_batch.records.progress import Heartbeat, LoadProgress, SilentActor
from spot_batch.records.results import Rounds
from spot_batch.service.actor import ActorInfo
from spot_batch.service.deaths import Death
from spot_batch.service.fleet import Member
from spot_batch.service.ledger import Ledger
from spot_batch.service.progress import (
    ESTIMATE_AFTER,
    Meter,
    ProgressSink,
    State,
    accepted_per_forward,
    describe_seconds,
    forwards_ratio,
)
from spot_batch.service.signs import SHOWN_AFTER_S
from spot_batch.service.verdict import Verdict
from spot_batch.service.workplace import Crew

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class Chronicle:
    """Tells how a run goes. `crew` is set while there is one; `rounds` are those of each actor,
    also of those that died."""

    def __init__(self, job: JobDirectory, ui: ProgressSink, ledger: Ledger) -> None:
        self.meter = Meter(ledger.before)
        self.crew: Crew | None = None
        self.rounds: dict[int, Rounds] = {}
        self._job = job
        self._ui = ui
        self._ledger = ledger
        self._began_s = time.monotonic()
        self._next_heartbeat_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def all_rounds(self) -> Rounds:
        return sum(self.rounds.values(), Rounds())

    # -- events ------------------------------------------------------------------------------------

    def started(self, crew: Crew) -> None:
        """The run has a crew; nobody of it is ready yet."""
        self.crew = crew
        self._event("started", num_actors=crew.num_wanted, num_durable=len(self._ledger.durable))
        self.heartbeat("starting", now=True)

    def loading(self, member: Member, progress: LoadProgress) -> None:
        """Where an actor is goes into the heartbeat; only another stage is an event."""
        if member.loading is None or member.loading.stage != progress.stage:
            self._event("actor_loading", actor=member.index, stage=progress.stage)
        member.loading = progress

    def ready(self, info: ActorInfo) -> None:
        self.meter.started(time.monotonic())
        self._event(
            "actor_ready",
            actor=info.index,
            pid=info.pid,
            device=info.device,
            load_s=round(info.load_s, 3),
        )

    def published(self, receipts: Sequence[Receipt], *, actor: int | None) -> None:
        """Segments are durable; `actor` is None where the driver wrote them."""
        data = [receipt for receipt in receipts if receipt.purpose == "data"]
        for receipt in receipts:
            self._event(
                "segment",
                name=receipt.name,
                purpose=receipt.purpose,
                num_rows=receipt.num_rows,
                num_errors=receipt.num_errors,
                actor=actor,
            )
        for receipt in data:
            self._ui.published(receipt)
        self.meter.add(data, time.monotonic())
        self._estimate(sum(receipt.num_rows for receipt in data))

    def died(self, actor: int, death: Death, *, is_replaced: bool) -> None:
        self._event(
            "actor_died",
            actor=actor,
            loaded=death.loaded,
            alone=death.alone,
            reason=death.failure.message,
            detail=death.failure.detail,
        )
        if is_replaced:
            self._ui.note(f"actor {actor} died and is replaced: {death.failure.message}")

    def given_up(self, num_rows: int) -> None:
        self._ui.note(f"{num_rows} rows crash their actor: set aside as error rows")

    def ended(self, state: State, verdict: Verdict) -> None:
        """The last word, on disk for those who follow."""
        self.crew = None
        exit_code, message = verdict
        try:
            self.heartbeat(state, now=True, verdict=verdict)
            self._event("ended", state=state, exit_code=exit_code, message=message)
        except StorageFull:
            logger.warning("no space left to note the end of the run")

    # -- heartbeats --------------------------------------------------------------------------------

    def heartbeat(self, state: State, *, now: bool = False, verdict: Verdict | None = None) -> None:
        """How far the run is, at most once a second unless it must be said `now`."""
        now_s = time.monotonic()
        if now_s < self._next_heartbeat_s and not now:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        heartbeat = self._how_far(state, now_s, verdict)
        write_heartbeat(self._job, heartbeat)
        self._ui.update(heartbeat)

    def _how_far(self, state: State, now_s: float, verdict: Verdict | None) -> Heartbeat:
        ledger, totals, crew, rounds = self._ledger, self.meter.totals, self.crew, self.all_rounds
        rows_per_s, tokens_per_s = self.meter.speeds()
        return Heartbeat(
            state=state,
            num_samples=self._job.num_samples,
            num_durable=len(ledger.durable),
            num_in_flight=crew.num_in_flight if crew is not None else 0,
            num_errors=totals.num_errors,
            num_audits=len(ledger.audits),
            num_audited=len(ledger.audited),
            num_actors=crew.num_live if crew is not None else 0,
            num_actors_wanted=crew.num_wanted if crew is not None else 0,
            loading=crew.loading if crew is not None else (),
            silent=_silent(crew.members, now_s) if crew is not None else (),
            tokens_per_s=tokens_per_s,
            rows_per_s=rows_per_s,
            accepted_per_forward=accepted_per_forward(totals),
            num_forwards_saved=totals.num_draft_free_forwards - totals.num_forwards,
            forwards_ratio=forwards_ratio(totals),
            drafted_per_round=rounds.budget,
            drafting_share=rounds.drafting_share,
            eta_s=self.meter.eta_s(self._job.num_samples, now_s),
            elapsed_s=now_s - self._began_s,
            exit_code=verdict.exit_code if verdict is not None else None,
            message=verdict.message if verdict is not None else "",
        )

    def _estimate(self, num_new: int) -> None:
        """Once, as soon as there are rows enough to say."""
        here = self._ledger.num_here
        if here - num_new < ESTIMATE_AFTER <= here and self._ledger.num_left:
            eta_s = self.meter.eta_s(self._job.num_samples, time.monotonic())
            if eta_s is not None:
                self._ui.note(
                    f"estimate: {self._ledger.num_left:,} rows left, "
                    f"about {describe_seconds(eta_s)}"
                )

    def _event(self, kind: str, **facts: str | int | float | bool | None) -> None:
        append_event(self._job, kind, **facts)


def _silent(members: Sequence[Member], now_s: float) -> tuple[SilentActor, ...]:
    silent = [SilentActor(each.index, round(each.signs.silent_s(now_s), 1)) for each in members]
    return tuple(each for each in silent if each.seconds > SHOWN_AFTER_S)
