"""What an actor was lent becomes requests, on a thread of its own while the engine decodes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.prepare import PreparedSample, unprepared
from spot_batch.inputs.reader import InputReader
from spot_batch.jobdir.checkpoints import Checkpoints
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.records.lending import Lease, Purpose
from spot_batch.records.results import RowError
from spot_batch.service.assemble import Loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owed:
    """A prepared sample and what it is for."""

    purpose: Purpose
    prepared: PreparedSample


class Intake:
    """Samples lent and not finished. They are prepared in the order lent, `most` of them held at a
    time; one that is held for its other purpose waits until that is finished.

    `changed` is notified when samples are ready, and guards what several threads see. A fault of
    one sample is that sample's error; what the reader itself raises comes out of `take`.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._queue: deque[tuple[Purpose, int]] = deque()
        self._begun: set[int] = set()
        self._held: set[int] = set()
        self._ready: deque[Owed] = deque()
        self._most = 0
        self.num_prepared = 0
        self._ended = False
        self._failure: Exception | None = None

    @property
    def num_owed(self) -> int:
        """Samples that were lent and are not finished, prepared or not."""
        return len(self._queue) + len(self._held)

    @property
    def is_ready(self) -> bool:
        return bool(self._ready) or self._failure is not None

    def offer(self, lease: Lease) -> None:
        with self._changed:
            self._queue.extend((lease.purpose, sample_id) for sample_id in lease.sample_ids)
            self._begun.update(lease.begun)
            self._changed.notify_all()

    def start(self, job: JobDirectory, loaded: Loaded, *, at_once: int, most: int) -> None:
        """Begin to prepare, `at_once` samples in one go."""
        self._job, self._loaded = job, loaded
        self._checkpoints = Checkpoints(job)
        self._at_once, self._most = at_once, most
        threading.Thread(target=self._run, name="intake", daemon=True).start()

    def take(self) -> list[Owed]:
        """All that is ready."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            ready = list(self._ready)
            self._ready.clear()
            return ready

    def finished(self, sample_id: int) -> None:
        """A sample is held no longer: there is room for another."""
        with self._changed:
            self._held.remove(sample_id)
            self._changed.notify_all()

    def end(self) -> None:
        """Prepare nothing more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- its own thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while batch := self._next():
                for purpose in ("data", "audit"):
                    ids = [sample_id for kind, sample_id in batch if kind == purpose]
                    if ids:
                        self._hand_out(purpose, ids)
        except Exception as error:  # raised again where the engine's thread takes
            logger.exception("no sample can be prepared")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next(self) -> list[tuple[Purpose, int]]:
        """The next samples to prepare, once there are any and there is room; none at the end."""
        with self._changed:
            batch: list[tuple[Purpose, int]] = []
            while not self._ended:
                batch = self._from_queue(min(self._at_once, self._most - len(self._held)))
                if batch:
                    break
                self._changed.wait()
            return batch

    def _from_queue(self, room: int) -> list[tuple[Purpose, int]]:
        taken: list[tuple[Purpose, int]] = []
        waits: list[tuple[Purpose, int]] = []
        while self._queue and len(taken) < room:
            purpose, sample_id = self._queue.popleft()
            if sample_id in self._held:
                waits.append((purpose, sample_id))
            else:
                self._held.add(sample_id)
                taken.append((purpose, sample_id))
        self._queue.extendleft(reversed(waits))
        return taken

    def _hand_out(self, purpose: Purpose, sample_ids: Sequence[int]) -> None:
        prepared = self._prepared(sample_ids, draft_free=purpose == "audit")
        begun = {}
        if purpose == "data":
            begun = self._checkpoints.find([each for each in sample_ids if each in self._begun])
        owed = [
            Owed(purpose, replace(each, request=replace(each.request, begun=begun[each.sample_id])))
            if each.request is not None and each.sample_id in begun
            else Owed(purpose, each)
            for each in prepared
        ]
        self._job.reach("actor.prepared")
        with self._changed:
            self._ready.extend(owed)
            self.num_prepared += len(owed)
            self._changed.notify_all()

    def _prepared(self, sample_ids: Sequence[int], *, draft_free: bool) -> list[PreparedSample]:
        """Each sample as it can be prepared: what one of them raises costs no other its place."""
        try:
            return self._loaded.preparer.prepare(sample_ids, draft_free=draft_free)
        except (InputError, OSError):  # the input or the machine: no fault of a row
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the row has brought it about
            middle = len(sample_ids) // 2
            if middle:
                halves = (sample_ids[:middle], sample_ids[middle:])
                return [
                    each for half in halves for each in self._prepared(half, draft_free=draft_free)
                ]
            return unprepared(
                self._job.spec,
                self._job.pinned,
                InputReader(self._job.pinned),
                sample_ids,
                _error_of(error),
            )


def _error_of(error: Exception) -> RowError:
    """What is written of a sample whose preparation raised what nobody foresaw."""
    code = "oom" if isinstance(error, MemoryError) else "bad_prompt"
    return RowError(code=code, stage="prompt", message=f"it cannot be prepared: {error!r}")
