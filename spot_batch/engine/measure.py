"""Measuring a device's latency table, in a few seconds, on the device that decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from spot_batch.checkpoints.shapes import padded_length
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import StaleStore
from spot_batch.engine.clock import device_clock
from spot_batch.engine.drafting import Root, grow
from spot_batch.engine.latency import BUCKETS, LatencyTable
from spot_batch.engine.transition import Rule, States, decided
from spot_batch.models.device import onto, to_host
from spot_batch.models.slots import PrefixCache, SlotBatch, Target
from spot_batch.records.sampling import Request, SamplingParams

_MOST_SWEEPS = 9
_MOST_QUERIES = 16
_FORWARD_SHARE = 0.75
"""Forwards take this share of the first sweep's time; the rest is for drafting and visiting."""
_NUM_KEYS = {"cpu": (128, 512), "cuda": (128, 1024, 4096)}


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
    params = SamplingParams(max_new_tokens=1, temperature=float(hot))
    rule = Rule.of(params)

    def visit(size: int) -> Callable[[], object]:
        index = range(size)
        states = States.of(
            [Request(sample_id=at, prompt_ids=(), noise_key=at, params=params) for at in index],
            masked=torch.ones(size, width, dtype=torch.bool),
            start=[0] * size,
            num_committed=[0] * size,
        )
        at = onto(torch.zeros(size, dtype=torch.int64), target.device)
        return lambda: to_host(decided(target.head(rows[at]), states, rule))

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
