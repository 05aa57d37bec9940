"""The law of what is written, against exact enumeration (equivalence.md, L3).

`Fresh` decoding draws new independent noise at every forward; its law over whole samples follows
from the target's logits by going through all states. Decoded samples must follow it for every
confidence rule where noise is keyed by position and step; with noise keyed by position alone they
must where the choice of the position ignores the sampled token, and must not where it does not.

Every accepting test alarms falsely with a probability below `ALPHA` over all choices of its seeds;
these are fixed, so a test that has passed once passes always.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.engine.transition import Rule, States, transition
from spot_batch.records.sampling import Request, SamplingParams
from tests.exact.harness import RandomDrafter, decode_all
from tests.exact.mock_target import IntegerTarget
from tests.tally import Tally

pytestmark = [
    pytest.mark.exact,
    pytest.mark.stat,
    pytest.mark.usefixtures("one_thread"),
]

ALPHA = 1e-4
"""Of one chi-square test; about 40 of them here, so 0.4 % for the file."""

NUM_BLOCKS = 2
NUM_SAMPLES = 120_000

RULES = ("max", "sampled", "sampled_tempered", "sampled_filtered")

Block = tuple[int, ...]
"""Tokens of one block, the mask id where masked."""


@dataclass(frozen=True, slots=True)
class World:
    """A tiny target with generic logits: no ties, so that float32 and float64 choose alike."""

    target: IntegerTarget
    params: SamplingParams

    @property
    def blank(self) -> Block:
        return (self.target.mask_id,) * self.target.block_length


def world(
    width: int, vocab_size: int, *, seed: int = 0, scale: float = 2.5, **params: Any
) -> World:
    target = IntegerTarget(
        block_length=width, vocab_size=vocab_size, seed=seed, ties=False, scale=scale
    )
    fixed = {"temperature": 1.0, "stop_at": "never", "threshold": 0.55}
    sampling = SamplingParams(max_new_tokens=NUM_BLOCKS * width, **(fixed | params))
    return World(target, sampling)


def fresh_law(here: World) -> dict[tuple[int, ...], float]:
    """The probability of every sample of two blocks under fresh noise, by enumeration."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_BLOCKS):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            for block, share in block_law(here, prefix).items():
                longer[prefix + block] = longer.get(prefix + block, 0.0) + mass * share
        law = longer
    return law


def block_law(here: World, prefix: tuple[int, ...]) -> dict[Block, float]:
    """The law of the block behind a prefix: states in the order of their number of masks."""
    mask = here.target.mask_id
    states = {here.blank: 1.0}
    done: dict[Block, float] = {}
    while states:
        state = max(states, key=lambda block: block.count(mask))
        mass = states.pop(state)
        for following, share in step_law(here, prefix, state).items():
            into = states if mask in following else done
            into[following] = into.get(following, 0.0) + mass * share
    return done


def step_law(here: World, prefix: tuple[int, ...], state: Block) -> dict[Block, float]:
    """The law of the next state: every joint draw at the masked positions, and what it commits."""
    params = here.params
    masked = [at for at, token in enumerate(state) if token == here.target.mask_id]
    logits = here.target.logits_of(prefix, state).astype(np.float64)
    tempered = logits / params.temperature
    allowed = np.stack([keep(row, top_k=params.top_k, top_p=params.top_p) for row in tempered])
    chances = [softmax(allowed[at]) for at in masked]
    read = {
        "max": logits,
        "sampled": logits,
        "sampled_tempered": tempered,
        "sampled_filtered": allowed,
    }[params.confidence]
    law: dict[Block, float] = {}
    for drawn in itertools.product(*(np.flatnonzero(chance) for chance in chances)):
        mass = math.prod(chance[token] for chance, token in zip(chances, drawn, strict=True))
        tokens = dict(zip(masked, (int(token) for token in drawn), strict=True))
        confidence = {
            at: softmax(read[at])[int(read[at].argmax()) if params.confidence == "max" else token]
            for at, token in tokens.items()
        }
        chosen = [max(masked, key=lambda at: (confidence[at], -at))]
        if params.unmasking == "threshold":
            above = [at for at in masked if confidence[at] > params.threshold]
            chosen = above or chosen
        following = tuple(tokens[at] if at in chosen else token for at, token in enumerate(state))
        law[following] = law.get(following, 0.0) + mass
    return law


def keep(row: np.ndarray, *, top_k: int, top_p: float) -> np.ndarray:
    """A row with all but its top-k, and of those the nucleus, at -inf."""
    ranking = np.argsort(-row, kind="stable")
    ranking = ranking[:top_k] if top_k else ranking
    share = softmax(row[ranking])
    ranking = ranking[np.cumsum(share) - share < top_p]
    kept = np.full_like(row, -np.inf)
    kept[ranking] = row[ranking]
    return kept


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def samples_by_transition(here: World, num: int, *, seed: int) -> np.ndarray:
    """(num, two blocks) tokens: the engine's own transition, over all samples at once."""
    target, params, width = here.target, here.params, here.target.block_length
    keys = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, num))
    prefixes = np.zeros((num, 0), dtype=np.int64)
    for block in range(NUM_BLOCKS):
        state = np.full((num, width), target.mask_id)
        while (masked := state == target.mask_id).any():
            going = np.flatnonzero(masked.any(axis=1))
            so_far = np.concatenate((prefixes[going], state[going]), axis=1)
            _, first, kind = np.unique(
                codes(so_far, target.vocab_size), return_index=True, return_inverse=True
            )
            table = np.stack(
                [target.logits_of(k[: block * width], k[block * width :]) for k in so_far[first]]
            )
            num_here = len(going)
            states = States(
                masked=torch.from_numpy(masked[going]),
                start=torch.full((num_here,), block * width),
                num_committed=torch.from_numpy((~masked[going]).sum(axis=1)),
                noise_key=keys[going],
                temperature=torch.full((num_here,), params.temperature),
                top_p=torch.full((num_here,), params.top_p),
                top_k=torch.full((num_here,), params.top_k),
            )
            logits = torch.from_numpy(table)[torch.from_numpy(kind)]
            choice = transition(logits, states, Rule.of(params))
            state[going] = np.where(choice.commit.numpy(), choice.token.numpy(), state[going])
        prefixes = np.concatenate((prefixes, state), axis=1)
    return prefixes


def codes(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """(n, L) ids -> (n,) one number for each different row."""
    return tokens @ vocab_size ** np.arange(tokens.shape[1])


def p_value(law: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], int]) -> float:
    """Chi-square of counts against a law; outcomes expected less than ten times are one."""
    num = sum(counts.values())
    assert set(counts) <= set(law), "a sample was written that cannot be"
    rare = {outcome for outcome, mass in law.items() if mass * num < 10}
    cells = [
        (counts.get(outcome, 0), mass * num) for outcome, mass in law.items() if outcome not in rare
    ]
    if rare:
        found = sum(counts.get(outcome, 0) for outcome in rare)
        cells.append((found, num * sum(law[outcome] for outcome in rare)))
    assert len(cells) > 3, "too few outcomes to tell anything"
    chi_square = sum((found - expected) ** 2 / expected for found, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def count(samples: np.ndarray | Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    tokens = np.asarray(samples)
    _, first, counts = np.unique(codes(tokens, 16), return_index=True, return_counts=True)
    return {
        tuple(int(token) for token in tokens[at]): int(number)
        for at, number in zip(first, counts, strict=True)
    }


FILTERS = [
    pytest.param({}, id="unfiltered"),
    pytest.param({"top_k": 2}, id="top-k", marks=pytest.mark.slow),
    pytest.param({"top_p": 0.75}, id="top-p", marks=pytest.mark.slow),
    pytest.param({"top_k": 2, "top_p": 0.85, "temperature": 0.8}, id="both"),
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("confidence", RULES)
def test_noise_by_position_and_step_has_the_law_of_fresh_noise(
    confidence: str, unmasking: str, filters: dict[str, Any]
) -> None:
    width = 3 if not filters else 2
    here = world(width, 4, seed=width, confidence=confidence, unmasking=unmasking, **filters)
    law = fresh_law(here)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    found = p_value(law, count(samples_by_transition(here, NUM_SAMPLES, seed=17)))
    assert found > ALPHA, f"p = {found:.2e}"


@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("filters", FILTERS[:2])
def test_noise_by_position_has_the_law_of_fresh_noise_where_the_order_ignores_the_draw(
    filters: dict[str, Any], unmasking: str
) -> None:
    here = world(
        3, 4, seed=1, confidence="max", noise_rule="position", unmasking=unmasking, **filters
    )
    found = p_value(fresh_law(here), count(samples_by_transition(here, NUM_SAMPLES, seed=23)))
    assert found > ALPHA, f"p = {found:.2e}"


@pytest.mark.parametrize("confidence", RULES[1:])
def test_noise_by_position_has_another_law_where_the_order_depends_on_the_draw(
    confidence: str,
) -> None:
    here = world(3, 4, seed=1, confidence=confidence, noise_rule="position", top_k=3)
    found = p_value(fresh_law(here), count(samples_by_transition(here, NUM_SAMPLES, seed=29)))
    assert found < 1e-12, f"p = {found:.2e}: the test has no power"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another rule", {"confidence": "max"}),
        ("a temperature 6 % higher", {"temperature": 1.06}),
        ("no filter", {"top_k": 0}),
        ("one commit a step", {"unmasking": "single"}),
    ],
)
def test_a_slightly_wrong_decoder_is_rejected(name: str, change: dict[str, Any]) -> None:
    right: dict[str, Any] = {"confidence": "sampled_tempered"}
    right["top_k"] = 2 if "top_k" in change else 0
    right["unmasking"] = "threshold" if "unmasking" in change else "single"
    law = fresh_law(world(3, 4, seed=6, **right))
    wrong = world(3, 4, seed=6, **(right | change))
    counts = count(samples_by_transition(wrong, NUM_SAMPLES, seed=31))
    found = 0.0 if not set(counts) <= set(law) else p_value(law, counts)
    assert found < 1e-6, f"{name}: p = {found:.2e}"


@pytest.mark.parametrize(
    ("num", "width"),
    [(6_000, 2), pytest.param(100_000, 2, marks=pytest.mark.slow)],
)
def test_drafted_samples_of_the_whole_engine_have_the_law(
    num: int, width: int, tally: Tally
) -> None:
    """Half of them drafted by rank, half at random; crossing on; two hundred and fifty at once."""
    here = world(width, 4, seed=4, confidence="sampled_tempered", scale=4.0)
    keys = np.random.default_rng(41).integers(0, 2**63, num).tolist()
    requests = [
        Request(sample_id=index, prompt_ids=(), noise_key=2 * key + 1, params=here.params)
        for index, key in enumerate(keys)
    ]
    settings = EngineSettings(max_sequences=250, budget=3)
    half = num // 2
    done = decode_all(here.target, RankingDrafter(), settings, requests[:half])
    done += decode_all(here.target, RandomDrafter(4, seed=1), settings, requests[half:])
    assert sum(completion.stats.num_accepted for completion in done) > num / 10
    found = p_value(fresh_law(here), count([completion.token_ids for completion in done]))
    tally.note(f"law of {num} drafted samples of the engine: p = {found:.3f}")
    assert found > ALPHA, f"p = {found:.2e}"
