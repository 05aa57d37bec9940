"""Where samples end: ids, texts and lengths, early, at block ends and never."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.stops import End, cut_at_text, find_end
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request, SamplingParams
from tests.tiny_models import write_target


def spelled(tokens: object) -> str:
    """Two letters a token, so that a text can begin inside one."""
    return "".join(f"{chr(97 + token)}{token}" for token in tokens)  # type: ignore[attr-defined]


def params(**given: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 8, "stop_ids": (9,), **given})  # type: ignore[arg-type]


def test_the_first_stop_id_ends_a_sample_and_is_left_out() -> None:
    assert find_end([1, 2, 9, 9], params(), whole=False, decode=None) == End("stop", 2)


def test_a_stop_id_behind_the_limit_does_not_count() -> None:
    found = find_end([1, 2, 3, 9], params(max_new_tokens=3), whole=True, decode=None)
    assert found == End("length", 3)


def test_block_waits_for_the_whole_block() -> None:
    assert find_end([1, 9], params(stop_at="block"), whole=False, decode=None) is None
    assert find_end([1, 9], params(stop_at="block"), whole=True, decode=None) == End("stop", 1)


def test_never_goes_on_to_the_limit_and_keeps_the_stop_ids() -> None:
    never = params(stop_at="never", max_new_tokens=4)
    assert find_end([1, 9, 2], never, whole=True, decode=None) is None
    assert find_end([1, 9, 2, 3, 4], never, whole=True, decode=None) == End("length", 4)


def test_a_stop_text_is_cut_out_with_everything_behind_it() -> None:
    assert cut_at_text([0, 1, 2, 3], ["b1"], spelled) == End("stop", 1, "a0")


def test_a_stop_text_may_begin_inside_a_token() -> None:
    assert cut_at_text([0, 1, 2, 3], ["1c"], spelled) == End("stop", 1, "a0b")


def test_the_earliest_of_several_stop_texts_wins() -> None:
    assert cut_at_text([0, 1, 2, 3], ["d3", "c2"], spelled) == End("stop", 2, "a0b1")


def test_of_overlapping_stop_texts_the_one_that_is_complete_first_cuts() -> None:
    whole = cut_at_text([0, 1, 2, 3], ["a0b1c2", "b1"], spelled)
    assert whole == cut_at_text([0, 1], ["a0b1c2", "b1"], spelled) == End("stop", 1, "a0")


def test_a_stop_text_behind_a_stop_id_does_not_count() -> None:
    found = find_end([0, 9, 1], params(stop=("b1",)), whole=False, decode=spelled)
    assert found == End("stop", 1)


def test_a_text_that_is_not_there_cuts_nothing() -> None:
    assert cut_at_text([0, 1], ["z"], spelled) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


@pytest.fixture(scope="module")
def target(folder: Path) -> BlockTarget:
    return load_target(resolve_model(str(folder)))


def decode_all(
    folder: Path, target: BlockTarget, *, budget: int, sequences: int, stop: tuple[str, ...]
) -> dict[int, Completion]:
    tokenizer = load_tokenizer(folder)
    engine = Engine(
        target,
        RankingDrafter(),
        EngineSettings(max_sequences=sequences, budget=budget),
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )
    rng = random.Random(0)
    for sample_id in range(12):
        prompt = tuple(rng.randrange(256) for _ in range(rng.randrange(1, 20)))
        asked = SamplingParams(max_new_tokens=40, temperature=1.0, stop=stop)
        engine.add(Request(sample_id=sample_id, prompt_ids=prompt, noise_key=7, params=asked))
    done: dict[int, Completion] = {}
    while engine.has_work:
        done |= {completion.sample_id: completion for completion in engine.step()}
    return done


def test_stop_texts_end_drafted_samples_where_they_end_draft_free_ones(
    folder: Path, target: BlockTarget
) -> None:
    free = decode_all(folder, target, budget=0, sequences=1, stop=())
    tokenizer = load_tokenizer(folder)
    texts = [
        tokenizer.decode(list(one.token_ids), skip_special_tokens=True) for one in free.values()
    ]
    stop = (texts[0][10:12], texts[1][5:6])
    base = decode_all(folder, target, budget=0, sequences=1, stop=stop)
    found = decode_all(folder, target, budget=6, sequences=5, stop=stop)
    assert any(one.text is not None for one in base.values()), "no sample was cut"
    for sample_id, completion in base.items():
        other = found[sample_id]
        assert (other.token_ids, other.text) == (completion.token_ids, completion.text)
        whole = tokenizer.decode(list(free[sample_id].token_ids), skip_special_tokens=True)
        if completion.text is not None:
            assert whole.startswith(completion.text)
            assert not any(one in completion.text for one in stop)


def test_stop_texts_without_a_tokenizer_are_refused(target: BlockTarget) -> None:
    engine = Engine(target, None, EngineSettings())
    asked = SamplingParams(max_new_tokens=4, stop=("x",))
    with pytest.raises(ValueError, match="stop strings need an engine"):
        engine.add(Request(sample_id=0, prompt_ids=(1,), noise_key=0, params=asked))
