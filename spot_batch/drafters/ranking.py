"""Noise-aware ranking: the drafter that needs no training and no file."""

from __future__ import annotations

import torch

from spot_batch.drafters.base import Proposals, best_edges
from spot_batch.drafters.distributions import MASKED, Queries, StaleStore, candidates
from spot_batch.records.sampling import NoiseRule

_SHARPNESS = 0.5
"""How fast a position's chance to be next falls with its stale confidence, per unit of log-odds."""


class RankingDrafter:
    """Ranks positions by the stale confidence of the token they would be given under the noise."""

    name = "ranking"

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """Weights fall off with the stale log-odds; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        masked = queries.status == MASKED
        order = (_SHARPNESS * found.log_odds).masked_fill(~masked, -torch.inf).softmax(dim=1)
        weight = (order * torch.sigmoid(found.log_odds)).masked_fill(~masked, 0.0)
        return best_edges(weight.nan_to_num(nan=0.0), found)
