"""Stale distributions: what the last forward said about a block, and what it suggests now.

A drafter reads the target's output distributions only, never its tokens or hidden states. It sees
them as top-32 log-probabilities of the deepest state the last walk visited, one or more commits old
by the time they are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.noise import NO_STEP, gumbel
from spot_batch.records.sampling import NoiseRule

TOP_K = 32
"""So many entries of each stale distribution are kept."""

_ROUNDING = 1e-3
"""How far rounding can move a sum of probabilities that were stored in 16 bits."""

_TAIL_ENTRIES = 512
"""So many entries as probable as the last one kept weigh no less than those that were not kept."""

COMMITTED, SINCE, MASKED = 0, 1, 2
"""State of a position in a query: committed before the stale state, since then, not yet."""


class StaleStore:
    """The stale distributions of every sample in flight: a row a sample, W positions, top-32.

    log_prob (R, W, K) float32 descending, ids (R, W, K) int64, num_committed (R,) int64: of the
    state they were taken at. Positions that were not masked then hold -inf and are never read.
    """

    def __init__(
        self, num_rows: int, block_length: int, vocab_size: int, device: torch.device
    ) -> None:
        self.width = min(TOP_K, vocab_size)
        shape = (num_rows, block_length, self.width)
        self.log_prob = torch.full(shape, -math.inf, device=device)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.num_committed = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def put(self, rows: Tensor, logits: Tensor, masked: Tensor, num_committed: Tensor) -> None:
        """Remember (n, W, V) logits of states with these masks as the stale ones of `rows` (n,)."""
        self.log_prob[rows], self.ids[rows] = top_log_probs(logits, masked)
        self.num_committed[rows] = num_committed


def top_log_probs(logits: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """(n, W, V) logits -> (n, W, K) log-probabilities and ids; -inf where not `masked` (n, W).

    Rounded to 16 bits as trajectories keep them: a drafter sees what it learned from, and a
    recorded trajectory replays every decision.
    """
    top, ids = logits.topk(min(TOP_K, logits.shape[2]), dim=2)
    log_prob = (top - logits.logsumexp(dim=2, keepdim=True)).half().float()
    return log_prob.masked_fill(~masked[:, :, None], -math.inf), ids


@dataclass(frozen=True, slots=True)
class Queries:
    """Hypothetical states to draft from, of any samples.

    row (q,) of the stale store; status (q, W) int64, one of COMMITTED, SINCE, MASKED; guessed
    (q, W) int64, the token at a position that is committed in this hypothetical state only, not in
    the sample's current one, else -1; start (q,) absolute position of the block; num_committed (q,)
    tokens generated in the block; noise_key (q,); temperature, top_p (q,) float32; top_k (q,)
    int64.
    """

    row: Tensor
    status: Tensor
    guessed: Tensor
    start: Tensor
    num_committed: Tensor
    noise_key: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class Candidates:
    """The stale guess at each position of a query, under the noise of the query's own step.

    token, second (q, W) int64: the winner and the runner-up; log_odds (q, W) float32: of the winner
    under the tempered stale distribution, which is the confidence the target would compare;
    log_prob (q, W, K): the untempered stale distribution.
    """

    token: Tensor
    second: Tensor
    log_odds: Tensor
    log_prob: Tensor


def candidates(stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Candidates:
    """The token each masked position would be given if the stale distribution still held.

    Drafter and target share the noise, so the guess is right whenever the target's distribution
    has kept the same perturbed winner.
    """
    log_prob, ids = stale.log_prob[queries.row], stale.ids[queries.row]
    hot = queries.temperature > 0
    # At temperature 0 the winner is the first entry; scores are then compared untempered.
    scale = torch.where(hot, queries.temperature, 1.0)[:, None, None]
    tempered = log_prob / scale
    best = torch.zeros((*queries.status.shape, 2), dtype=torch.int64, device=log_prob.device)
    best[:, :, 1] = min(1, ids.shape[2] - 1)
    if bool(hot.any()):
        best[hot] = _perturbed(tempered[hot], ids[hot], queries, hot, noise_rule)
    own = tempered.gather(2, best[:, :, :1])
    rest = tempered.scatter(2, best[:, :, :1], -math.inf).logsumexp(dim=2)
    tail = tail_mass(log_prob).clamp_min(1e-30).log() / scale[:, :, 0]  # one more alternative
    log_odds = own.squeeze(2) - torch.logaddexp(rest, tail)
    token, second = ids.gather(2, best).unbind(dim=2)
    return Candidates(token, second, log_odds.nan_to_num(nan=0.0, neginf=-30.0), log_prob)


def tail_mass(log_prob: Tensor) -> Tensor:
    """(..., K) descending log-probabilities -> (...,) the mass outside of them.

    1 less their sum, but where that may be rounding no more than the last one lets expect: most
    commits are made at odds of e^10 and more, and it is these odds that are compared.
    """
    probability = log_prob.exp()
    rest = (1.0 - probability.sum(dim=-1)).clamp_min(0.0)
    expected = torch.minimum(rest, probability[..., -1] * _TAIL_ENTRIES)
    return torch.where(rest > _ROUNDING, rest, expected)


def _perturbed(
    tempered: Tensor, ids: Tensor, queries: Queries, hot: Tensor, noise_rule: NoiseRule
) -> Tensor:
    """Indices of the two best perturbed among the top-32 of the `hot` queries: (h, W, 2)."""
    width = tempered.shape[1]
    position = queries.start[hot][:, None] + torch.arange(width, device=ids.device)
    step = queries.num_committed[hot]
    if noise_rule == "position":
        step = torch.full_like(step, NO_STEP)
    noise = gumbel(
        queries.noise_key[hot][:, None, None],
        position=position[:, :, None],
        step=step[:, None, None],
        token=ids,
    )
    probability = tempered.softmax(dim=2)
    above = probability.cumsum(dim=2) - probability
    rank = torch.arange(ids.shape[2], device=ids.device)
    top_k, top_p = queries.top_k[hot][:, None, None], queries.top_p[hot][:, None, None]
    allowed = (above < top_p) & ((top_k == 0) | (rank < top_k))
    scores = (tempered + noise).masked_fill(~allowed, -math.inf).nan_to_num(nan=-math.inf)
    return scores.topk(min(2, scores.shape[2]), dim=2).indices.expand(-1, -1, 2)
