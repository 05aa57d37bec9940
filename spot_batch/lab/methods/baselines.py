"""Drafters of other methods, under our verifier: what SPOT is compared with.

Each guesses from the same stale distributions, with the noise of the coming steps as all do; only
what is drafted differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spot_batch.drafters.base import Proposals, best_edges
from spot_batch.drafters.distributions import MASKED, Candidates, Queries, StaleStore, candidates
from spot_batch.noise import gumbel
from spot_batch.records.sampling import NoiseRule

_OTHER_KEY = 0x5EED_0F_0DD  # noise of its own: the sample's is not to tell what it will do


class ChainDrafter:
    """SSD-style free chain: the masked positions by falling stale confidence, one behind the other.

    Of its one guess a state it is always sure, so a tree of budget D is a chain of D states.
    """

    name = "ssd"

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """The most confident position alone; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        weight = torch.zeros_like(found.log_odds)
        best = found.log_odds.masked_fill(queries.status != MASKED, -torch.inf).argmax(1)
        weight.scatter_(1, best[:, None], 1.0)
        weight = weight.masked_fill(queries.status != MASKED, 0.0)
        return best_edges(weight, found, num_edges=1)


class ConfidenceTreeDrafter:
    """BlockSpec-style confidence tree: a position's chance to be next is its stale confidence to
    the power of `sharpness`, over the sum of all."""

    name = "blockspec"

    def __init__(self, *, sharpness: float) -> None:
        if not 0.0 < sharpness < float("inf"):
            raise ValueError(f"sharpness must be above 0, got {sharpness}")
        self.sharpness = sharpness

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """Weights by confidence; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        weight = confidence_shares(found, queries.status, self.sharpness)
        return best_edges(weight, found)


def confidence_shares(found: Candidates, status: Tensor, sharpness: float) -> Tensor:
    """(q, W) shares proportional to the candidate's stale confidence to the power of `sharpness`;
    0 where not masked."""
    confidence = torch.nn.functional.logsigmoid(found.log_odds)
    scores = (sharpness * confidence).masked_fill(status != MASKED, -torch.inf)
    return scores.softmax(dim=1).nan_to_num(nan=0.0)


class RandomDrafter:
    """Any masked position with its candidate token: what guessing blindly saves.

    The draw depends on the sample, the block and the number of commits alone.
    """

    name = "random"

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """Every masked position with a random weight; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        masked = queries.status == MASKED
        width = masked.shape[1]
        drawn = gumbel(
            (queries.noise_key ^ _OTHER_KEY)[:, None],
            position=queries.start[:, None] + torch.arange(width, device=masked.device),
            step=queries.num_committed[:, None],
            token=torch.zeros_like(queries.status),
        )
        weight = drawn.masked_fill(~masked, -torch.inf).softmax(dim=1).nan_to_num(nan=0.0)
        return best_edges(weight, found)
