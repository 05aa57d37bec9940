"""The plain loop over transformers' own model writes what the engine writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.plain import PlainLoop
from spot_batch.lab.bench.questions import make_requests, read_questions
from spot_batch.models.block import load_target
from spot_batch.records.sampling import Request, SamplingParams, Unmasking
from tests.exact.harness import decode_all
from tests.families import write_checkpoint

NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return resolve_model("bundled-b16")


def requests(info: ModelInfo, **fields: object) -> list[Request]:
    params = SamplingParams(
        max_new_tokens=40, stop_ids=info.stop_ids, confidence=info.family.confidence
    )
    return make_requests(
        info,
        read_questions(None, limit=NUM_PROMPTS),
        replace(params, **fields),  # type: ignore[arg-type]
    )


def engines(info: ModelInfo, wanted: Sequence[Request]) -> dict[int, tuple[int, ...]]:
    done = decode_all(load_target(info), None, EngineSettings(max_sequences=4), wanted)
    return {each.sample_id: each.token_ids for each in done}


@pytest.mark.parametrize("unmasking", ["single", "threshold"])
def test_one_at_a_time_and_as_a_batch_the_tokens_are_the_engines(
    info: ModelInfo, unmasking: Unmasking
) -> None:
    wanted = requests(info, unmasking=unmasking)
    short = replace(wanted[1].params, max_new_tokens=5)
    wanted[1] = replace(wanted[1], prompt_ids=wanted[1].prompt_ids[:3], params=short)
    lengths = {len(each.prompt_ids) // info.block_length for each in wanted}
    assert len(lengths) > 1, "the batch is padded"
    expected, loop = engines(info, wanted), PlainLoop(info)
    assert [loop.decode([each])[0] for each in wanted] == [expected[at] for at in range(4)]
    assert loop.decode(wanted) == [expected[at] for at in range(4)]


def test_noise_is_addressed_here_too(info: ModelInfo) -> None:
    wanted = requests(info, temperature=0.7)
    expected = engines(info, wanted)
    assert PlainLoop(info).decode(wanted) == [expected[at] for at in range(4)]


def test_a_family_that_transformers_has_under_no_name_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "llada2")
    with pytest.raises(ValueError, match=r"the plain loop knows sdar, .* is llada2"):
        PlainLoop(resolve_model(str(folder)))
