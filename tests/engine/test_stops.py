"""Where samples end: ids, texts and lengths, early, at block ends and never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.sample import Sample
from spot_batch.engine.stops import ByteDecode, Decode, End, StopScan, cut_at_text, find_end
from spot_batch.job.limits import MAX_NEW_TOKENS
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.records.results import Begun, Completion, SampleStats
from spot_batch.records.sampling import Request, SamplingParams
from spot_batch.service.assemble import text_of
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


PIECES = (
    *(b"a", b"b", b"ab", b"ba\n", b"", b"a\xe4", b"\xe4", b"\xbd", b"\xa0", b"\xff", b"\xf0\x9f"),
    *("\u4f60".encode(), "b\u4f60a".encode(), "\ufffd".encode(), b"\x98\x80", b" "),
)
"""Whole characters, parts of some, and bytes that are none."""


def of_bytes(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")


def whole_text_end(
    tokens: Sequence[int], params: SamplingParams, *, whole: bool, decode: Decode
) -> End | None:
    """The definition: everything is decoded and looked at."""
    if params.stop_at != "early" and not whole:
        return None
    tokens = tokens[: params.max_new_tokens]
    if params.stop_at != "never":
        num_tokens = next(
            (at for at, token in enumerate(tokens) if token in params.stop_ids), len(tokens)
        )
        cut = cut_at_text(tokens[:num_tokens], params.stop, decode) if params.stop else None
        if cut is not None:
            return cut
        if num_tokens < len(tokens):
            return End("stop", num_tokens)
    return End("length", len(tokens)) if len(tokens) == params.max_new_tokens else None


stop_texts = st.text("ab \n\u4f60\ufffd\U0001f600", min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=40),
    grows=st.lists(st.integers(1, 6), min_size=40, max_size=40),
    stop=st.lists(stop_texts, max_size=3),
    stop_ids=st.sets(st.integers(0, 40), max_size=2),
    stop_at=st.sampled_from(["early", "early", "block", "never"]),
    max_new_tokens=st.integers(1, 45),
    bytewise=st.booleans(),
)
def test_looking_at_the_tail_alone_finds_what_looking_at_all_of_it_finds(
    tokens: list[int],
    grows: list[int],
    stop: list[str],
    stop_ids: set[int],
    stop_at: Any,
    max_new_tokens: int,
    bytewise: bool,
) -> None:
    asked = SamplingParams(
        max_new_tokens=max_new_tokens,
        stop=tuple(stop),
        stop_ids=tuple(stop_ids),
        stop_at=stop_at,
    )
    scan = StopScan(asked, ByteDecode(of_bytes) if bytewise else of_bytes)
    num_fixed = 0
    for grow in grows:
        num_fixed = min(num_fixed + grow, len(tokens))
        whole = num_fixed % 4 == 0 or num_fixed == len(tokens)
        expected = whole_text_end(tokens[:num_fixed], asked, whole=whole, decode=of_bytes)
        assert scan.find_end(tokens, num_fixed, whole=whole) == expected
        if expected is not None or num_fixed == len(tokens):
            return


def test_only_the_tail_is_decoded_and_scanned() -> None:
    decoded: list[int] = []

    class Counted(list[int]):
        """Says which of its tokens were looked at one by one."""

        read: ClassVar[list[int]] = []

        def __getitem__(self, at: Any) -> Any:
            if isinstance(at, int):
                self.read.append(at)
            return super().__getitem__(at)

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return of_bytes(tokens)

    tokens = Counted([0, 1, 4, 11] * 500)
    scan = StopScan(params(max_new_tokens=5000, stop=("aa", "bbb")), ByteDecode(decode))
    for num_fixed in range(1, len(tokens) + 1):
        assert scan.find_end(tokens, num_fixed, whole=False) is None
    assert max(decoded) == 1
    assert tokens.read == list(range(2000))


def test_a_tokenizer_of_bytes_decodes_in_parts_behind_whole_characters(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    text = text_of(tokenizer)
    assert isinstance(text, ByteDecode)
    written = " x\u4f60 y\U0001f600,  z "
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    cuts = [at for at in range(len(ids) + 1) if not text(ids[:at]).endswith("\ufffd")]
    assert 0 < len(cuts) <= len(ids), "some cuts are inside a character"
    assert {text(ids[:at]) + text(ids[at:]) for at in cuts} == {written}


def test_the_last_block_of_the_longest_sample_takes_steps_that_data_can_hold() -> None:
    width, longest = 32, MAX_NEW_TOKENS
    begun = Begun(
        token_ids=(1,) * (longest - width + 1),
        commit_step=tuple(range(longest - width + 1)),
        num_steps=longest - width + 1,
        stats=SampleStats(),
    )
    request = Request(
        sample_id=0,
        prompt_ids=(1,) * (width - 1),
        noise_key=0,
        params=SamplingParams(max_new_tokens=longest),
        begun=begun,
    )
    sample = Sample.of(request, row=0, width=width)
    for position in range(width - 1, -1, -1):  # one that counts comes last
        sample.commit(((position, 1),))
    end = sample.end_here()
    assert end == End("length", longest)
    steps = sample.completion(end).commit_step
    assert steps == (*begun.commit_step, 2**15 - 1, *range(2**15 - 1, 2**15 - width + 1, -1))
    assert pa.array(steps, pa.int16()).to_pylist() == list(steps)


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
        decode=text_of(tokenizer),
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


def test_a_token_that_a_stop_text_begins_in_is_in_the_text_alone(target: BlockTarget) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def decoded(*stop: str) -> Completion:
        engine = Engine(target, None, EngineSettings(), decode=decode)
        asked = SamplingParams(max_new_tokens=24, temperature=1.0, stop=stop)
        engine.add(Request(sample_id=0, prompt_ids=(1, 2), noise_key=7, params=asked))
        while engine.has_work:
            for completion in engine.step():
                return completion
        raise AssertionError("no completion")

    free = decoded()
    cut = free.token_ids[10]
    num_kept = free.token_ids.index(cut)
    found = decoded(f"{cut}>")
    assert found.finish_reason == "stop"
    assert found.token_ids == free.token_ids[:num_kept]
    assert found.commit_step == free.commit_step[:num_kept]
    assert found.text == decode(found.token_ids) + "<"


def test_stop_texts_without_a_tokenizer_are_refused(target: BlockTarget) -> None:
    engine = Engine(target, None, EngineSettings())
    asked = SamplingParams(max_new_tokens=4, stop=("x",))
    with pytest.raises(ValueError, match="stop strings need an engine"):
        engine.add(Request(sample_id=0, prompt_ids=(1,), noise_key=0, params=asked))
