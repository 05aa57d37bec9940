"""Growing the draft trees of a round, one wave of states of all samples at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.decoding.tree import DraftTree, Edge, Key
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.stale import COMMITTED, MASKED, SINCE, Queries, StaleStore
from spot_batch.records import SamplingParams


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


def grow(
    drafter: Drafter, stale: StaleStore, roots: Sequence[Root], *, budget: int, gamma: float
) -> list[DraftTree]:
    """The tree of each root, of `budget` slots at most, no state of less mass than `gamma`."""
    trees = [
        DraftTree(num_masked=sum(root.masked), budget=budget, gamma=gamma, crossing=root.crossing)
        for root in roots
    ]
    while True:
        asked = [
            (root, tree, key)
            for root, tree in zip(roots, trees, strict=True)
            for key in tree.frontier()
        ]
        if not asked:
            return trees
        _expand(drafter, stale, asked)


def _expand(
    drafter: Drafter, stale: StaleStore, asked: Sequence[tuple[Root, DraftTree, Key]]
) -> None:
    """Ask about one wave of hypothetical states, and choose the states of their trees anew."""
    queries = _queries([(root, key) for root, _, key in asked], stale.log_prob.device)
    # One rule a job: all samples in flight key their noise alike.
    proposals = drafter.propose(stale, queries, asked[0][0].params.noise_key)
    for (_, tree, key), weights, positions, tokens in zip(
        asked,
        proposals.weight.tolist(),
        proposals.position.tolist(),
        proposals.token.tolist(),
        strict=True,
    ):
        tree.expand(
            key,
            [
                Edge(((at, tok),), mass)
                for mass, at, tok in zip(weights, positions, tokens, strict=True)
                if mass > 0.0
            ],
        )
    for tree in {id(tree): tree for _, tree, _ in asked}.values():
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
    return Queries(
        row=torch.tensor([root.row for root, _ in asked], device=device),
        status=torch.tensor(status, device=device),
        guessed=torch.tensor(guessed, device=device),
        start=torch.tensor([root.start for root, _ in asked], device=device),
        num_committed=torch.tensor(
            [root.num_committed + len(key) for root, key in asked], device=device
        ),
        noise_key=noise_keys([root.noise_key for root, _ in asked], device),
        temperature=torch.tensor([each.temperature for each in params], device=device),
        top_p=torch.tensor([each.top_p for each in params], device=device),
        top_k=torch.tensor([each.top_k for each in params], device=device),
    )


def noise_keys(keys: Sequence[int], device: torch.device) -> Tensor:
    """64-bit keys as int64."""
    wrapped = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)
