"""A driver says that it lives from a thread of its own, however busy it is otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spot_batch.jobdir.driver_lock import DriverLock

logger = logging.getLogger(__name__)

BEAT_S = 10.0


@contextmanager
def beating(lock: DriverLock) -> Iterator[None]:
    """The lock beats while the block runs; a beat that cannot be written is tried again later."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            try:
                lock.beat()
            except OSError as error:
                logger.warning("the driver's sign of life cannot be written: %s", error)

    thread = threading.Thread(target=beat, name="driver-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
