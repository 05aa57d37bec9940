"""Level 1 on what we ship: the bundled targets, their trained drafters, draft-free bit for bit."""

from __future__ import annotations

from functools import cache

import pytest

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.registry import choose_drafter, load_drafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.questions import make_requests, read_questions
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request, SamplingParams
from tests.exact.harness import decode_all, same_sample
from tests.tally import Tally

pytestmark = [pytest.mark.exact, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NUM_PROMPTS = 10
NUM_TOKENS = 40
TEMPERATURES = (0.0, 1.0)
KINDS = (("bundled", "float32"), ("bundled", "bfloat16"), ("bundled-b16", "float32"))


@cache
def bundled(name: str, dtype: str) -> tuple[BlockTarget, Drafter]:
    info = resolve_model(name)
    drafter = load_drafter(choose_drafter("auto", info), block_length=info.block_length)
    assert drafter is not None
    return load_target(info, dtype=dtype), drafter


@cache
def draft_free(name: str, dtype: str, temperature: float) -> tuple[list[Request], list[Completion]]:
    """The requests, and each decoded alone with nothing drafted."""
    info = resolve_model(name)
    params = SamplingParams(
        max_new_tokens=NUM_TOKENS,
        temperature=temperature,
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
    requests = make_requests(info, read_questions(None, limit=NUM_PROMPTS), params)
    settings = EngineSettings(max_sequences=1, budget=0)
    return requests, decode_all(bundled(name, dtype)[0], None, settings, requests)


@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "settings",
    [
        EngineSettings(max_sequences=1, budget=8),
        EngineSettings(max_sequences=7, budget=20, gamma=0.1),
        EngineSettings(max_sequences=NUM_PROMPTS, budget=4, crossing=False),
    ],
    ids=["alone-D8", "7-gamma", "all-D4-no-crossing"],
)
def test_the_trained_drafter_changes_forwards_alone(
    settings: EngineSettings, temperature: float, name: str, dtype: str, tally: Tally
) -> None:
    target, drafter = bundled(name, dtype)
    requests, base = draft_free(name, dtype, temperature)
    found = decode_all(target, drafter, settings, requests)
    expected = {completion.sample_id: completion for completion in base}
    same = [same_sample(ours, expected[ours.sample_id]) for ours in found]
    for ours, agrees in zip(found, same, strict=True):
        tally.add(same=agrees, what=(name, dtype, temperature, settings, ours.sample_id))
    assert all(same)
    forwards = [sum(one.stats.num_forwards for one in run) for run in (found, base)]
    assert forwards[0] < 0.7 * forwards[1]
