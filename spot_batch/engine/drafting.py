"""Growing the draft trees of a round, one wave of states of all samples at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import COMMITTED, MASKED, SINCE, Queries, StaleStore
from spot_batch.engine.transition import noise_keys
from spot_batch.engine.tree import DraftTree, Edge, Key
from spot_batch.models.device import onto
from spot_batch.records.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Root:
    """The current state of a sample whose stale distributions are in `row` of the store.

    masked, stale_masked (W,): now, and at the stale state; num_committed: tokens generated in the
    block, which starts at `start`. `crossing`: whether the next block may be drafted into.
    """

    row: int
    start: int
    masked: Sequence[bool]
    stale_masked: Sequence[bool]
    num_committed: int
    noise_key: int
    params: SamplingParams
    crossing: bool


GoesOn = Callable[[Sequence[DraftTree], Sequence[float]], bool]
"""The trees so far and the masses of the states of the next wave -> whether to ask about them."""


def grow(
    drafter: Drafter,
    stale: StaleStore,
    roots: Sequence[Root],
    *,
    budget: int,
    gamma: float,
    scales: Sequence[float] | None = None,
    ask_above: float = 0.0,
    goes_on: GoesOn | None = None,
) -> list[DraftTree]:
    """The tree of each root, of `budget` slots at most, no state of less mass than `gamma`.

    `scales`: what the drafter's probabilities are worth, for each root; states of less mass than
    `ask_above` are not asked about; `goes_on` may end the growth before any wave.
    """
    trees = [
        DraftTree(num_masked=sum(root.masked), budget=budget, gamma=gamma, crossing=root.crossing)
        for root in roots
    ]
    of_roots: Sequence[float | None] = [None] * len(roots) if scales is None else scales
    while True:
        asked = [
            _Question(root, tree, key, scale)
            for root, tree, scale in zip(roots, trees, of_roots, strict=True)
            for key in tree.frontier()
            if tree.selected[key] >= ask_above
        ]
        if not asked:
            return trees
        masses = [each.tree.selected[each.key] for each in asked]
        if goes_on is not None and not goes_on(trees, masses):
            return trees
        _expand(drafter, stale, asked)


@dataclass(frozen=True, slots=True)
class _Question:
    """A hypothetical state of a root's tree, about which the drafter is asked."""

    root: Root
    tree: DraftTree
    key: Key
    scale: float | None


def _expand(drafter: Drafter, stale: StaleStore, asked: Sequence[_Question]) -> None:
    """Ask about one wave of hypothetical states, and choose the states of their trees anew."""
    queries = _queries([(each.root, each.key) for each in asked], stale.log_prob.device)
    # One rule a job: all samples in flight key their noise alike.
    proposals = drafter.propose(stale, queries, asked[0].root.params.noise_rule).on_host()
    for each, weights, positions, tokens in zip(
        asked,
        proposals.weight.tolist(),
        proposals.position.tolist(),
        proposals.token.tolist(),
        strict=True,
    ):
        each.tree.expand(
            each.key,
            [
                Edge(((at, tok),), mass if each.scale is None else min(1.0, mass * each.scale))
                for mass, at, tok in zip(weights, positions, tokens, strict=True)
                if mass > 0.0
            ],
        )
    for tree in {id(each.tree): each.tree for each in asked}.values():
        tree.select()


def _queries(asked: Sequence[tuple[Root, Key]], device: torch.device) -> Queries:
    status, guessed = [], []
    for root, key in asked:
        of_state = [
            MASKED if masked else (SINCE if stale else COMMITTED)
            for masked, stale in zip(root.masked, root.stale_masked, strict=True)
        ]
        of_key = [-1] * len(of_state)
        for position, token in key:
            of_state[position], of_key[position] = SINCE, token
        status.append(of_state)
        guessed.append(of_key)
    params = [root.params for root, _ in asked]
    num_committed = [root.num_committed + len(key) for root, key in asked]
    return Queries(
        row=onto(torch.tensor([root.row for root, _ in asked]), device),
        status=onto(torch.tensor(status), device),
        guessed=onto(torch.tensor(guessed), device),
        start=onto(torch.tensor([root.start for root, _ in asked]), device),
        num_committed=onto(torch.tensor(num_committed), device),
        noise_key=onto(noise_keys([root.noise_key for root, _ in asked]), device),
        temperature=onto(torch.tensor([each.temperature for each in params]), device),
        top_p=onto(torch.tensor([each.top_p for each in params]), device),
        top_k=onto(torch.tensor([each.top_k for each in params]), device),
    )
