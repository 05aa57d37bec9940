"""An actor: one engine on one device. Leases go in, published segments come out.

A plain class without ray: its calls may come from any thread while the engine's own thread decodes,
so that leases overlap in one batch.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spot_batch.jobdir.checkpoints import Checkpoints
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import Reach, StorageFull, unhindered
from spot_batch.jobdir.segments import publish_segment
from spot_batch.models.device import choose_device
from spot_batch.records.lending import Lease, News, Purpose, Receipt
from spot_batch.records.progress import LoadProgress
from spot_batch.records.results import Ended, NotFinite, Outcome, RowError
from spot_batch.service.assemble import EngineLoader, engine_settings, load_engine
from spot_batch.service.intake import Intake, Owed

logger = logging.getLogger(__name__)
# Samples prepared and waiting in the engine, beside those in flight: all that an actor is lent, so
# that the longest of them go first and the last ones to fly are short.
READY_SHARE = 1.0
# An actor that holds fewer samples than so many times its slots says so, once a lease.
SHORT_SHARE = 1.5
# The first rows are published early: a person waits to see them.
FIRST_ROWS = 3
IDLE_WAIT_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorInfo:
    """What an actor is once its models are loaded."""

    index: int
    pid: int
    device: str
    max_sequences: int
    drafter: str
    load_s: float


class Actor:
    """One engine on a thread of its own: it loads a job's target and drafter, then decodes what the
    intake's thread has prepared.

    `load_engine` and `reach` are for tests: another engine, and a call at each step of publication.
    """

    def __init__(
        self,
        out: Path | str,
        index: int,
        *,
        device: str = "auto",
        load_engine: EngineLoader = load_engine,
        reach: Reach = unhindered,
    ) -> None:
        self._out, self._index, self._name = Path(out), index, f"actor-{index}"
        self._device, self._load_engine, self._reach = device, load_engine, reach
        self._info: ActorInfo | None = None
        self._load_progress = LoadProgress("checking")
        self._in_engine: dict[int, Owed] = {}
        self._finished: dict[Purpose, list[Outcome]] = {"data": [], "audit": []}
        self._receipts: list[Receipt] = []
        self._num_steps = 0
        self._has_published = False
        self._stopping = False
        self._runs_short, self._has_asked = False, True
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._intake = Intake(self._changed)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def load(self, timeout_s: float) -> ActorInfo | LoadProgress:
        """What the actor is, or how far it has come with loading when the time is up.

        Raises what loading raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._info or self._failure, timeout=timeout_s)
            if self._failure is not None:
                raise self._failure
            return self._info or self._load_progress

    def exchange(self, leases: Sequence[Lease], timeout_s: float) -> News:
        """Leases in, news out: one call, so that what is answered always counts what was lent.

        It waits for something to be published, or for samples to run short, until the time is up.
        Raises what ended the engine's thread, if anything did.
        """
        with self._changed:
            for lease in leases:
                self._intake.offer(lease)
                self._has_asked = False
            self._changed.wait_for(
                lambda: (
                    self._receipts
                    or self._runs_short
                    or self._failure
                    or not self._thread.is_alive()
                ),
                timeout=timeout_s,
            )
            self._runs_short = False
            receipts, self._receipts = tuple(self._receipts), []
            if self._failure is not None and not receipts:
                raise self._failure
            return self._news(receipts)

    def stop(self) -> News:
        """Publish what is finished and end the thread; samples in flight are given up."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        return self.exchange((), 0.0)

    def _news(self, receipts: Sequence[Receipt]) -> News:
        if self._info is None:
            return News(receipts=receipts)
        num_owed, num_active = self._intake.num_owed, self._engine.num_active
        return News(
            receipts=receipts,
            num_in_flight=num_active,
            num_waiting=max(0, num_owed - num_active),
            num_prepared=self._intake.num_prepared,
            num_steps=self._num_steps,
            elapsed_s=time.monotonic() - self._started_s,
            rounds=self._engine.rounds,
        )

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._load()
            while not self._stopping:
                self._admit()
                if self._engine.has_work:
                    for ended in self._engine.step():
                        self._complete(ended)
                    self._num_steps += 1
                self._ask_if_short()
                self._publish_if_due()
                self._checkpoint_if_due()
                self._wait_for_work()
            self._publish()
            self._checkpoint()
        except BaseException as error:  # handed to whoever asks for news
            logger.exception("%s: the engine stopped", self._name)
            if not isinstance(error, StorageFull):
                self._rescue()
            with self._changed:
                self._failure = error
        self._intake.end()

    def _load(self) -> None:
        began_s = time.monotonic()
        self._job = JobDirectory.open(self._out, reach=self._reach)
        spec = self._job.spec
        torch.set_num_threads(spec.resources.num_threads)  # OpenMP counts by thread
        device = choose_device(self._device)
        loaded = self._load_engine(self._job, device, self._note)
        self._engine, self._text, self._too_large = loaded.engine, loaded.text, loaded.too_large
        self._max_sequences = engine_settings(spec, device).max_sequences
        # A trajectory is recorded from its beginning or not at all.
        self._checkpoint_s = (
            math.inf if "trajectory" in spec.output.include else spec.scheduling.checkpoint_seconds
        )
        self._checkpoints = Checkpoints(self._job)
        self._publish_s = spec.scheduling.publish_seconds
        most = int(self._max_sequences * (1 + READY_SHARE))
        self._intake.start(self._job, loaded, at_once=self._max_sequences, most=most)
        self._started_s = self._last_publish_s = self._last_checkpoint_s = time.monotonic()
        with self._changed:
            self._info = ActorInfo(
                index=self._index,
                pid=os.getpid(),
                device=str(device),
                max_sequences=self._max_sequences,
                drafter=loaded.drafter,
                load_s=self._started_s - began_s,
            )
            self._changed.notify_all()

    def _note(self, progress: LoadProgress) -> None:
        self._load_progress = progress

    def _admit(self) -> None:
        """Give the engine what has been prepared; what cannot be decoded is finished at once."""
        taken = self._intake.take()
        for owed in taken:
            error, request = owed.prepared.error, owed.prepared.request
            if request is not None:
                too_large = self._too_large(request)
                if too_large is not None:
                    error = RowError(code="oom", stage="decode", message=too_large)
            if error is not None:
                self._finish(owed, owed.prepared.outcome(error))
            elif request is not None:
                self._in_engine[request.sample_id] = owed
                self._engine.add(request)
        if taken:
            self._job.reach("actor.admitted")

    def _complete(self, ended: Ended) -> None:
        owed = self._in_engine.pop(ended.sample_id)
        if isinstance(ended, NotFinite):
            self._finish(owed, owed.prepared.outcome(ended.error()))
            return
        text = ended.text if ended.text is not None else self._text(ended.token_ids)
        self._finish(owed, owed.prepared.outcome(ended, text))

    def _finish(self, owed: Owed, outcome: Outcome) -> None:
        self._finished[owed.purpose].append(outcome)
        self._intake.finished(outcome.sample_id)
        self._job.reach("actor.finished")

    def _ask_if_short(self) -> None:
        """Wake whoever waits to lend more; once, for there may be nothing more to lend."""
        if not self._has_asked and runs_short(self._intake.num_owed, self._max_sequences):
            with self._changed:
                self._has_asked = self._runs_short = True
                self._changed.notify_all()

    def _rescue(self) -> None:
        """Publish what was finished before the engine failed, as far as that can be done."""
        try:
            self._publish()
        except Exception:
            logger.exception("%s: finished samples are lost with the engine", self._name)

    def _publish_if_due(self) -> None:
        idle = not self._intake.num_owed
        late = time.monotonic() - self._last_publish_s >= self._publish_s
        first = not self._has_published and len(self._finished["data"]) >= FIRST_ROWS
        if idle or late or first:
            self._publish()

    def _publish(self) -> None:
        receipts = []
        for purpose, outcomes in self._finished.items():
            if outcomes:
                receipts.append(
                    publish_segment(self._job, outcomes, purpose=purpose, actor=self._name)
                )
                self._finished[purpose] = []
        if receipts:
            self._last_publish_s = time.monotonic()
            self._has_published = True
            with self._changed:
                self._receipts += receipts
                self._changed.notify_all()
            self._job.reach("actor.published")

    def _checkpoint_if_due(self) -> None:
        if time.monotonic() - self._last_checkpoint_s >= self._checkpoint_s:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Whole blocks of what is in flight, for whoever goes on with it."""
        if self._checkpoint_s < math.inf:
            self._checkpoints.write(self._engine.begun())
        self._last_checkpoint_s = time.monotonic()

    def _wait_for_work(self) -> None:
        if self._engine.has_work:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._intake.is_ready or self._stopping, timeout=IDLE_WAIT_S
            )


def runs_short(num_owed: int, max_sequences: int) -> bool:
    """Whether an actor that owes so many samples should be lent more before it starves."""
    return num_owed <= SHORT_SHARE * max_sequences
