"""An actor whose process dies as soon as it is given a certain row."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spot_batch.records.progress import LoadReport
from spot_batch.service.actor import Actor
from spot_batch.service.fleet import RemoteActor

POISON = "hemlock"


class PoisonedActor(Actor):
    def _admit(self) -> None:
        super()._admit()
        if any(POISON in sample.prepared.prompt_text for sample in self._samples.values()):
            os.kill(os.getpid(), signal.SIGKILL)


class PoisonedRemote(RemoteActor):
    def make(self, report: LoadReport) -> PoisonedActor:
        return PoisonedActor(Path(self._out), self._index, report=report)
