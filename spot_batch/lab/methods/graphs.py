"""Calibrating the baselines' drafters: Spiffy's draft graph, BlockSpec's sharpness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from spot_batch.drafters.distributions import MASKED
from spot_batch.lab.methods.baselines import confidence_shares
from spot_batch.lab.methods.spiffy import (
    NUM_TOKENS,
    Formula,
    Ranks,
    Selection,
    SpiffyGraph,
    position_ranks,
)
from spot_batch.learning.queries import ask, make_examples, status_after
from spot_batch.learning.trajectories import Trajectories

MAX_DEPTH = 8
"""Commits ahead that formulas are counted for."""

_LEAST = 2  # rounds that a formula is worth keeping for
_WIDENINGS = (1, 2, 4)
_NUM_TRIED = 600  # rounds that the ways to choose a graph are compared on
_SHARPNESSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """For every state the formulas that its future passes through, one a commit, and what pruning
    reads: `stale` the probabilities of token ranks by position rank."""

    paths: list[list[Formula]]
    num_masked: list[int]
    stale: list[list[list[float]]]


@dataclass(frozen=True, slots=True)
class Counted:
    """How often states pass through each formula, and some rounds to compare graphs on."""

    block_length: int
    temperature: float
    num_states: int
    of_ranks: Mapping[Ranks, tuple[Mapping[Formula, int], _Rounds]]


def count_formulas(states: Trajectories) -> Counted:
    """Counts for the draft graphs of these states' temperature, of any budget.

    Raises ValueError where the states are of several temperatures, or too few.
    """
    if len(states.temperatures) != 1:
        raise ValueError(f"a graph is of one temperature, the states of {states.temperatures}")
    some = states.some(_NUM_TRIED, seed=0)
    of_ranks: dict[Ranks, tuple[Mapping[Formula, int], _Rounds]] = {}
    for ranks in get_args(Ranks):
        paths = _rounds(states, ranks).paths
        counts: Counter[Formula] = Counter(one for path in paths for one in path)
        kept = {one: count for one, count in counts.items() if count >= _LEAST}
        if not kept:
            raise ValueError(f"{len(states)} states are too few to calibrate a draft graph on")
        of_ranks[ranks] = (kept, _rounds(some, ranks))
    return Counted(states.block_length, states.temperatures[0], len(states), of_ranks)


def fit_graph(counted: Counted, *, budget: int) -> SpiffyGraph:
    """The draft graph for trees of `budget` slots.

    Of ranking positions plainly or with the noise, the published score or the plain count, and
    pruning to the budget or not, what accepts most on some of the counted states is taken.
    """
    found: list[tuple[float, SpiffyGraph]] = []
    for ranks, (kept, tried) in counted.of_ranks.items():
        for selection, widening in product(get_args(Selection), _WIDENINGS):
            graph = SpiffyGraph(
                block_length=counted.block_length,
                temperature=counted.temperature,
                budget=budget,
                num_states=counted.num_states,
                counts=kept,
                ranks=ranks,
                selection=selection,
                widening=widening,
            )
            found.append((_accepted(graph, tried), graph))
    best = max(found, key=lambda each: each[0])[1]
    used = best.order[: budget * best.widening]
    # Counts of what is never drafted are of no use; parents' are, for the conditional weights.
    return replace(best, counts={one: best.counts[one] for one in best.order[: 8 * len(used)]})


def _rounds(states: Trajectories, ranks: Ranks) -> _Rounds:
    num, depth = len(states), torch.ones(len(states), dtype=torch.int64)
    ahead = states.num_ahead.clamp_max(MAX_DEPTH)
    status = status_after(states, depth)
    _, found = ask(states, status, depth)
    masked = status == MASKED
    order = position_ranks(found, masked, ranks)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    top = found.log_prob[:, :, :NUM_TOKENS].exp()
    stale = top.gather(1, order[:, :, None].expand(-1, -1, top.shape[2]))
    paths: list[list[Formula]] = [[] for _ in range(num)]
    going = torch.ones(num, dtype=torch.bool)
    for step in range(1, MAX_DEPTH + 1):
        going &= ahead >= step
        index = torch.nonzero(going).squeeze(1)
        if not len(index):
            break
        part, deep = states.take(index), torch.full((len(index),), step)
        _, now = ask(part, status_after(part, deep), deep)
        position = part.positions[:, step : step + 1]
        token = part.tokens[:, step]
        first = now.token.gather(1, position).squeeze(1) == token
        second = now.second.gather(1, position).squeeze(1) == token
        at = rank[index].gather(1, position).squeeze(1).tolist()
        for place, known, best, also in zip(
            index.tolist(), at, first.tolist(), second.tolist(), strict=True
        ):
            if not best and not also:
                going[place] = False  # no formula says this token
                continue
            behind = paths[place][-1] if paths[place] else ()
            paths[place].append(tuple(sorted((*behind, (known, 0 if best else 1)))))
    return _Rounds(paths, masked.sum(1).tolist(), stale.tolist())


def _accepted(graph: SpiffyGraph, rounds: _Rounds) -> float:
    """States accepted a round, were this graph drafted in each."""
    total = 0
    for path, num_masked, stale in zip(rounds.paths, rounds.num_masked, rounds.stale, strict=True):
        chosen = graph.chosen(num_masked=num_masked, stale=stale)
        for formula in path:
            if formula not in chosen:
                break
            total += 1
    return total / max(1, len(rounds.paths))


def fit_sharpness(states: Trajectories) -> float:
    """The sharpness of a confidence tree under which these states' next commits are most likely."""
    index = torch.nonzero(states.num_ahead >= 1).squeeze(1)
    part = states.take(index)
    depth = torch.ones(len(part), dtype=torch.int64)
    asked = make_examples(states, index, depth)
    _, found = ask(part, asked.status, depth)

    def loss(sharpness: float) -> float:
        share: Tensor = confidence_shares(found, asked.status, sharpness)
        of_label = share.gather(1, asked.label[:, None]).squeeze(1)
        return -float(of_label.clamp_min(1e-9).log().mean())

    best: float = min(_SHARPNESSES, key=loss)
    step = math.sqrt(2.0)
    finer: Sequence[float] = (best / step, best, best * step)
    best = min(finer, key=loss)
    return round(best, 6)
