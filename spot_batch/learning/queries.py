"""Recorded states as the questions that the engine would have put to a drafter, with the answers.

A query is a recorded state and a number of commits since: 1 at the root of a round, one more for
every guess above it. States of the trajectory itself are the right sample of what a tree's mass
counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spot_batch.drafters.distributions import (
    COMMITTED,
    MASKED,
    SINCE,
    Candidates,
    Queries,
    StaleStore,
    candidates,
)
from spot_batch.drafters.order import order_features
from spot_batch.learning.trajectories import Trajectories


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthLaw:
    """How deep training asks: geometrically with this mean, capped, a share of it uniformly."""

    mean_depth: float = 2.0
    max_depth: int = 12
    uniform_share: float = 0.2

    def __post_init__(self) -> None:
        if not self.mean_depth > 1.0 or self.max_depth < 1 or not 0 <= self.uniform_share <= 1:
            raise ValueError(
                "want mean_depth above 1, max_depth of at least 1 and a share from 0 to 1, got "
                f"{self.mean_depth}, {self.max_depth}, {self.uniform_share}"
            )


@dataclass(frozen=True, slots=True)
class Examples:
    """Queries q with their answers.

    features (q, W, 36) float32, status (q, W) and depth (q,) int64 are what a model is asked;
    label (q,) int64 is the position committed next, agrees (q,) bool whether its candidate token is
    the one committed; stale_best (q,) int64 is the masked position whose candidate is most
    confident.
    """

    features: Tensor
    status: Tensor
    depth: Tensor
    label: Tensor
    agrees: Tensor
    stale_best: Tensor


def draw_queries(
    ahead: Tensor, law: DepthLaw, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(N,) known commits ahead -> states and how many commits after them to ask: two (count,)."""
    index = torch.randint(len(ahead), (count,), generator=generator)
    return index, draw_depths(ahead[index], law, generator)


def draw_depths(ahead: Tensor, law: DepthLaw, generator: torch.Generator) -> Tensor:
    """(q,) known commits ahead -> (q,) depths, from 1 to as many."""
    ahead = ahead.clamp_max(law.max_depth)
    uniform = torch.rand(len(ahead), generator=generator).clamp_min(1e-7)
    geometric = 1 + (uniform.log() / math.log1p(-1.0 / law.mean_depth)).floor().long()
    even = 1 + (torch.rand(len(ahead), generator=generator) * ahead).floor().long()
    flat = torch.rand(len(ahead), generator=generator) < law.uniform_share
    return torch.minimum(torch.where(flat, even, geometric), ahead).clamp_min(1)


def make_examples(
    trajectories: Trajectories,
    index: Tensor,
    depth: Tensor,
    *,
    device: torch.device | str = "cpu",
) -> Examples:
    """The queries (`index`, `depth`) with the features the engine would have asked with."""
    part = trajectories.take(index).to(torch.device(device))
    depth = depth.to(device)
    status = status_after(part, depth)
    features, found = ask(part, status, depth)
    label = part.positions.gather(1, depth[:, None]).squeeze(1)
    token = part.tokens.gather(1, depth[:, None]).squeeze(1)
    agrees = found.token.gather(1, label[:, None]).squeeze(1) == token
    return Examples(features, status, depth, label, agrees, most_confident(found, status))


def status_after(part: Trajectories, depth: Tensor) -> Tensor:
    """(n, W) status once the first (n,) of each state's own commits are done."""
    done = torch.arange(part.block_length, device=depth.device) < depth[:, None]
    since = torch.zeros_like(part.masked)
    rows = torch.arange(len(part), device=depth.device)[:, None].expand_as(done)
    since[rows[done], part.positions[done]] = True
    return torch.where(since, SINCE, torch.where(part.masked, MASKED, COMMITTED))


def ask(part: Trajectories, status: Tensor, depth: Tensor) -> tuple[Tensor, Candidates]:
    """Features and candidates of states with this (n, W) status, (n,) commits after recorded."""
    found = candidates(_stale(part), _queries(part, status, depth), part.source.noise_rule)
    return order_features(found, status, depth.float()), found


def most_confident(found: Candidates, status: Tensor) -> Tensor:
    """The stale-confidence baseline: (n,) the masked position of the most confident candidate."""
    return found.log_odds.masked_fill(status != MASKED, -torch.inf).argmax(dim=1)


def plainly_most_confident(part: Trajectories, status: Tensor, depth: Tensor) -> Tensor:
    """The same without the noise: (n,) the masked position of the most probable argmax."""
    cold = replace(_queries(part, status, depth), temperature=torch.zeros_like(part.temperature))
    return most_confident(candidates(_stale(part), cold, part.source.noise_rule), status)


def _stale(part: Trajectories) -> StaleStore:
    stale = StaleStore(0, part.block_length, part.ids.shape[2], part.ids.device)
    stale.log_prob, stale.ids = part.log_prob.float(), part.ids.long()
    stale.num_committed = part.num_committed
    return stale


def _queries(part: Trajectories, status: Tensor, depth: Tensor) -> Queries:
    # A state's own commit is what the forward gave; those after it are guesses.
    later = part.positions[:, 1:]
    tokens = torch.full_like(part.positions, -1)
    rows = torch.arange(len(part), device=status.device)[:, None].expand_as(later)
    known = later >= 0
    tokens[rows[known], later[known]] = part.tokens[:, 1:][known]
    return Queries(
        row=torch.arange(len(part), device=status.device),
        status=status,
        guessed=tokens.masked_fill(status != SINCE, -1),
        start=part.start,
        num_committed=part.num_committed + depth,
        noise_key=part.noise_key,
        temperature=part.temperature,
        top_p=part.top_p,
        top_k=part.top_k,
    )
