"""What a round costs on a device: seconds of a forward, of a drafting wave and of a visited state.

The curve of a device is a staircase whose steps no formula knows (algorithms.md G.1), so it is
measured, in a few seconds, on the device that decodes. It decides speed alone, never an output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spot_batch.checkpoints.shapes import padded_length
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import StaleStore
from spot_batch.engine.drafting import Root, grow
from spot_batch.engine.transition import Rule, States, transition
from spot_batch.models.device import onto, to_host
from spot_batch.models.slots import PrefixCache, SlotBatch, Target
from spot_batch.records.sampling import SamplingParams

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Slots of a forward that are measured; on a GPU also the sizes that graphs are captured for."""

_MOST_SWEEPS = 9
_MOST_QUERIES = 16
_FORWARD_SHARE = 0.75
"""Of the first sweep's time; the rest is for drafting and visiting."""
_NUM_KEYS = {"cpu": (128, 512), "cuda": (128, 1024, 4096)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyTable:
    """Seconds on one device, as measured or as a formula has them.

    forward_s[k][s]: a forward of `slots[s]` slots over `num_keys[k]` keys each. draft_s[q]: one
    wave of `queries[q]` questions to the drafter, the trees' bookkeeping included; empty where
    there is no drafter. visit_s[n]: head and transition at `states[n]` visited states, greedy;
    noisy_visit_s[n] the same with noise. Between entries a line, beyond the last one the last line.
    """

    slots: tuple[int, ...]
    num_keys: tuple[int, ...]
    forward_s: tuple[tuple[float, ...], ...]
    queries: tuple[int, ...] = ()
    draft_s: tuple[float, ...] = ()
    states: tuple[int, ...] = (1,)
    visit_s: tuple[float, ...] = (0.0,)
    noisy_visit_s: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        self._check_axis("slots", self.slots)
        self._check_axis("num_keys", self.num_keys)
        for row in self.forward_s:
            self._check_seconds("forward_s", row, self.slots)
            if min(row) <= 0.0:
                raise ValueError("forward_s: a forward takes more than no time")
        if len(self.forward_s) != len(self.num_keys):
            raise ValueError(
                f"forward_s wants {len(self.num_keys)} rows, got {len(self.forward_s)}"
            )
        if self.queries:
            self._check_axis("queries", self.queries)
        self._check_seconds("draft_s", self.draft_s, self.queries)
        self._check_axis("states", self.states)
        self._check_seconds("visit_s", self.visit_s, self.states)
        self._check_seconds("noisy_visit_s", self.noisy_visit_s, self.states)

    def forwards(self, num_slots: NDArray[np.float64], num_keys: float) -> NDArray[np.float64]:
        """Seconds of forwards of (n,) slots, each of which reads so many keys."""
        rows = [_along(num_slots, self.slots, row) for row in self.forward_s]
        if len(rows) == 1:
            return rows[0]
        at = int(np.clip(np.searchsorted(self.num_keys, num_keys) - 1, 0, len(rows) - 2))
        low, high = self.num_keys[at], self.num_keys[at + 1]
        share = (num_keys - low) / (high - low)
        return np.maximum(rows[at] + share * (rows[at + 1] - rows[at]), 0.5 * rows[at])

    def forward(self, num_slots: float, num_keys: float) -> float:
        """Seconds of one forward."""
        return float(self.forwards(np.array([float(num_slots)]), num_keys)[0])

    def draft(self, num_queries: int) -> float:
        """Seconds of one wave."""
        if not self.queries:
            return 0.0
        return float(_along(np.array([float(num_queries)]), self.queries, self.draft_s)[0])

    def visit(self, num_states: float, noisy: float) -> float:
        """Seconds of visiting so many states at once, a share `noisy` of them with noise."""
        at = np.array([float(num_states)])
        greedy = float(_along(at, self.states, self.visit_s)[0])
        return greedy + noisy * (float(_along(at, self.states, self.noisy_visit_s)[0]) - greedy)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a latency table") -> LatencyTable:
        """Raises ValueError that begins with `where`."""
        try:
            tree = json.loads(text)
            if not isinstance(tree, dict):
                raise ValueError("want an object")
            known = {each.name for each in dataclasses.fields(cls)}
            unknown = sorted(tree.keys() - known)
            if unknown:
                raise ValueError(f"unknown key {unknown[0]!r}")
            return cls(**{name: _tuples(value) for name, value in tree.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: not a latency table ({error})") from error

    @staticmethod
    def _check_axis(name: str, values: Sequence[int]) -> None:
        if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
            raise ValueError(f"{name} must ascend from at least 1, got {list(values)}")

    @staticmethod
    def _check_seconds(name: str, values: Sequence[float], axis: Sequence[int]) -> None:
        if len(values) != len(axis):
            raise ValueError(f"{name} wants {len(axis)} entries, got {len(values)}")
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise ValueError(f"{name} holds what is no time")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _along(
    x: NDArray[np.float64], axis: Sequence[int], values: Sequence[float]
) -> NDArray[np.float64]:
    """Linear between entries; beyond the last one as steep as from the middle of the axis on."""
    found: NDArray[np.float64] = np.interp(x, axis, values)
    if len(axis) == 1:
        return found * np.maximum(x / axis[0], 1.0)
    middle = len(axis) // 2 if len(axis) > 2 else 0
    # A disturbed last entry must not make all that lies beyond look free.
    slope = max(
        (values[-1] - values[middle]) / (axis[-1] - axis[middle]), 0.5 * values[-1] / axis[-1]
    )
    return np.where(x > axis[-1], values[-1] + slope * (x - axis[-1]), found)


@torch.inference_mode()
def measure_latency(
    target: Target,
    drafter: Drafter | None,
    *,
    max_slots: int,
    at_most_s: float = 3.0,
    num_keys: Sequence[int] | None = None,
    max_positions: int | None = None,
) -> LatencyTable:
    """The table of this device, for forwards of up to so many slots over a cache of no more than
    `max_positions`, padding included: longer prefixes are left to the line, but for the shortest.

    Everything is gone through again and again until the time is up, and the middle of each one's
    times is taken: who shares the processor disturbs neighbouring entries alike. Sizes that the
    first pass does not reach are left to the last line. On one CPU thread the thread's own time is
    read, which other processes do not lengthen.
    """
    lengths = tuple(num_keys or _NUM_KEYS[target.device.type])
    most = math.inf if max_positions is None else max_positions
    lengths = lengths[:1] + tuple(each for each in lengths[1:] if padded_length(each) <= most)
    sizes = [size for size in BUCKETS if size <= max_slots] or [1]
    waves = [size for size in sizes if size <= _MOST_QUERIES]
    visits = [_visiting(target, waves, hot=hot) for hot in (False, True)]
    drafts = _drafting(target, drafter, waves) if drafter is not None else []
    num_rows = int(max(1, min(sizes[-1], 64, most // padded_length(lengths[-1]))))
    cache = target.allocate(num_rows, lengths[-1])
    forwards = [_forwarding(target, cache, num_rows, sizes, length) for length in lengths]
    kinds = [*visits, drafts, *forwards]
    rest = (1.0 - _FORWARD_SHARE) / (len(kinds) - len(lengths))
    shares = [rest] * (len(kinds) - len(lengths)) + [_FORWARD_SHARE / len(lengths)] * len(lengths)
    times = _sweeps(kinds, shares, device_clock(target.device), at_most_s)
    greedy, noisy, of_drafts, *of_forwards = [_rising(each) for each in times]
    num_sizes = min(map(len, of_forwards))
    return LatencyTable(
        slots=tuple(sizes[:num_sizes]),
        num_keys=lengths,
        forward_s=tuple(row[:num_sizes] for row in of_forwards),
        queries=tuple(waves[: len(of_drafts)]),
        draft_s=of_drafts,
        states=tuple(waves[: min(len(greedy), len(noisy))]),
        visit_s=greedy[: len(noisy)],
        noisy_visit_s=noisy[: len(greedy)],
    )


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds that what was asked of a device has taken, this thread's own if it can be told."""
    if device.type != "cpu":

        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()

        return synchronised
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Stopwatch:
    """Seconds that a device took between `start` and `stop`. On a GPU nobody waits for them: read
    them when something else has waited. `clock` is read instead if given."""

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or device_clock(device)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and clock is None:
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._begin_s = self._end_s = 0.0

    def start(self) -> None:
        if self._events is not None:
            self._events[0].record()
        else:
            self._begin_s = self._clock()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        else:
            self._end_s = self._clock()

    @property
    def seconds(self) -> float:
        if self._events is not None:
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return self._end_s - self._begin_s


def _sweeps(
    kinds: Sequence[Sequence[Callable[[], object]]],
    shares: Sequence[float],
    clock: Callable[[], float],
    at_most_s: float,
) -> list[list[list[float]]]:
    """The seconds of each call of each kind, sweep by sweep, the larger ones in fewer sweeps.

    The first sweep ends a kind early, but not before its fourth call, where a call more would take
    more than its share of the time; the later ones stop when time is up.
    """
    begin_s = clock()
    times: list[list[list[float]]] = []
    for calls, share in zip(kinds, shares, strict=True):
        kind_begin_s, call_s, share_s = clock(), 0.0, 0.5 * share * at_most_s
        taken: list[list[float]] = []
        for call in calls:
            if len(taken) >= 4 and 4 * call_s > share_s - (clock() - kind_begin_s):
                break
            call()  # memory, kernels, graphs
            call_s = _timed(call, clock)
            taken.append([call_s])
        times.append(taken)
    for _ in range(_MOST_SWEEPS):
        for calls, taken in zip(kinds, times, strict=True):
            for call, seconds in zip(calls, taken, strict=False):
                if clock() - begin_s > at_most_s:
                    return times
                seconds.append(_timed(call, clock))
    return times


def _timed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    before_s = clock()
    call()
    return clock() - before_s


def _rising(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The middle of each one's times; more never takes less: what says so was disturbed."""
    middle = [float(np.median(each)) for each in times]
    return tuple(np.maximum.accumulate(middle).tolist()) if middle else ()


def _forwarding(
    target: Target, cache: PrefixCache, num_rows: int, sizes: Sequence[int], num_keys: int
) -> list[Callable[[], object]]:
    width = target.block_length
    start = max(0, num_keys // width - 1) * width

    def forward(size: int) -> Callable[[], object]:
        index = torch.arange(size)
        no = torch.zeros(size, dtype=torch.bool)
        ids = torch.full((size, width), target.mask_id)
        slots = SlotBatch(
            ids, torch.full_like(index, start), index % num_rows, index[:, None], no, no
        )
        return lambda: target.forward(slots, cache)

    return [forward(size) for size in sizes]


def _visiting(target: Target, sizes: Sequence[int], *, hot: bool) -> list[Callable[[], object]]:
    width = target.block_length
    no, zero = torch.zeros(1, dtype=torch.bool), torch.zeros(1).long()
    blank = torch.full((1, width), target.mask_id)
    one = SlotBatch(blank, zero, zero, zero[:, None], no, no)
    rows = target.forward(one, target.allocate(1, width)).rows
    rule = Rule.of(SamplingParams(max_new_tokens=1))

    def visit(size: int) -> Callable[[], object]:
        index = torch.arange(size)
        states = States(
            masked=torch.ones(size, width, dtype=torch.bool),
            start=torch.zeros_like(index),
            num_committed=torch.zeros_like(index),
            noise_key=index,
            temperature=torch.full((size,), float(hot)),
            top_p=torch.ones(size),
            top_k=torch.zeros_like(index),
        )
        at = onto(torch.zeros_like(index), target.device)
        return lambda: to_host(transition(target.head(rows[at]), states, rule).packed())

    return [visit(size) for size in sizes]


def _drafting(target: Target, drafter: Drafter, sizes: Sequence[int]) -> list[Callable[[], object]]:
    width, device = target.block_length, target.device
    stale = StaleStore(sizes[-1], width, target.vocab_size, device)
    stale.log_prob.fill_(-math.log(2 * stale.width))
    open_now = [False] + [True] * (width - 1)

    def draft(size: int) -> Callable[[], object]:
        roots = [
            Root(
                row=row,
                start=0,
                masked=open_now,
                stale_masked=[True] * width,
                num_committed=1,
                noise_key=row,
                params=SamplingParams(max_new_tokens=width),
                crossing=True,
            )
            for row in range(size)
        ]
        # A budget of one slot is filled by the first wave's answers: there is no second one.
        return lambda: grow(drafter, stale, roots, budget=1, gamma=0.0)

    return [draft(size) for size in sizes]
