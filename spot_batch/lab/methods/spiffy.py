"""Spiffy's calibrated draft graph under our verifier (arXiv 2509.18085).

A draft formula is a set of (position rank, token rank): positions ranked by their stale confidence
among those that are masked at the root of a round, tokens among the candidates of a position.
Which formulas the target's own trajectories pass through is counted once; the graph of those that
pay most is drafted every round, whatever the drafted distributions look like, or pruned by them.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from spot_batch.drafters.base import Proposals
from spot_batch.drafters.distributions import MASKED, Candidates, Queries, StaleStore, candidates
from spot_batch.records.sampling import NoiseRule

KIND = "spiffy"

Formula = tuple[tuple[int, int], ...]
"""(rank of the position, rank of its token), both from 0, sorted."""

Selection = Literal["accumulated", "count"]
"""A formula's score: its count plus those of its parents (the published choice), or its count."""

Ranks = Literal["plain", "noisy"]
"""Positions by the most probable token's probability, or by the candidate's under the noise."""

NUM_TOKENS = 2
"""Token ranks that are drafted."""


@dataclass(frozen=True, kw_only=True)
class SpiffyGraph:
    """What calibration counted, and what it found best for trees of `budget` slots.

    `counts`: how many of `num_states` rounds pass through a formula. `widening`: the graph holds so
    many times the budget of formulas, pruned each round by stale probabilities; 1 is no pruning.
    """

    block_length: int
    temperature: float
    budget: int
    num_states: int
    counts: Mapping[Formula, int]
    ranks: Ranks = "plain"
    selection: Selection = "accumulated"
    widening: int = 1

    def __post_init__(self) -> None:
        if min(self.widening, self.num_states, self.budget) < 1:
            raise ValueError("num_states, budget and widening must be at least 1")
        if self.ranks not in get_args(Ranks) or self.selection not in get_args(Selection):
            raise ValueError(f"unknown ranks or selection: {self.ranks}, {self.selection}")

    def settings(self) -> dict[str, object]:
        """All that was found but the counts, as JSON holds it."""
        return {
            each.name: getattr(self, each.name) for each in fields(self) if each.name != "counts"
        }

    @cached_property
    def order(self) -> tuple[Formula, ...]:
        """All formulas, best first, each behind one of its parents."""
        scores = {formula: self._score(formula) for formula in self.counts}
        children: dict[Formula, list[Formula]] = defaultdict(list)
        for formula in scores:
            for parent in parents(formula):
                children[parent].append(formula)
        queue = [(-scores[one], one) for one in children[()]]
        heapq.heapify(queue)
        found: dict[Formula, None] = {}
        while queue:
            _, formula = heapq.heappop(queue)
            if formula in found:
                continue
            found[formula] = None
            for child in children[formula]:
                heapq.heappush(queue, (-scores[child], child))
        return tuple(found)

    def _score(self, formula: Formula) -> int:
        own = self.counts[formula]
        if self.selection == "count":
            return own
        return own + sum(
            self.counts.get(parent, 0) if parent else self.num_states for parent in parents(formula)
        )

    def chosen(self, *, num_masked: int, stale: Sequence[Sequence[float]]) -> set[Formula]:
        """The formulas drafted from a root with so many masks.

        `stale`: of each position by its rank, the probabilities of its token ranks.
        """
        part = self._part(num_masked)
        return set(part.formulas) if self.widening == 1 else part.pruned(self.budget, stale)

    def _part(self, num_masked: int) -> _Part:
        """The graph where no more positions are left; found once."""
        found = self._parts.get(num_masked)
        if found is not None:
            return found
        most = self.budget * self.widening
        graph: dict[Formula, None] = {}
        for formula in self.order:
            if len(graph) == most:
                break
            reached = len(formula) == 1 or any(parent in graph for parent in parents(formula))
            if reached and formula[-1][0] < num_masked:
                graph[formula] = None
        self._parts[num_masked] = _Part.of(list(graph))
        return self._parts[num_masked]

    @cached_property
    def _parts(self) -> dict[int, _Part]:
        return {}


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph ready to be pruned: its formulas, the longest first among `by_length`, and those of
    `formulas` with one pair less and one more than each."""

    formulas: list[Formula]
    by_length: list[Formula]
    parents: dict[Formula, list[Formula]]
    children: dict[Formula, list[Formula]]

    @classmethod
    def of(cls, formulas: list[Formula]) -> _Part:
        graph = set(formulas)
        above = {one: [each for each in parents(one) if each in graph] for one in formulas}
        children: dict[Formula, list[Formula]] = defaultdict(list)
        for formula, found in above.items():
            for parent in found:
                children[parent].append(formula)
        return cls(formulas, sorted(formulas, key=len, reverse=True), above, children)

    def pruned(self, budget: int, stale: Sequence[Sequence[float]]) -> set[Formula]:
        """The best connected part: a formula's score is the geometric mean of its tokens' stale
        probabilities, and of that and its best child's score."""
        logs = [[math.log(max(each, 1e-9)) for each in of_rank] for of_rank in stale]
        best_child: dict[Formula, float] = {}
        score: dict[Formula, float] = {}
        for formula in self.by_length:
            # By its logarithm, whose order is the same.
            own = sum([logs[at][rank] for at, rank in formula]) / len(formula)
            best = best_child.get(formula)
            score[formula] = own = own if best is None else (own + best) / 2.0
            for parent in self.parents[formula]:
                if own > best_child.get(parent, -math.inf):
                    best_child[parent] = own
        kept: set[Formula] = set()
        queue: list[tuple[float, Formula]]
        queue = [(-score[one], one) for one in self.formulas if len(one) == 1]
        heapq.heapify(queue)
        while queue and len(kept) < budget:
            _, formula = heapq.heappop(queue)
            if formula in kept:
                continue
            kept.add(formula)
            for child in self.children.get(formula, ()):
                heapq.heappush(queue, (-score[child], child))
        return kept


def parents(formula: Formula) -> Iterable[Formula]:
    """The formulas with one pair less."""
    return (formula[:at] + formula[at + 1 :] for at in range(len(formula)))


def position_ranks(found: Candidates, open_at_root: Tensor, ranks: Ranks) -> Tensor:
    """(q, W) positions by their rank, those that were open at the root first."""
    confidence = found.log_prob[:, :, 0] if ranks == "plain" else found.log_odds
    confidence = confidence.masked_fill(~open_at_root, -torch.inf)
    return confidence.argsort(dim=1, descending=True, stable=True)


@dataclass(slots=True)
class _Round:
    """What is drafted of a sample in this round: its formulas, and by which tokens they came."""

    positions: list[int]
    chosen: set[Formula]
    formula_of: dict[tuple[tuple[int, int], ...], Formula] = field(default_factory=dict)


class SpiffyDrafter:
    """A calibrated graph at work.

    A sample's ranks are settled when the root of its round is asked about, and hold for the states
    above it.
    """

    name = KIND

    def __init__(self, graph: SpiffyGraph) -> None:
        self.graph = graph
        self._rounds: dict[int, _Round] = {}

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """The formulas of the graph that are one commit further; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        masked = queries.status == MASKED
        at_root = ~(queries.guessed >= 0).any(1)
        ranked = position_ranks(found, masked, self.graph.ranks).tolist()
        probability = found.log_prob[:, :, :NUM_TOKENS].exp().tolist()
        num_masked = masked.sum(1).tolist()
        rows, guessed = queries.row.tolist(), queries.guessed.tolist()
        tokens = torch.stack((found.token, found.second), dim=2).tolist()
        edges: list[list[tuple[float, int, int]]] = []
        for index, row in enumerate(rows):
            if at_root[index]:
                by_rank = [probability[index][at] for at in ranked[index]]
                chosen = self.graph.chosen(num_masked=num_masked[index], stale=by_rank)
                self._rounds[row] = _Round(ranked[index], chosen, {(): ()})
            key = tuple((at, token) for at, token in enumerate(guessed[index]) if token >= 0)
            edges.append(self._edges(self._rounds[row], key, tokens[index]))
        return _proposals(edges, queries.status.device)

    def _edges(
        self, of_round: _Round, key: tuple[tuple[int, int], ...], tokens: list[list[int]]
    ) -> list[tuple[float, int, int]]:
        """(weight, position, token) of each formula one commit behind the state `key`."""
        formula = of_round.formula_of[key]
        passed = self.graph.counts.get(formula, self.graph.num_states)
        taken = {rank for rank, _ in formula}
        edges = []
        for child in of_round.chosen:
            if len(child) != len(formula) + 1 or not set(formula) < set(child):
                continue
            ((rank, token_rank),) = set(child) - set(formula)
            if rank in taken:
                continue
            position = of_round.positions[rank]
            token = tokens[position][token_rank]
            edges.append((min(1.0, self.graph.counts[child] / passed), position, token))
            of_round.formula_of[tuple(sorted((*key, (position, token))))] = child
        return edges


def _proposals(
    edges: Sequence[Sequence[tuple[float, int, int]]], device: torch.device
) -> Proposals:
    most = max((len(one) for one in edges), default=0) or 1
    padded = [[*one, *[(0.0, 0, 0)] * (most - len(one))] for one in edges]
    return Proposals(
        position=torch.tensor([[at for _, at, _ in one] for one in padded], device=device),
        token=torch.tensor([[token for _, _, token in one] for one in padded], device=device),
        weight=torch.tensor([[weight for weight, _, _ in one] for one in padded], device=device),
    )


def save_graphs(path: Path, graphs: Sequence[SpiffyGraph], card: Mapping[str, object]) -> None:
    """Write graphs as one JSON file that appears whole."""
    document = {
        "kind": KIND,
        **card,
        "graphs": [
            {
                **graph.settings(),
                "counts": [[formula, count] for formula, count in graph.counts.items()],
            }
            for graph in graphs
        ],
    }
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def load_graphs(path: Path, *, block_length: int) -> dict[tuple[float, int], SpiffyGraph]:
    """The graphs of a file, by temperature and budget.

    Raises ValueError naming the file where it is none, or of another block length.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ValueError(f"{path}: not a file of {KIND} graphs")
    graphs: dict[tuple[float, int], SpiffyGraph] = {}
    try:
        for given in document["graphs"]:
            counts = {
                tuple(sorted((int(at), int(rank)) for at, rank in formula)): int(count)
                for formula, count in given.pop("counts")
            }
            graph = SpiffyGraph(counts=counts, **given)
            graphs[graph.temperature, graph.budget] = graph
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of {KIND} graphs ({error})") from error
    for graph in graphs.values():
        if graph.block_length != block_length:
            raise ValueError(
                f"{path}: calibrated at block length {graph.block_length}, "
                f"the target's is {block_length}"
            )
    if not graphs:
        raise ValueError(f"{path}: holds no graph")
    return graphs
