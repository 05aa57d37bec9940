"""An actor that loads no faster than the driver asks how far it is."""

from __future__ import annotations

import threading

from spot_batch.records.progress import LoadProgress, LoadReport
from spot_batch.service.actor import Actor, ActorInfo
from spot_batch.service.fleet import RemoteActor

PATIENCE_S = 60.0


class WatchedRemote(RemoteActor):
    def __init__(self, out: str, index: int) -> None:
        super().__init__(out, index)
        self._num_asked = 0
        self._asked = threading.Condition()

    def load(self, timeout_s: float) -> ActorInfo | LoadProgress:
        answer = super().load(timeout_s)
        with self._asked:
            self._num_asked += 1
            self._asked.notify_all()
        return answer

    def make(self, report: LoadReport) -> Actor:
        def told(progress: LoadProgress) -> None:
            report(progress)
            with self._asked:
                enough = self._num_asked + 3  # some may be on their way with what was before
                assert self._asked.wait_for(lambda: self._num_asked >= enough, PATIENCE_S)

        return super().make(told)
