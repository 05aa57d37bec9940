"""Draft-free decoding once more, as plainly as it can be said.

No cache, no slots, no batch, no torch, nothing of `spot_batch.engine` or `spot_batch.noise`: one
sample, Python integers for the noise, Python floats (exactly rounded sums) for the confidences, and
the target as a function of the tokens alone. Slow, and only for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from spot_batch.records.sampling import SamplingParams

Score = Callable[[Sequence[int], Sequence[int]], np.ndarray]
"""Clean prefix tokens and one block (the mask id where masked) -> (W, V) float logits."""

Spell = Callable[[Sequence[int]], str]
"""Tokens -> their text, for stop strings."""

Commits = tuple[tuple[int, int], ...]
"""Positions in the block and their tokens: what one forward fixes."""

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Decoded:
    """A sample, and how it came about: per forward the block's start and what was fixed.

    `text` is set where a stop string ended it: what was written in front of the string.
    `near_tie`: some decision between different rows hung on so little that another precision, or
    another order of a sum, may decide otherwise.
    """

    token_ids: tuple[int, ...]
    commit_step: tuple[int, ...]
    finish_reason: str
    num_forwards: int
    trace: tuple[tuple[int, Commits], ...]
    near_tie: bool
    text: str | None = None


@dataclass(slots=True)
class _Writing:
    """What has been written, by absolute position."""

    num_prompt: int
    params: SamplingParams
    spell: Spell | None
    tokens: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    trace: list[tuple[int, Commits]] = field(default_factory=list)
    near_tie: bool = False

    def settled(self) -> list[int]:
        """The generated tokens in front of the first gap."""
        run = []
        while self.num_prompt + len(run) in self.tokens:
            run.append(self.tokens[self.num_prompt + len(run)])
        return run

    def end(self, *, block_is_full: bool) -> tuple[str, int, str | None] | None:
        """Finish reason, length and cut text once the sample is over (A.2's stop rules)."""
        params = self.params
        if params.stop_at in ("block", "never") and not block_is_full:
            return None
        run = self.settled()[: params.max_new_tokens]
        if params.stop_at in ("early", "block"):
            for index, token in enumerate(run):
                if token in params.stop_ids:
                    return self._cut(run[:index]) or ("stop", index, None)
            cut = self._cut(run)
            if cut is not None:
                return cut
        return ("length", len(run), None) if len(run) == params.max_new_tokens else None

    def _cut(self, run: Sequence[int]) -> tuple[str, int, str] | None:
        """The end where a stop string begins, be it inside a token."""
        if not self.params.stop:
            return None
        assert self.spell is not None, "stop strings are matched in text"
        text = self.spell(run)
        places = sorted(text.index(string) for string in self.params.stop if string in text)
        if not places:
            return None
        whole = [num for num in range(len(run) + 1) if len(self.spell(run[:num])) <= places[0]]
        return "stop", max(whole), text[: places[0]]

    def decoded(self, reason: str, length: int, text: str | None) -> Decoded:
        kept = range(self.num_prompt, self.num_prompt + length)
        return Decoded(
            token_ids=tuple(self.tokens[position] for position in kept),
            commit_step=tuple(self.steps[position] for position in kept),
            finish_reason=reason,
            num_forwards=len(self.trace),
            trace=tuple(self.trace),
            near_tie=self.near_tie,
            text=text,
        )


def decode(
    score: Score,
    *,
    prompt: Sequence[int],
    params: SamplingParams,
    noise_key: int,
    block_length: int,
    mask_id: int,
    near: float = 5e-6,
    spell: Spell | None = None,
) -> Decoded:
    """One sample, one forward a step. `near`: below which gap a decision counts as a near tie."""
    num_clean = len(prompt) - len(prompt) % block_length
    prefix, block = list(prompt[:num_clean]), list(prompt[num_clean:])
    masked = [False] * len(block) + [True] * (block_length - len(block))
    block += [mask_id] * (block_length - len(block))
    writing = _Writing(len(prompt), params, spell)
    num_committed = 0
    while True:
        commits, near_tie = next_commits(
            score(prefix, block),
            masked=masked,
            start=len(prefix),
            num_committed=num_committed,
            params=params,
            noise_key=noise_key,
            near=near,
        )
        for position, token in commits:
            assert masked[position], "only a masked position is written"
            assert token != mask_id, "the mask is no token"
            block[position], masked[position] = token, False
            writing.tokens[len(prefix) + position] = token
            writing.steps[len(prefix) + position] = len(writing.trace)
        writing.trace.append((len(prefix), commits))
        writing.near_tie |= near_tie
        num_committed += len(commits)
        over = writing.end(block_is_full=not any(masked))
        if over is not None:
            return writing.decoded(*over)
        if not any(masked):
            prefix += block
            block, masked = [mask_id] * block_length, [True] * block_length
            num_committed = 0


def next_commits(
    logits: np.ndarray,
    *,
    masked: Sequence[bool],
    start: int,
    num_committed: int,
    params: SamplingParams,
    noise_key: int,
    near: float,
) -> tuple[Commits, bool]:
    """What the target fixes next, and whether it was close."""
    step = num_committed if params.noise_rule == "position_step" else _WORD
    tokens: dict[int, int] = {}
    confidences: dict[int, float] = {}
    near_tie = False
    for position in (at for at, is_masked in enumerate(masked) if is_masked):
        row = [float(value) for value in logits[position]]
        if params.temperature == 0:
            tokens[position] = row.index(max(row))
            confidences[position] = log_odds(row, tokens[position])
            continue
        tempered = [
            float(np.float32(value) / np.float32(params.temperature)) for value in logits[position]
        ]
        allowed, close = filtered(tempered, top_k=params.top_k, top_p=params.top_p)
        near_tie |= close
        perturbed = [
            float(np.float32(value) + gumbel(noise_key, start + position, step, token))
            for token, value in enumerate(allowed)
        ]
        tokens[position] = perturbed.index(max(perturbed))
        read = {
            "max": (row, row.index(max(row))),
            "sampled": (row, tokens[position]),
            "sampled_tempered": (tempered, tokens[position]),
            "sampled_filtered": (allowed, tokens[position]),
        }
        confidences[position] = log_odds(*read[params.confidence])
    best = max(confidences, key=lambda at: (confidences[at], -at))
    if params.unmasking == "threshold":
        bar = (
            math.inf
            if params.threshold == 1
            else math.log(params.threshold / (1 - params.threshold))
        )
        near_tie |= any(abs(value - bar) < near for value in confidences.values() if value != bar)
        above = [position for position, value in confidences.items() if value > bar]
        if above:
            return tuple((position, tokens[position]) for position in above), near_tie
    near_tie |= any(
        abs(confidences[at] - confidences[best]) < near
        and not (tokens[at] == tokens[best] and np.array_equal(logits[at], logits[best]))
        for at in confidences
        if at != best
    )
    return ((best, tokens[best]),), near_tie


def log_odds(row: Sequence[float], token: int) -> float:
    """log(p / (1 - p)) of a token under the softmax of a row of scores."""
    top = max(row)
    others = math.fsum(
        math.exp(value - top) for at, value in enumerate(row) if at != token and value > -math.inf
    )
    return math.inf if others == 0 else row[token] - top - math.log(others)


def filtered(row: Sequence[float], *, top_k: int, top_p: float) -> tuple[list[float], bool]:
    """The row with all but its top-k, and of those the nucleus, at -inf; and if it was close.

    The nucleus is the shortest head of the ranking (by score, then by id) that holds `top_p`.
    """
    ranking = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if top_k > 0:
        ranking = ranking[:top_k]
    near_tie = False
    if top_p < 1:
        weights = [math.exp(row[token] - row[ranking[0]]) for token in ranking]
        total = math.fsum(weights)
        above = [math.fsum(weights[:rank]) / total for rank in range(len(ranking))]
        near_tie = any(abs(mass - top_p) < 1e-6 for mass in above)
        ranking = [token for token, mass in zip(ranking, above, strict=True) if mass < top_p]
    allowed = set(ranking)
    return [value if at in allowed else -math.inf for at, value in enumerate(row)], near_tie


def gumbel(key: int, position: int, step: int, token: int) -> np.float32:
    """The noise at an address: float64 throughout, rounded once."""
    bits = philox((token // 4, position, step, 0), (key & _WORD, key >> 32 & _WORD))[token % 4]
    uniform = (bits + 0.5) / 2**32
    return np.float32(-math.log(-math.log1p(-uniform)))


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers (Salmon et al., SC 2011, figure 4)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c0, 1 << 32)
        high_1, low_1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
