"""An actor whose process dies as soon as it is given a certain row."""

from __future__ import annotations

import os
import signal

from spot_batch.service.actor import Actor

POISON = "hemlock"


class PoisonedActor(Actor):
    def _admit(self) -> None:
        super()._admit()
        if any(POISON in owed.prepared.prompt_text for owed in self._in_engine.values()):
            os.kill(os.getpid(), signal.SIGKILL)
