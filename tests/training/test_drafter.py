"""Trajectories and the order drafter that learns from them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from spot_batch.drafters.order import OrderConfig, OrderModel, load_order, read_card, save_order
from spot_batch.drafters.stale import MASKED, SINCE
from spot_batch.training.drafter import (
    DrafterSettings,
    draw_queries,
    make_examples,
    train_drafter,
)
from spot_batch.training.trajectories import Trajectories, load_trajectories
from tests.driver.jobs import data_hash, run_here, small_spec, write_rows
from tests.models import write_target

WIDTH = 8
SMALL = OrderConfig(block_length=WIDTH, num_layers=1, hidden_size=32, num_heads=2)
HEATS = (0.0, 0.5, 1.0, 1.5)


def record(
    folder: Path, target: Path, *, num_rows: int = 12, overrides: Mapping[str, object] | None = None
) -> Path:
    """A job that records every state, over rows of all temperatures; its directory."""
    rows = [
        {"question": f"What is {n} plus {n}?", "temperature": HEATS[n % 4]} for n in range(num_rows)
    ]
    asked = {
        "model.target": str(target),
        "generation.max_new_tokens": 32,
        "generation.per_row": ["temperature"],
        "output.include": ["token_ids", "commit_step", "usage", "trajectory"],
        "output.trajectory_every": 1,
        **(overrides or {}),
    }
    return run_here(folder / "out", small_spec(write_rows(folder, rows), asked)).root


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), block_length=WIDTH, scale=3.0)


@pytest.fixture(scope="module")
def recorded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("job"), target)


@pytest.fixture(scope="module")
def trajectories(recorded: Path) -> Trajectories:
    return load_trajectories([recorded])


def test_every_state_but_a_blocks_last_is_recorded_with_its_future(
    trajectories: Trajectories,
) -> None:
    assert trajectories.block_length == WIDTH
    num_masked = trajectories.masked.sum(dim=1)
    assert bool((trajectories.num_ahead >= 1).all())
    assert bool((trajectories.num_ahead < num_masked).all())
    first = trajectories.positions[:, 0]
    at_first = trajectories.masked.gather(1, first[:, None]).squeeze(1)
    assert bool(at_first.all()), "a state commits a position that was not masked"
    assert set(trajectories.temperature.tolist()) == {0.0, 0.5, 1.0, 1.5}


def test_at_temperature_zero_a_states_own_commit_is_its_most_confident_argmax(
    trajectories: Trajectories,
) -> None:
    cold = trajectories.take(trajectories.temperature == 0)
    own = cold.ids[:, :, 0].gather(1, cold.positions[:, :1].int().long()).squeeze(1)
    assert torch.equal(own.long(), cold.tokens[:, 0])


def test_queries_mark_what_was_committed_since_the_stale_state(trajectories: Trajectories) -> None:
    index = torch.nonzero(trajectories.num_ahead >= 2).squeeze(1)[:5]
    depth = torch.full_like(index, 2)
    examples = make_examples(trajectories, index, depth)
    for row, state in enumerate(index.tolist()):
        since = torch.nonzero(examples.status[row] == SINCE).squeeze(1).tolist()
        assert since == sorted(trajectories.positions[state, :2].tolist())
        label = int(examples.label[row])
        assert label == int(trajectories.positions[state, 2])
        assert int(examples.status[row, label]) == MASKED


def test_drawn_depths_stay_within_what_is_known(trajectories: Trajectories) -> None:
    settings = DrafterSettings(config=SMALL, batch=500)
    index, depth = draw_queries(trajectories, settings, torch.Generator().manual_seed(0))
    assert int(depth.min()) == 1
    assert bool((depth <= trajectories.num_ahead[index]).all())


def test_a_trained_order_model_beats_an_untrained_one_and_loads_as_saved(
    trajectories: Trajectories, tmp_path: Path
) -> None:
    settings = DrafterSettings(config=SMALL, steps=150, batch=64, learning_rate=3e-3)
    model, figures = train_drafter(trajectories, settings)
    _, untrained = train_drafter(trajectories, DrafterSettings(config=SMALL, steps=1, batch=2))
    assert figures[0].next_commit > untrained[0].next_commit
    save_order(model, tmp_path / "order", {"name": "order", "target_weights": "x"})
    loaded = load_order(tmp_path / "order", block_length=WIDTH, device=torch.device("cpu"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name


def test_training_is_the_same_twice(trajectories: Trajectories) -> None:
    settings = DrafterSettings(config=SMALL, steps=3, batch=16)
    first, _ = train_drafter(trajectories, settings)
    second, _ = train_drafter(trajectories, settings)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_the_published_size_is_062_million_parameters() -> None:
    model = OrderModel(OrderConfig(block_length=32))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 0.62


def test_a_drafter_of_another_block_length_is_refused(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {})
    with pytest.raises(ValueError, match="for block length 8, the target's is 32"):
        load_order(tmp_path / "order", block_length=32, device=torch.device("cpu"))


def test_a_drafter_of_another_top_k_is_refused(tmp_path: Path) -> None:
    config = OrderConfig(block_length=8, num_layers=1, hidden_size=32, num_heads=2, top_k=16)
    save_order(OrderModel(config), tmp_path / "order", {})
    with pytest.raises(ValueError, match="reads top-16, we keep top-32"):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


def test_a_truncated_drafter_is_refused_by_name(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {})
    file = tmp_path / "order.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"order\.safetensors: not a drafter"):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


def test_a_card_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text('{"kind": "sets"}')
    with pytest.raises(ValueError, match=r"order\.json: not the card of an order drafter"):
        read_card(tmp_path / "order")


def test_drafts_change_nothing_of_what_is_recorded(
    recorded: Path, target: Path, tmp_path: Path
) -> None:
    free = record(tmp_path, target, overrides={"speculation.budget": 0, "engine.max_sequences": 1})
    assert data_hash(recorded) == data_hash(free)


def test_every_fourth_state_is_a_quarter_of_all(
    trajectories: Trajectories, target: Path, tmp_path: Path
) -> None:
    thin = load_trajectories([record(tmp_path, target, overrides={"output.trajectory_every": 4})])
    assert abs(len(thin) - len(trajectories) / 4) <= len(trajectories) / 16


def test_trajectories_of_another_model_are_refused(recorded: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", block_length=WIDTH, seed=1)
    second = record(tmp_path, other, num_rows=2)
    with pytest.raises(ValueError, match=r"recorded from another model than .* \(weights"):
        load_trajectories([recorded, second])


def test_a_job_that_recorded_nothing_is_refused(target: Path, tmp_path: Path) -> None:
    plain = record(tmp_path, target, num_rows=2, overrides={"output.include": ["token_ids"]})
    with pytest.raises(ValueError, match=r"no trajectories; record them with output.include"):
        load_trajectories([plain])


def test_an_unfinished_job_is_refused(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    (copy / "_SUCCESS").unlink()
    with pytest.raises(ValueError, match="copy: the job is not complete; resume it first"):
        load_trajectories([copy])


def test_threshold_unmasking_cannot_be_recorded(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trajectory wants generation.unmasking single"):
        record(tmp_path, target, overrides={"generation.unmasking": "threshold"})


def test_trajectories_of_another_block_length_are_refused(trajectories: Trajectories) -> None:
    config = OrderConfig(block_length=16, num_layers=1, hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="of block length 8, the drafter's is 16"):
        train_drafter(trajectories, DrafterSettings(config=config))
