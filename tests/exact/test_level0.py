"""Level 0: on a target of integers, whatever the drafter, the budget or the batch, 100 % identical.

Cases are dealt from the product of all settings by a fixed seed: every value of a factor comes up
equally often, and so does every drafter x budget x crossing x batch size.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import pytest

from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request, SamplingParams
from tests.exact.harness import (
    DRAFTERS,
    OracleDrafter,
    Trace,
    decode_all,
    make_drafter,
    same_sample,
)
from tests.exact.mock_target import IntegerTarget
from tests.exact.reference import Decoded, decode
from tests.tally import Tally

pytestmark = [pytest.mark.exact, pytest.mark.usefixtures("one_thread")]

BUDGETS = (0, 1, 4, 8, 20)
BATCHES = (1, 3, 8)
NUM_CHUNKS = 12
CASES_A_CHUNK = 16
VARIANTS_A_CASE = 7
REQUESTS_A_CASE = 8
CORE_CHUNKS = 2
FILTERS = ((0, 1.0), (3, 1.0), (0, 0.83), (4, 0.7))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to decode the samples of a case."""

    drafter: str
    settings: EngineSettings
    order: tuple[int, ...]
    at_once: int
    audits: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A target, some requests and the ways in which they are decoded."""

    target: IntegerTarget
    requests: tuple[Request, ...]
    variants: tuple[Variant, ...]
    record_every: int


def spelled(tokens: Sequence[int]) -> str:
    """Two letters a token, the second shared by many, so that a text can begin inside one."""
    return "".join(f"{chr(97 + token)}{'xyz'[token % 3]}" for token in tokens)


def deal(rng: Random, values: Sequence[Any], count: int) -> list[Any]:
    """`count` of the values, each as often as the others, shuffled."""
    dealt = list(itertools.islice(itertools.cycle(values), count))
    rng.shuffle(dealt)
    return dealt


@cache
def all_cases() -> tuple[Case, ...]:
    rng = Random(20260301)
    num_cases = NUM_CHUNKS * CASES_A_CHUNK
    num_variants = num_cases * VARIANTS_A_CASE
    ways = deal(
        rng, list(itertools.product(DRAFTERS, BUDGETS, (True, False), BATCHES)), num_variants
    )
    floors = deal(rng, (0.0, 0.0, 0.1, 0.4), num_variants)
    max_slots = deal(rng, (1024, 1024, 2, 3, 7), num_variants)
    factors = zip(
        deal(rng, (1, 2, 3, 4, 4, 5, 6), num_cases),
        deal(rng, (8, 9, 11, 14), num_cases),
        deal(rng, (True, False), num_cases),
        deal(rng, (0.0, 0.7, 0.7, 1.5), num_cases),
        deal(rng, FILTERS, num_cases),
        deal(
            rng,
            list(
                itertools.product(
                    ("max", "sampled", "sampled_tempered", "sampled_filtered"),
                    ("single", "single", "threshold"),
                    ("position_step", "position"),
                )
            ),
            num_cases,
        ),
        deal(rng, (0.3, 0.6, 0.9, 1.0), num_cases),
        deal(rng, ("early", "block", "never"), num_cases),
        deal(rng, (0, 1, 1, 2), num_cases),
        strict=True,
    )
    cases = []
    for index, (
        width,
        vocab,
        mask_first,
        heat,
        (top_k, top_p),
        rule,
        bar,
        stop_at,
        stops,
    ) in enumerate(factors):
        confidence, unmasking, noise_rule = rule
        mask_id = 0 if mask_first else vocab - 1
        params = SamplingParams(
            max_new_tokens=1,
            temperature=heat,
            top_k=top_k,
            top_p=top_p,
            unmasking=unmasking,
            threshold=bar,
            stop_at=stop_at,
            stop_ids=tuple(rng.sample([t for t in range(vocab) if t != mask_id], stops)),
            stop=rng.choice(((), (), ("xb",), ("zc", "eyf", "g"))),
            confidence=confidence,
            noise_rule=noise_rule,
        )
        masks_in_prompts = rng.randrange(8) == 0
        requests = make_requests(
            rng,
            width=width,
            letters=[t for t in range(vocab) if t != mask_id or masks_in_prompts],
            params=params,
            mixed=rng.randrange(4) == 0,
        )
        variants = []
        for at in range(index * VARIANTS_A_CASE, (index + 1) * VARIANTS_A_CASE):
            drafter, budget, crossing, max_sequences = ways[at]
            order = list(range(len(requests)))
            rng.shuffle(order)
            # One sample at a time is slow, and half of them say as much.
            order = order if max_sequences > 1 else order[: len(order) // 2]
            variants.append(
                Variant(
                    drafter=drafter,
                    settings=EngineSettings(
                        max_sequences=max_sequences,
                        budget=budget,
                        gamma=floors[at],
                        crossing=crossing,
                        max_slots=max_slots[at],
                    ),
                    order=tuple(order),
                    at_once=rng.randint(1, len(order)),
                    audits=tuple(rng.sample(order, 2)),
                    seed=at,
                )
            )
        target = IntegerTarget(
            block_length=width,
            vocab_size=vocab,
            seed=index,
            mask_id=mask_id,
            wobble=rng.choice((1, 2, 4)),
            prompts_hold_masks=masks_in_prompts,
        )
        is_single = all(request.params.unmasking == "single" for request in requests)
        cases.append(
            Case(
                target=target,
                requests=requests,
                variants=tuple(variants),
                record_every=rng.choice((0, 3)) if is_single else 0,
            )
        )
    return tuple(cases)


def make_requests(
    rng: Random, *, width: int, letters: Sequence[int], params: SamplingParams, mixed: bool
) -> tuple[Request, ...]:
    """Prompts of every length modulo the block, the empty one and shorter ones among them."""
    requests = []
    for number in range(REQUESTS_A_CASE):
        length = number % width + width * rng.choice((0, 1, 1, 3))
        own = replace(params, max_new_tokens=rng.randint(1, 2 * width + 4))
        if mixed:
            own = replace(
                own,
                temperature=rng.choice((0.0, 0.7, 1.5)),
                top_k=rng.choice((0, 2, 5)),
                stop_at=rng.choice(("early", "block", "never")),
                unmasking=rng.choice(("single", "threshold")),
                noise_rule=rng.choice(("position_step", "position")),
            )
        requests.append(
            Request(
                sample_id=1000 + number,
                prompt_ids=tuple(rng.choice(letters) for _ in range(length)),
                noise_key=rng.getrandbits(64),
                params=own,
            )
        )
    return tuple(requests)


def by_reference(target: IntegerTarget, request: Request) -> Decoded:
    return decode(
        target.logits_of,
        prompt=request.prompt_ids,
        params=request.params,
        noise_key=request.noise_key,
        block_length=target.block_length,
        mask_id=target.mask_id,
        spell=spelled,
    )


def traces_of(target: IntegerTarget, requests: Sequence[Request]) -> dict[int, Trace]:
    return {request.noise_key: by_reference(target, request).trace for request in requests}


def draft_free(case: Case) -> dict[int, Completion]:
    """Every sample alone, without a drafter: what all else is compared with."""
    done = decode_all(
        case.target,
        None,
        EngineSettings(max_sequences=1),
        case.requests,
        decode=spelled,
        record_every=case.record_every,
    )
    return {completion.sample_id: completion for completion in done}


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(chunk, marks=() if chunk < CORE_CHUNKS else (pytest.mark.slow,))
        for chunk in range(NUM_CHUNKS)
    ],
)
def test_no_drafter_budget_or_batch_changes_a_sample(chunk: int, tally: Tally) -> None:
    num_saved = num_near_ties = 0
    before = len(tally.differing)
    for case in all_cases()[chunk * CASES_A_CHUNK : (chunk + 1) * CASES_A_CHUNK]:
        truth = draft_free(case)
        traces: dict[int, Trace] = {}
        for request in case.requests:
            reference, ours = by_reference(case.target, request), truth[request.sample_id]
            traces[request.noise_key] = reference.trace
            num_near_ties += reference.near_tie
            if not reference.near_tie:
                tally.add(
                    same=agrees(reference, ours), what=("reference", request, reference, ours)
                )
            assert ours.stats.num_forwards == ours.num_draft_free_forwards
            num_blocks = len({start for start, _ in reference.trace})
            assert reference.near_tie or ours.stats.num_clean_passes == num_blocks - 1
        for variant in case.variants:
            drafter = make_drafter(variant.drafter, case.target, traces, seed=variant.seed)
            asked = [case.requests[index] for index in variant.order]
            asked += [replace(case.requests[index], draft_free=True) for index in variant.audits]
            done = decode_all(
                case.target,
                drafter,
                variant.settings,
                asked,
                at_once=variant.at_once,
                decode=spelled,
                record_every=case.record_every,
            )
            counts = Counter(completion.sample_id for completion in done)
            assert counts == Counter(request.sample_id for request in asked)
            for completion in done:
                expected = truth[completion.sample_id]
                same = same_sample(completion, expected)
                tally.add(same=same, what=(variant, completion, expected))
                saved = expected.stats.num_forwards - completion.stats.num_forwards
                assert saved >= 0, f"drafting took more forwards: {variant} {completion}"
                assert completion.stats.num_clean_passes == expected.stats.num_clean_passes
                num_saved += saved
    assert tally.differing[before:] == []
    assert num_saved > 200, "nothing was accepted: the walk was not tested"
    assert num_near_ties < 0.4 * CASES_A_CHUNK * REQUESTS_A_CASE, num_near_ties


def agrees(reference: Decoded, ours: Completion) -> bool:
    """An independent decoder and the engine, draft-free, say the same."""
    return (
        ours.token_ids == reference.token_ids
        and ours.commit_step == reference.commit_step
        and ours.finish_reason == reference.finish_reason
        and ours.text == reference.text
        and ours.num_draft_free_forwards == reference.num_forwards
    )


def test_the_cases_cover_the_product_of_the_settings() -> None:
    cases = all_cases()
    variants = [variant for case in cases for variant in case.variants]
    ways = Counter(
        (v.drafter, v.settings.budget, v.settings.crossing, v.settings.max_sequences)
        for v in variants
    )
    assert len(ways) == len(DRAFTERS) * len(BUDGETS) * 2 * len(BATCHES)
    assert min(ways.values()) >= 5
    rules = Counter(
        (
            request.params.confidence,
            request.params.unmasking,
            request.params.noise_rule,
            request.params.temperature > 0,
        )
        for case in cases
        for request in case.requests
    )
    assert len(rules) == 4 * 2 * 2 * 2
    remainders = {
        (case.target.block_length, len(request.prompt_ids) % case.target.block_length)
        for case in cases
        for request in case.requests
    }
    assert remainders == {(width, r) for width in (1, 2, 3, 4, 5, 6) for r in range(width)}
    shorter = [
        0 < len(request.prompt_ids) < case.target.block_length
        for case in cases
        for request in case.requests
    ]
    assert sum(shorter) > 100
    assert sum(bool(case.requests[0].params.stop) for case in cases) > 50
    assert sum(bool(case.record_every) for case in cases) > 20
    num_sequences = sum(len(variant.order) + len(variant.audits) for variant in variants)
    assert num_sequences >= 10_000, num_sequences


def floor_of_forwards(*, width: int, num_blocks: int, budget: int, crossing: bool) -> int:
    """Forwards of a drafter that is always right, one commit a state, prompt of whole blocks.

    A block's first forward has nothing to draft from unless the block before was crossed; a
    crossing takes two slots and is worth one commit of the next block.
    """
    num_forwards, block, left, stale = 0, 0, width, False
    while block < num_blocks:
        num_forwards += 1
        drafted = min(budget, left - 1) if stale else 0
        # The states before it, then two slots for the complete one and the block behind it.
        crosses = stale and crossing and block + 1 < num_blocks
        crosses = crosses and budget >= (left - 1) + 2
        left = 0 if crosses else left - drafted - 1
        stale = True
        if left == 0:
            block, left, stale = block + 1, width, False
            if crosses:
                left, stale = left - 1, True
            if left == 0:
                block, left, stale = block + 1, width, False
    return num_forwards


@pytest.mark.parametrize("crossing", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("width", [1, 2, 4, 7, 8])
def test_a_drafter_that_is_always_right_reaches_the_floor(
    width: int, budget: int, crossing: bool
) -> None:
    num_blocks = 3
    target = IntegerTarget(block_length=width, seed=width)
    params = SamplingParams(max_new_tokens=width * num_blocks, stop_at="never")
    request = Request(sample_id=0, prompt_ids=(1,) * width, noise_key=7, params=params)
    oracle = OracleDrafter(traces_of(target, [request]))
    settings = EngineSettings(max_sequences=1, budget=budget, crossing=crossing)
    (done,) = decode_all(target, oracle, settings, [request])
    floor = floor_of_forwards(width=width, num_blocks=num_blocks, budget=budget, crossing=crossing)
    assert done.num_draft_free_forwards == width * num_blocks
    assert done.stats.num_forwards == floor
    if budget == 0:
        assert floor == width * num_blocks
    assert done.stats.num_accepted == done.num_draft_free_forwards - done.stats.num_forwards


@pytest.mark.parametrize("stop_at", ["early", "block", "never"])
@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_sample_is_a_prefix_of_a_longer_one(
    temperature: float, unmasking: str, stop_at: str
) -> None:
    rng = Random(5)
    ends = Counter()
    for seed in range(8):
        target = IntegerTarget(block_length=rng.choice((3, 4, 5)), seed=seed, vocab_size=14)
        params = SamplingParams(
            max_new_tokens=6,
            temperature=temperature,
            unmasking=unmasking,  # type: ignore[arg-type]
            threshold=0.6,
            stop_at=stop_at,  # type: ignore[arg-type]
            stop_ids=(3,),
        )
        short = [
            Request(
                sample_id=index,
                prompt_ids=tuple(rng.choices(range(13), k=index)),
                noise_key=rng.getrandbits(64),
                params=replace(params, max_new_tokens=rng.randint(1, 9)),
            )
            for index in range(8)
        ]
        long = [
            replace(
                request,
                params=replace(request.params, max_new_tokens=2 * request.params.max_new_tokens),
            )
            for request in short
        ]
        settings = EngineSettings(max_sequences=8, budget=4)
        briefly = {c.sample_id: c for c in decode_all(target, RankingDrafter(), settings, short)}
        for at_length in decode_all(target, None, settings, long):
            brief = briefly[at_length.sample_id]
            num = len(brief.token_ids)
            assert at_length.token_ids[:num] == brief.token_ids
            assert at_length.commit_step[:num] == brief.commit_step
            if brief.finish_reason == "stop":
                assert (at_length.token_ids, at_length.finish_reason) == (brief.token_ids, "stop")
            else:
                assert num == short[at_length.sample_id].params.max_new_tokens
            ends[brief.finish_reason, at_length.finish_reason] += 1
    assert ends["length", "length"] > 5
    assert stop_at == "never" or (ends["stop", "stop"] and ends["length", "stop"])


def test_the_integer_target_shows_a_cache_that_is_wrong() -> None:
    """Without this the rest of the file would prove nothing."""
    target = IntegerTarget(block_length=4, seed=1)
    states = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 4, 3], [1, 2, 3, target.mask_id]]
    blank = [target.mask_id] * 4
    seen = [target.logits_of(state, blank).tobytes() for state in states]
    assert len(set(seen)) == len(states), "the prefix does not show"
    assert target.logits_of([], blank).tobytes() not in seen
    within = [target.logits_of([], state).tobytes() for state in states]
    assert len(set(within)) == len(states), "the state of the block does not show"
    swapped = [states[1] + states[2], states[2] + states[1]]
    assert len({target.logits_of(two, blank).tobytes() for two in swapped}) == 2
