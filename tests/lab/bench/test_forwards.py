"""Replayed drafters take the forwards that live ones take, and their forwards are those by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.order import OrderConfig, OrderDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.exact import decode_all
from spot_batch.lab.bench.forwards import forwards_needed
from spot_batch.lab.bench.nfe import (
    METHODS,
    Cell,
    Fitted,
    make_drafter,
    measure,
    ratio_interval,
)
from spot_batch.lab.bench.questions import make_requests, params_of
from spot_batch.lab.bench.recording import RecordedSample, as_trajectories, record
from spot_batch.learning.drafter import seeded_model
from spot_batch.models.block import BlockTarget, load_target
from tests.tiny_models import write_target

# The prompt's length decides how many positions of its last block are open: all remainders.
QUESTIONS = ["What is " + "1" * length for length in range(9)]


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return resolve_model(str(write_target(tmp_path_factory.mktemp("target"), scale=3.0)))


@pytest.fixture(scope="module")
def target(info: ModelInfo) -> BlockTarget:
    return load_target(info)


@pytest.fixture(scope="module")
def order(info: ModelInfo) -> OrderDrafter:
    config = OrderConfig(block_length=info.block_length, num_layers=1, hidden_size=16, num_heads=2)
    return OrderDrafter(seeded_model(config, torch.Generator().manual_seed(0)))


def recorded(
    target: BlockTarget, info: ModelInfo, heat: float, *, fixed: bool = False
) -> list[RecordedSample]:
    params = params_of(info, temperature=heat, max_new_tokens=29, is_fixed=fixed)
    return record(target, make_requests(info, QUESTIONS, params), in_flight=4)


def cell(method: str, *, budget: int = 6, heat: float = 0.0) -> Cell:
    return Cell(task="synthetic", method=method, budget=budget, temperature=heat)


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_takes_the_forwards_of_a_live_run(
    target: BlockTarget, info: ModelInfo, order: Drafter, method: str, heat: float
) -> None:
    samples = recorded(target, info, heat)
    of_cell = cell(method, heat=heat)
    drafter = make_drafter(
        of_cell, order=order, fitted_to=Fitted(as_trajectories(samples, info)), samples=samples
    )
    row = measure(of_cell, samples, drafter, prompts="", live_on=target)
    assert row.live_agrees
    assert row.identical
    assert row.nfe_ratio_low <= row.nfe_ratio <= row.nfe_ratio_high
    assert row.nfe <= row.draft_free_nfe


@pytest.mark.parametrize("crossing", [True, False])
def test_the_full_oracle_is_the_floor(target: BlockTarget, info: ModelInfo, crossing: bool) -> None:
    samples = recorded(target, info, 0.0, fixed=True)
    budget = 4
    drafter = make_drafter(
        cell("full-oracle"),
        order=None,
        fitted_to=Fitted(as_trajectories(samples, info)),
        samples=samples,
    )
    found = forwards_needed(samples, drafter, budget=budget, crossing=crossing, in_flight=2)
    for sample, one in zip(samples, found, strict=True):
        if crossing:
            assert one.num_forwards <= by_hand(sample, budget)
        else:
            assert one.num_forwards == by_hand(sample, budget)


def by_hand(sample: RecordedSample, budget: int) -> int:
    """A block's first forward drafts nothing, the others are right `budget` times beyond their own
    commit."""
    return sum(1 + -(-(len(block.commits) - 1) // (budget + 1)) for block in sample.blocks)


def test_each_way_of_ending_is_recorded_whole(target: BlockTarget, info: ModelInfo) -> None:
    for fixed in (False, True):
        for sample in recorded(target, info, 1.0, fixed=fixed):
            assert sample.num_commits == sample.completion.num_draft_free_forwards
            assert all(len(block.states) >= len(block.commits) - 1 for block in sample.blocks)


def test_trajectories_of_a_benchmark_are_those_of_a_job(
    target: BlockTarget, info: ModelInfo
) -> None:
    samples = recorded(target, info, 0.5)
    states = as_trajectories(samples, info)
    assert len(states) == sum(len(block.states) for one in samples for block in one.blocks)
    assert states.temperatures == [0.5]
    first = samples[0].blocks[0].states[0]
    assert tuple(states.masked[0].tolist()) == first.masked
    assert states.positions[0, : len(first.positions)].tolist() == list(first.positions)
    assert torch.equal(states.log_prob[0].flatten(), torch.from_numpy(first.log_prob))


def test_an_order_drafter_is_asked_for_by_name(info: ModelInfo) -> None:
    with pytest.raises(ValueError, match="spot wants an order drafter"):
        make_drafter(cell("spot"), order=None, fitted_to=Fitted(None), samples=())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown method 'magic'"):
        make_drafter(cell("magic"), order=None, fitted_to=Fitted(None), samples=())  # type: ignore[arg-type]


def test_the_interval_is_of_the_ratio_of_sums() -> None:
    import numpy as np

    base, found = np.array([40, 60, 80, 20]), np.array([20, 20, 20, 20])
    low, high = ratio_interval(base, found)
    assert 1.0 < low < 200 / 80 < high < 4.0
    assert ratio_interval(base, base) == (1.0, 1.0)


def test_a_live_run_that_differs_is_seen(
    target: BlockTarget, info: ModelInfo, order: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = recorded(target, info, 0.0)
    other: Sequence[RecordedSample] = recorded(target, info, 1.0)
    row = measure(cell("ranking"), other, order, prompts="", live_on=target)
    assert row.live_agrees
    live = decode_all(target, order, [one.request for one in samples], EngineSettings(budget=6))
    assert [one.completion.token_ids for one in samples] == [
        live[one.request.sample_id].token_ids for one in samples
    ]
    mixed = [
        RecordedSample(a.request, b.blocks, b.completion)
        for a, b in zip(samples, other, strict=True)
    ]
    row = measure(cell("ranking"), mixed, order, prompts="", live_on=target)
    assert not row.identical
