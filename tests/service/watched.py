"""An actor that loads no faster than the driver asks how far it is."""

from __future__ import annotations

import threading

from spot_batch.records.progress import LoadProgress
from spot_batch.service.actor import Actor, ActorInfo

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

    def _note(self, progress: LoadProgress) -> None:
        super()._note(progress)
        with self._asked:
            enough = self._num_asked + 3  # some may be on their way with what was before
            assert self._asked.wait_for(lambda: self._num_asked >= enough, PATIENCE_S)
