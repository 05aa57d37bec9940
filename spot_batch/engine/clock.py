"""How long a device takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds that what was asked of a device has taken, this thread's own if it can be told."""
    if device.type != "cpu":

        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronised
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch:
    """A `with` block whose `seconds` are those that a device took for it. On a GPU nobody waits for
    them: they are read when something else has waited. `clock` is read instead if it is given."""

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or device_clock(device)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and clock is None:
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._begin_s = self._end_s = 0.0

    def __enter__(self) -> None:
        if self._events is not None:
            self._events[0].record()
        else:
            self._begin_s = self._clock()

    def __exit__(self, *raised: object) -> None:
        if self._events is not None:
            self._events[1].record()
        else:
            self._end_s = self._clock()

    @property
    def seconds(self) -> float:
        """Of the last block."""
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._end_s - self._begin_s
