"""The transition: what the target commits next from a state. Draft-free decoding, the verifier and
every baseline call this one function, so they cannot disagree.

For fixed prefix, noise key and rule it is a function of the state alone: ties go to the lowest id
and the lowest position, masked is a boolean, and the noise is addressed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.models.device import onto
from spot_batch.noise import GUMBEL_MAX, NO_STEP, at_once, gumbel, gumbel_rows
from spot_batch.records.sampling import Confidence, NoiseRule, Request, SamplingParams, Unmasking

_DENSE_VOCAB = 2048
"""Up to this vocabulary whole rows of noise cost less than finding out which entries need any."""

_FEW = 8
"""Whole rows cost less, too, where more than one entry in so many needs noise."""

_TILE = 1 << 15
"""Noise of whole rows is made for so many tokens at a time, added, and forgotten."""

_INT_ONE = 1 << 40
"""Probabilities as integers of 2^-40: their running sums are exact in any order, on any device."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a job fixes for all its samples about how a state is left."""

    unmasking: Unmasking
    threshold: float
    confidence: Confidence
    noise_rule: NoiseRule

    @classmethod
    def of(cls, params: SamplingParams) -> Rule:
        return cls(params.unmasking, params.threshold, params.confidence, params.noise_rule)


@dataclass(frozen=True, slots=True)
class States:
    """A batch of states of any samples: on the host, which knows them before the target speaks.

    masked (n, W) bool; start (n,) absolute position of the block's first token; num_committed (n,)
    tokens generated in the block so far; noise_key (n,) 64 bits in int64; temperature (n,) float32,
    0 = greedy; top_p (n,) float32, 1 = off; top_k (n,) int64, 0 = off.
    """

    masked: Tensor
    start: Tensor
    num_committed: Tensor
    noise_key: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        *,
        masked: Tensor | Sequence[Sequence[bool]],
        start: Tensor | Sequence[int],
        num_committed: Tensor | Sequence[int],
    ) -> States:
        """The states that these samples are in."""
        params = [request.params for request in requests]
        return cls(
            masked=torch.as_tensor(masked),
            start=torch.as_tensor(start),
            num_committed=torch.as_tensor(num_committed),
            noise_key=noise_keys([request.noise_key for request in requests]),
            temperature=torch.tensor([each.temperature for each in params]),
            top_p=torch.tensor([each.top_p for each in params]),
            top_k=torch.tensor([each.top_k for each in params]),
        )

    def take(self, index: Tensor) -> States:
        """The states at `index` (int64 or bool)."""
        return States(
            self.masked[index],
            self.start[index],
            self.num_committed[index],
            self.noise_key[index],
            self.temperature[index],
            self.top_p[index],
            self.top_k[index],
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What the target does at each state.

    token (n, W) int64: its proposal at every position; log_odds (n, W) float32: the confidence it
    has in it, -inf where not masked; commit (n, W) bool: the positions fixed now, never empty for a
    state that has a masked position.
    """

    token: Tensor
    log_odds: Tensor
    commit: Tensor

    def packed(self) -> Tensor:
        """(n, W) int64, twice the token and 1 where it is committed."""
        return 2 * self.token + self.commit


NOT_FINITE = -1
"""What stands for a state whose logits are not finite."""


def decided(logits: Tensor, states: States, rule: Rule) -> Tensor:
    """(n, W) int64, all that the host wants to know of a transition, for one copy to it: twice the
    token and 1 where it is committed, or NOT_FINITE throughout a state of which, at a masked
    position, the largest logit is NaN or infinite."""
    masked = onto(states.masked, logits.device)
    finite = (logits.amax(dim=2).isfinite() | ~masked).all(dim=1, keepdim=True)
    return torch.where(finite, transition(logits, states, rule).packed(), NOT_FINITE)


def noise_keys(keys: Sequence[int]) -> Tensor:
    """64-bit keys as int64, on the host."""
    wrapped = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    return torch.tensor(wrapped, dtype=torch.int64)


def transition(logits: Tensor, states: States, rule: Rule) -> Choice:
    """(n, W, V) float32 logits, ids that must not be written at -inf -> what is committed next."""
    num_states, width, _ = logits.shape
    assert states.masked.shape == (num_states, width), tuple(states.masked.shape)
    assert logits.dtype == torch.float32, logits.dtype
    drawn = torch.nonzero(states.temperature > 0).squeeze(1)
    if 0 < len(drawn) == num_states:  # nothing is greedy: not all of the vocabulary twice
        token, log_odds = _sample(logits, states, rule)
    else:
        token = logits.argmax(dim=2)
        log_odds = log_odds_of(logits, token)
        if len(drawn):
            at = onto(drawn, logits.device)
            token[at], log_odds[at] = _sample(logits[at], states.take(drawn), rule)
    masked = onto(states.masked, logits.device)
    log_odds = log_odds.masked_fill(~masked, -math.inf)
    return Choice(token, log_odds, select(log_odds, masked, rule))


def select(log_odds: Tensor, masked: Tensor, rule: Rule) -> Tensor:
    """(n, W) confidences and masks -> (n, W) bool, the positions to commit.

    `single`: the most confident one, the lowest on ties. `threshold`: all that are strictly above
    it, else that one.
    """
    # A confidence of -inf at a masked position must still beat every position that is not masked.
    ranked = torch.where(masked, log_odds.clamp_min(torch.finfo(torch.float32).min), -math.inf)
    best = torch.zeros_like(masked).scatter_(1, ranked.argmax(dim=1, keepdim=True), True) & masked
    if rule.unmasking == "single":
        return best
    above = masked & (log_odds > threshold_log_odds(rule.threshold))
    return torch.where(above.any(dim=1, keepdim=True), above, best)


def threshold_log_odds(threshold: float) -> float:
    """The threshold on the scale on which confidences are compared: log(t / (1 - t))."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
    return math.inf if threshold == 1.0 else math.log(threshold) - math.log1p(-threshold)


def log_odds_of(logits: Tensor, token: Tensor) -> Tensor:
    """log(p / (1 - p)) of `token` (..., ) under softmax(`logits` (..., V)).

    A probability saturates at exactly 1 where a block is sure of its end and then ties everywhere;
    the log-odds, with the token itself left out of the sum, tell 1 - 1e-9 from 1 - 2e-9.
    """
    index = token.unsqueeze(-1)
    own = logits.gather(-1, index).squeeze(-1)
    return own - logits.scatter(-1, index, -math.inf).logsumexp(dim=-1)


def perturbed_noise_step(num_committed: Tensor, noise_rule: NoiseRule) -> Tensor:
    """The step word of the noise at states with so many commits."""
    if noise_rule == "position":
        return torch.full_like(num_committed, NO_STEP)
    return num_committed


def _sample(logits: Tensor, states: States, rule: Rule) -> tuple[Tensor, Tensor]:
    """Gumbel-max draws of the tempered and filtered distribution, and the confidence in them."""
    num_states, width, vocab_size = logits.shape
    device = logits.device
    position = states.start[:, None] + torch.arange(width)
    step = perturbed_noise_step(states.num_committed, rule.noise_rule)
    row_index = torch.nonzero(states.masked.flatten()).squeeze(1)
    of_row, rows = states.take(row_index // width), onto(row_index, device)
    flat = logits.reshape(-1, vocab_size)[rows]
    tempered = flat / onto(of_row.temperature[:, None], device)
    filtered = _filter(tempered, of_row.top_p, of_row.top_k)
    drawn = perturbed_argmax(
        filtered,
        key=onto(of_row.noise_key, device),
        position=onto(position.flatten()[row_index], device),
        step=onto(step[row_index // width], device),
    )
    if rule.confidence == "max":
        odds = log_odds_of(flat, flat.argmax(dim=1))
    elif rule.confidence == "sampled":
        odds = log_odds_of(flat, drawn)
    elif rule.confidence == "sampled_tempered":
        odds = log_odds_of(tempered, drawn)
    else:
        odds = log_odds_of(filtered, drawn)
    token = drawn.new_zeros(num_states * width)
    log_odds = odds.new_full((num_states * width,), -math.inf)
    token[rows] = drawn
    log_odds[rows] = odds
    return token.view(num_states, width), log_odds.view(num_states, width)


def perturbed_argmax(scores: Tensor, *, key: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """argmax of (n, V) scores + noise at (n,) addresses: an exact draw of softmax(scores).

    Noise lies within known bounds, so a token whose score is so far below the best one's perturbed
    score that no noise could lift it need not be asked for its own. Of a flat row that is no token:
    all of its noise is made, and none of it is kept.
    """
    vocab_size = scores.shape[1]
    # On a GPU the host would have to wait to learn which entries need any.
    if vocab_size <= _DENSE_VOCAB or scores.device.type == "cuda":
        return _argmax_by_tiles(scores, key, position, step)
    winner = scores.argmax(dim=1)
    reach = scores.gather(1, winner[:, None]).squeeze(1)
    reach = reach + gumbel(key, position=position, step=step, token=winner)
    bound = reach - GUMBEL_MAX
    bound = bound - bound.abs() * 1e-6  # the sums are rounded; the bound must not be
    within = scores > bound[:, None]
    many = within.sum(dim=1) > vocab_size // _FEW
    row, token = torch.nonzero(within & ~many[:, None], as_tuple=True)
    parts = zip(row.split(at_once(row.device)), token.split(at_once(row.device)), strict=True)
    value = torch.cat(
        [
            scores[at, of] + gumbel(key[at], position=position[at], step=step[at], token=of)
            for at, of in parts
        ]
    )
    most = torch.full_like(reach, -math.inf).scatter_reduce(0, row, value, "amax")
    nowhere = torch.full_like(winner, vocab_size)
    lowest = nowhere.scatter_reduce(0, row, token.where(value == most[row], vocab_size), "amin")
    winner = lowest.where(lowest < vocab_size, winner)
    rest = torch.nonzero(many).squeeze(1)
    if len(rest):
        winner[rest] = _argmax_by_tiles(scores[rest], key[rest], position[rest], step[rest])
    return winner


def _argmax_by_tiles(scores: Tensor, key: Tensor, position: Tensor, step: Tensor) -> Tensor:
    """argmax of (n, V) scores + noise, of which there is one tile at a time."""
    num_rows, vocab_size = scores.shape
    num_tokens = min(_TILE, vocab_size)
    num_at_once = max(1, 4 * at_once(scores.device) // num_tokens)
    winner = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    for top in range(0, num_rows, num_at_once):
        rows = slice(top, top + num_at_once)
        most = torch.full_like(scores[rows, 0], -math.inf)
        for first in range(0, vocab_size, num_tokens):
            last = min(first + num_tokens, vocab_size)
            noise = gumbel_rows(
                key[rows], position=position[rows], step=step[rows], first=first, vocab_size=last
            )
            value, token = noise.add_(scores[rows, first:last]).max(dim=1)
            winner[rows] = torch.where(value > most, token + first, winner[rows])
            most = torch.maximum(most, value)
    return winner


def _filter(scores: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """(n, V) scores with all but each row's top-k and nucleus at -inf; (n,) limits on the host.

    Ranked by score, then by id. A token is in the nucleus while the mass ranked above it is below
    top_p, the one that crosses it included; masses are integers, so they do not depend on the order
    of a sum.
    """
    vocab_size = scores.shape[1]
    on = torch.nonzero((top_p < 1.0) | ((top_k > 0) & (top_k < vocab_size))).squeeze(1)
    if not len(on):
        return scores
    limit = onto(torch.where(top_k[on] > 0, top_k[on], vocab_size), scores.device)
    top_p, on = onto(top_p[on], scores.device), onto(on, scores.device)
    ranked, order = scores[on].sort(dim=1, descending=True, stable=True)
    kept = torch.arange(vocab_size, device=scores.device) < limit[:, None]
    # top-k first, then the nucleus of what is left, as the families' own samplers do.
    mass = ranked.masked_fill(~kept, -math.inf).double().softmax(dim=1).mul(_INT_ONE).long()
    above = mass.cumsum(dim=1) - mass
    kept &= (above < (top_p.double() * _INT_ONE).long()[:, None]) | (top_p >= 1.0)[:, None]
    kept[:, 0] = True  # however small top-p is
    filtered = scores.clone()
    filtered[on] = torch.full_like(ranked, -math.inf).scatter(
        1, order, ranked.masked_fill(~kept, -math.inf)
    )
    return filtered
