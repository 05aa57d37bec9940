"""How a person stops a run: the first signal asks for it, the second does not wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked the run to stop, and how."""

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGINT or SIGTERM asks for a stop; the second raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if stop:
            raise KeyboardInterrupt
        stop.reason = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
