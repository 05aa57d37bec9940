"""Logits that are not finite end their own sample, and no row of the cache hands them on."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.registry import resolve_model
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.models.attention import KVCache
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.models.numerics import measure_numerics
from spot_batch.records.results import Completion, Ended, NotFinite
from spot_batch.records.sampling import Request, SamplingParams
from tests.families import write_checkpoint
from tests.tiny_models import write_target

SETTINGS = [
    EngineSettings(max_sequences=1),
    EngineSettings(max_sequences=6),
    EngineSettings(max_sequences=4, budget=4),
    EngineSettings(max_sequences=6, budget=9, crossing=False),
]


class Leaving(BlockTarget):
    """Whose caches can be made all NaN, as samples that overflow leave their rows."""

    def allocate(self, num_rows: int, num_positions: int) -> KVCache:
        self.cache = super().allocate(num_rows, num_positions)
        return self.cache

    def leave(self) -> None:
        for layer in (*self.cache.keys, *self.cache.values):
            layer.fill_(torch.nan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), block_length=4, scale=3.0)


@pytest.fixture
def target(folder: Path) -> BlockTarget:
    return load_target(resolve_model(str(folder)))


def requests() -> list[Request]:
    rng = random.Random(0)
    params = SamplingParams(max_new_tokens=22, temperature=1.0)
    return [
        Request(
            sample_id=at,
            prompt_ids=tuple(rng.randrange(256) for _ in range(rng.randrange(1, 20))),
            noise_key=at,
            params=params,
        )
        for at in range(16)
    ]


def decoded(
    target: BlockTarget, wanted: list[Request], settings: EngineSettings
) -> dict[int, Ended]:
    engine = Engine(target, RankingDrafter(), settings)
    for request in wanted:
        engine.add(request)
    done: dict[int, Ended] = {}
    while engine.has_work:
        done |= {ended.sample_id: ended for ended in engine.step()}
    return done


def told(ended: Ended) -> Any:
    return ended.token_ids if isinstance(ended, Completion) else ended


def poison(target: BlockTarget, *tokens: int) -> None:
    """Make states that hold one of these tokens overflow."""
    embedding = target.body.network.model.embed_tokens
    assert isinstance(embedding, torch.nn.Embedding)
    embedding.weight[list(tokens)] = torch.nan


def in_waves(target: Leaving, wanted: list[Request], settings: EngineSettings) -> dict[int, Ended]:
    """As many at once as there are rows, so that each row is handed on with NaN in it."""
    engine = Engine(target, RankingDrafter(), settings)
    done: dict[int, Ended] = {}
    for at in range(0, len(wanted), settings.max_sequences):
        target.leave()
        for request in wanted[at : at + settings.max_sequences]:
            engine.add(request)
        while engine.has_work:
            done |= {ended.sample_id: ended for ended in engine.step()}
    return done


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_row_hands_nothing_on(
    folder: Path, target: BlockTarget, settings: EngineSettings
) -> None:
    info = resolve_model(str(folder))
    found = in_waves(Leaving(load_target(info).body, info), requests(), settings)
    expected = decoded(target, requests(), SETTINGS[0])
    assert found.keys() == expected.keys()
    for at, ended in found.items():
        assert isinstance(ended, Completion)
        assert told(ended) == told(expected[at])


@pytest.mark.parametrize("family", ["sdar-moe", "llada2"])
def test_a_row_hands_nothing_on_in_a_mixture_of_experts(tmp_path: Path, family: str) -> None:
    info = resolve_model(str(write_checkpoint(tmp_path / "model", family)))
    wanted = requests()[:8]
    found = in_waves(Leaving(load_target(info).body, info), wanted, SETTINGS[2])
    expected = decoded(load_target(info), wanted, SETTINGS[0])
    assert {at: told(ended) for at, ended in found.items()} == {
        at: told(ended) for at, ended in expected.items()
    }


def test_samples_that_overflow_end_alike_with_any_neighbours_and_budget(
    target: BlockTarget,
) -> None:
    wanted = requests()
    whole = decoded(target, wanted, SETTINGS[0])
    times = Counter(token for ended in whole.values() for token in told(ended))
    rarely = [token for token, num in sorted(times.items()) if num == 1]
    bad = {*rarely[:3], wanted[3].prompt_ids[0]}
    poison(target, *bad)
    expected = decoded(target, wanted, SETTINGS[0])
    failed = {at for at, ended in expected.items() if isinstance(ended, NotFinite)}
    prompts = {each.sample_id for each in wanted if set(each.prompt_ids) & bad}
    assert prompts < failed, "some come upon such a token as they write"
    assert len(failed) < len(wanted)
    for at in expected.keys() - failed:
        assert told(expected[at]) == told(whole[at]), "a neighbour of theirs was changed"
    for settings in SETTINGS[1:]:
        found = decoded(target, wanted, settings)
        assert {at: told(ended) for at, ended in found.items()} == {
            at: told(ended) for at, ended in expected.items()
        }


def test_the_error_says_where_it_was(target: BlockTarget) -> None:
    poison(target, 5)
    bad = Request(
        sample_id=5,
        prompt_ids=(1, 2, 3, 4, 5, 6),
        noise_key=0,
        params=SamplingParams(max_new_tokens=4),
    )
    ended = decoded(target, [bad], SETTINGS[0])[5]
    assert ended == NotFinite(sample_id=5, start=4, step=0, num_prompt_tokens=6)
    error = ended.error()
    assert (error.code, error.stage) == ("not_finite", "decode")
    assert "forward 0, in the block that begins at position 4 (6 prompt tokens)" in error.message


def test_a_run_stops_at_a_sample_that_overflows(target: BlockTarget) -> None:
    target.body.network.lm_head.weight[9] = torch.inf
    engine = Engine(target, None, EngineSettings())
    engine.add(requests()[0])
    with pytest.raises(ValueError, match="sample 0: the target's logits are not finite"):
        list(engine.run())


@pytest.mark.parametrize("canonical", [True, False])
def test_a_target_whose_forward_overflows_is_refused_at_the_start(
    folder: Path, canonical: bool
) -> None:
    target = load_target(resolve_model(str(folder)), dtype="float16", canonical=canonical)
    measure_numerics(target)
    norm = target.body.network.model.norm
    assert isinstance(norm, torch.nn.Module)
    norm.weight.fill_(6e4)
    with pytest.raises(ModelError, match=r"not finite in float16.*dtype must be wider"):
        measure_numerics(target)
