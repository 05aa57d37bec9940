"""What every drafter is to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spot_batch.drafters.distributions import Candidates, Queries, StaleStore
from spot_batch.models.device import to_host
from spot_batch.records.sampling import NoiseRule

NUM_EDGES = 6
"""Guesses made from one hypothetical state; the tree rarely has room for the less probable ones."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Guesses of the target's next commit at each query, most probable first.

    position, token (q, E) int64; weight (q, E) float32: the probability that the target commits
    this token at this position next, 0 for no guess.
    """

    position: Tensor
    token: Tensor
    weight: Tensor

    def on_host(self) -> Proposals:
        """The same on the host, in one copy."""
        bits = self.weight.float().view(torch.int32)
        position, token, bits = to_host(torch.stack((self.position, self.token, bits.long())))
        return Proposals(position, token, bits.int().view(torch.float32))


class Drafter(Protocol):
    """Guesses commits. Any drafter is exact: what it returns changes speed alone."""

    @property
    def name(self) -> str: ...

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """What the target commits next at each hypothetical state."""


def best_edges(
    weight: Tensor,
    found: Candidates,
    *,
    second: Tensor | None = None,
    num_edges: int = NUM_EDGES,
) -> Proposals:
    """(q, W) weights of the candidates, 0 where not masked -> the most probable guesses.

    `second` (q, W): weights of the runners-up, which are then offered too.
    """
    token = found.token
    position = torch.arange(weight.shape[1], device=weight.device).expand_as(weight)
    if second is not None:
        weight = torch.cat((weight, second), dim=1)
        token = torch.cat((token, found.second), dim=1)
        position = position.repeat(1, 2)
    weight, index = weight.topk(min(num_edges, weight.shape[1]), dim=1)
    return Proposals(position.gather(1, index), token.gather(1, index), weight)
