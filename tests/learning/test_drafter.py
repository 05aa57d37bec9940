"""Trajectories and the order drafter that learns from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from spot_batch.drafters.distributions import MASKED, SINCE
from spot_batch.drafters.order import (
    Calibration,
    OrderConfig,
    OrderModel,
    load_order,
    read_card,
    save_order,
)
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.learning.drafter import (
    DrafterSettings,
    drafter_card,
    fitted_model,
    train_drafter,
    unseen,
)
from spot_batch.learning.queries import DepthLaw, draw_queries, make_examples
from spot_batch.learning.trajectories import Trajectories, load_trajectories
from tests.learning.recorded import SMALL, WIDTH, record
from tests.service.jobs import data_hash
from tests.tiny_models import write_target

CONFIG = {"block_length": WIDTH, "num_layers": 1, "hidden_size": 32, "num_heads": 2, "top_k": 32}


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
    ahead = trajectories.num_ahead
    index, depth = draw_queries(ahead, DepthLaw(), 500, torch.Generator().manual_seed(0))
    assert int(depth.min()) == 1
    assert bool((depth <= ahead[index]).all())


def test_a_trained_order_model_beats_an_untrained_one_and_loads_as_saved(
    trajectories: Trajectories, tmp_path: Path
) -> None:
    settings = DrafterSettings(config=SMALL, steps=150, batch=64, learning_rate=3e-3, held_out=0.3)
    trained = train_drafter(trajectories, settings)
    untrained = train_drafter(trajectories, replace(settings, steps=1, batch=2))
    assert trained.held_out.by_depth[0].next_commit > untrained.held_out.by_depth[0].next_commit
    card = drafter_card("order", trajectories, settings, trained)
    save_order(trained.model, tmp_path / "order", card, calibration=trained.calibration)
    loaded = load_order(tmp_path / "order", block_length=WIDTH, device=torch.device("cpu"))
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name]), name
    assert loaded.calibration == trained.calibration
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order.json", "order.safetensors"]


def test_a_card_says_what_its_drafter_learned_from_and_how_it_does(
    trajectories: Trajectories, tmp_path: Path
) -> None:
    settings = DrafterSettings(config=SMALL, steps=2, batch=8, held_out=0.3)
    trained = train_drafter(trajectories, settings)
    save_order(trained.model, tmp_path / "o", drafter_card("o", trajectories, settings, trained))
    card = read_card(tmp_path / "o")
    assert card["target_weights"] == trajectories.source.weights
    assert card["temperatures"] == [0.0, 0.5, 1.0, 1.5]
    assert card["num_parameters"] == sum(p.numel() for p in trained.model.parameters())
    assert card["training"]["seed"] == 0
    assert card["held_out"] == json.loads(json.dumps(trained.held_out.tree()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_is_the_same_twice(trajectories: Trajectories, precision: str) -> None:
    settings = DrafterSettings(config=SMALL, steps=3, batch=16, precision=precision)  # type: ignore[arg-type]
    first, second = (train_drafter(trajectories, settings) for _ in range(2))
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.held_out == second.held_out
    assert first.calibration == second.calibration


def test_bfloat16_products_learn_nearly_what_float32_learns(trajectories: Trajectories) -> None:
    settings = DrafterSettings(config=SMALL, steps=20, batch=32)
    low = replace(settings, precision="bfloat16")
    cpu = torch.device("cpu")
    a, b = fitted_model(trajectories, settings, cpu), fitted_model(trajectories, low, cpu)
    for name, tensor in a.state_dict().items():
        assert tensor.dtype == b.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(tensor, b.state_dict()[name], rtol=0.1, atol=0.05)


def test_prompts_are_held_out_whole_and_the_same_ones_at_every_temperature(
    trajectories: Trajectories, recorded: Path, target: Path, tmp_path: Path
) -> None:
    train, held_out = trajectories.split(share=0.3)
    assert len(train) + len(held_out) == len(trajectories)
    assert not set(train.place.tolist()) & set(held_out.place.tolist())
    other = record(tmp_path, target, overrides={"generation.seed": 9})
    both = load_trajectories([recorded, other])
    assert both.split(share=0.3)[1].place.unique().tolist() == held_out.place.unique().tolist()


def test_at_least_one_prompt_is_held_out(trajectories: Trajectories) -> None:
    train, held_out = trajectories.split(share=1e-12)
    assert held_out.num_prompts == 1
    assert len(train)


def test_holding_out_everything_is_refused(trajectories: Trajectories) -> None:
    with pytest.raises(ValueError, match="all 12 prompts are held out"):
        train_drafter(trajectories, DrafterSettings(config=SMALL, held_out=0.999999))


def test_a_drafter_is_calibrated_on_what_it_has_not_learned_from(
    trajectories: Trajectories, recorded: Path, target: Path, tmp_path: Path
) -> None:
    card = {"jobs": list(trajectories.source.jobs), "training": {"held_out": 0.3}}
    held_out = trajectories.split(share=0.3)[1]
    assert unseen(trajectories, card).place.tolist() == held_out.place.tolist()
    other = record(tmp_path, target, num_rows=4, overrides={"generation.seed": 5})
    both = load_trajectories([recorded, other])
    assert len(unseen(both, card)) == len(held_out) + int((both.job == 1).sum())
    assert unseen(trajectories, {"jobs": ["another"]}) is trajectories
    with pytest.raises(ValueError, match="has learned from all these states"):
        unseen(trajectories, {**card, "training": {"held_out": 0.0}})


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
    with pytest.raises(ValueError, match=r"order\.safetensors: not a drafter's tensors"):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


def test_a_drafter_of_other_tensors_than_its_card_says_is_refused(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {"config": {**CONFIG, "num_layers": 200}})
    with pytest.raises(ValueError, match=r"not a drafter of its card's shape \(layers\.1\."):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", 0), ("hidden_size", "32"), ("num_layers", 10**9)]
)
def test_a_card_of_an_impossible_config_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {"config": {**CONFIG, name: value}})
    with pytest.raises(ValueError, match=rf"order\.json: not a config of ours \({name} must be"):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "calibration",
    [
        {"order": [1.0, 2.0]},
        {"order": [0.0], "agreement": [1.0], "offset": [0.0]},
        {"heat": [1.0]},
        [1],
    ],
)
def test_a_card_of_an_impossible_calibration_is_refused(
    tmp_path: Path, calibration: object
) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {"calibration": calibration})
    with pytest.raises(ValueError, match=r"order\.json: not a calibration of ours"):
        load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))


def test_a_card_without_a_calibration_leaves_the_weights_as_they_are(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "order", {"calibration": None})
    loaded = load_order(tmp_path / "order", block_length=8, device=torch.device("cpu"))
    assert loaded.calibration == Calibration()


def test_a_name_with_dots_keeps_them(tmp_path: Path) -> None:
    save_order(OrderModel(SMALL), tmp_path / "sdar-1.7b-b8", {})
    assert (tmp_path / "sdar-1.7b-b8.safetensors").exists()
    load_order(tmp_path / "sdar-1.7b-b8", block_length=8, device=torch.device("cpu"))


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


def test_a_job_without_a_state_is_refused(target: Path, tmp_path: Path) -> None:
    empty = record(tmp_path / "none", target, num_rows=0)
    with pytest.raises(ValueError, match="holds no states; record more prompts"):
        load_trajectories([empty])


def test_a_job_with_a_truncated_part_is_refused(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    job = JobDirectory.open(copy)
    part = job.data / job.part_name(0)
    part.write_bytes(part.read_bytes()[:-200])
    message = f"data/{part.name}: its size .*; `spot-batch resume .*/copy` makes it again"
    with pytest.raises(ValueError, match=message):
        load_trajectories([copy])
    part.unlink()
    with pytest.raises(ValueError, match=f"data/{part.name}: is gone"):
        load_trajectories([copy])


def test_a_job_given_twice_is_refused(recorded: Path) -> None:
    with pytest.raises(ValueError, match="the same job is given twice"):
        load_trajectories([recorded, recorded])


def test_a_folder_that_is_no_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a job directory"):
        load_trajectories([tmp_path])


def test_jobs_of_another_noise_key_are_refused(
    recorded: Path, target: Path, tmp_path: Path
) -> None:
    other = record(
        tmp_path, target, num_rows=2, overrides={"generation.advanced.noise_key": "position"}
    )
    with pytest.raises(ValueError, match="noise_key position against position_step"):
        load_trajectories([recorded, other])


def test_states_of_another_top_k_are_refused(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sound(job: JobDirectory, *, verify: bool) -> None:
        """This part is as another version wrote it, not as this job's own facts have it."""

    monkeypatch.setattr("spot_batch.learning.trajectories.fault_of_parts", sound)
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    job = JobDirectory.open(copy)
    part = job.data / job.part_name(0)
    with pa.OSFile(str(part)) as file:
        table = pa.ipc.open_file(file).read_all()
    rows = table["trajectory"].to_pylist()
    for row in rows:
        for state in row["states"]:
            for name in ("log_prob", "ids"):
                state[name] = state[name] * 2
    wide = table.set_column(
        table.column_names.index("trajectory"),
        table.schema.field("trajectory"),
        pa.array(rows, table.schema.field("trajectory").type),
    )
    with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, wide.schema) as writer:
        writer.write_table(wide)
    with pytest.raises(ValueError, match="8 positions of top-64; want 8 of at most top-32"):
        load_trajectories([copy])


def test_threshold_unmasking_cannot_be_recorded(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trajectory wants generation.unmasking single"):
        record(tmp_path, target, overrides={"generation.unmasking": "threshold"})


def test_trajectories_of_another_block_length_are_refused(trajectories: Trajectories) -> None:
    config = OrderConfig(block_length=16, num_layers=1, hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="of block length 8, the drafter's is 16"):
        train_drafter(trajectories, DrafterSettings(config=config))
