"""An actor that loads no faster than the driver asks how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from spot_batch.records.lending import Lease, News
from spot_batch.records.progress import LoadProgress
from spot_batch.service.actor import Actor, ActorInfo

NUM_ACTORS = 2
PATIENCE_S = 60.0


class WatchedActor(Actor):
    def __init__(self, out: str, index: int) -> None:
        self._num_asked = 0
        self._asked = threading.Condition()
        super().__init__(out, index)

    def load(self, timeout_s: float) -> ActorInfo | LoadProgress:
        answer = super().load(timeout_s)
        with self._asked:
            self._num_asked += 1
            self._asked.notify_all()
        return answer

    def exchange(self, leases: Sequence[Lease], timeout_s: float) -> News:
        """Nothing is decoded before all have loaded: one alone could end the job meanwhile."""
        (self._out.parent / f"loaded-{self._index}").touch()
        end_s = time.monotonic() + PATIENCE_S
        while len(list(self._out.parent.glob("loaded-*"))) < NUM_ACTORS:
            assert time.monotonic() < end_s, "the other actor has not loaded"
            time.sleep(0.02)
        return super().exchange(leases, timeout_s)

    def _note(self, progress: LoadProgress) -> None:
        super()._note(progress)
        with self._asked:
            enough = self._num_asked + 3  # some may be on their way with what was before
            assert self._asked.wait_for(lambda: self._num_asked >= enough, PATIENCE_S)
