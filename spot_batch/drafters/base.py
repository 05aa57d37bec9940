"""What every drafter is to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from spot_batch.drafters.stale import Candidates, Queries, StaleStore
from spot_batch.records import NoiseKey

NUM_EDGES = 6
"""Guesses made from one hypothetical state; the tree rarely has room for the less probable ones."""

GateMode = Literal["off", "filter", "branch", "soft"]


@dataclass(frozen=True, slots=True)
class Proposals:
    """Guesses of the target's next commit at each query, most probable first.

    position, token (q, E) int64; weight (q, E) float32: the probability that the target commits
    this token at this position next, 0 for no guess.
    """

    position: Tensor
    token: Tensor
    weight: Tensor


class Drafter(Protocol):
    """Guesses commits. Any drafter is exact: what it returns changes speed alone."""

    @property
    def name(self) -> str: ...

    def propose(self, stale: StaleStore, queries: Queries, noise_key: NoiseKey) -> Proposals:
        """What the target commits next at each hypothetical state."""


@dataclass(frozen=True, slots=True)
class TokenGate:
    """What to do with a position whose candidate token is doubtful: less probable than `level`.

    `filter` drafts no such position, `branch` offers its second token too, both by their stale
    probability, `soft` scales its weight down by how far it falls short. `off` leaves the doubt to
    the drafter's own weight.
    """

    mode: GateMode = "off"
    level: float = 0.6

    def __post_init__(self) -> None:
        if not 0.0 < self.level < 1.0:
            raise ValueError(f"the gate's level must be between 0 and 1, got {self.level}")


def best_edges(
    weight: Tensor, found: Candidates, gate: TokenGate, *, num_edges: int = NUM_EDGES
) -> Proposals:
    """(q, W) weights of the candidates, 0 where not masked -> the most probable guesses."""
    token = found.token
    position = torch.arange(weight.shape[1], device=weight.device).expand_as(weight)
    if gate.mode != "off":
        sure = torch.sigmoid(found.log_odds)
        doubtful = sure < gate.level
        if gate.mode == "filter":
            weight = weight.masked_fill(doubtful, 0.0)
        elif gate.mode == "soft":
            weight = torch.where(doubtful, weight * sure / gate.level, weight)
        else:
            second = torch.where(doubtful, weight * (1.0 - sure), 0.0)
            weight = torch.cat((torch.where(doubtful, weight * sure, weight), second), dim=1)
            token = torch.cat((token, found.second), dim=1)
            position = torch.cat((position, position), dim=1)
    weight, index = weight.topk(min(num_edges, weight.shape[1]), dim=1)
    return Proposals(position.gather(1, index), token.gather(1, index), weight)
