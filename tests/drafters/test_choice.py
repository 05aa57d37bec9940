"""Which drafter a job gets, and drafters that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.drafters import registry
from spot_batch.drafters.order import OrderConfig, OrderModel, save_order
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.drafters.registry import choose_drafter, load_drafter
from tests.tiny_models import write_target


@pytest.fixture
def info(tmp_path: Path) -> ModelInfo:
    return resolve_model(str(write_target(tmp_path / "target")))


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shelf of drafters in place of the packaged one."""
    shelf = tmp_path / "drafters"
    shelf.mkdir()
    monkeypatch.setattr(registry, "_ASSETS", shelf)
    return shelf


def put(path: Path, *, block_length: int, weights: str) -> None:
    config = OrderConfig(block_length=block_length, num_layers=1, hidden_size=16, num_heads=2)
    save_order(OrderModel(config), path, {"name": path.stem, "target_weights": weights})


def test_the_drafter_of_the_targets_own_weights_comes_first(info: ModelInfo, assets: Path) -> None:
    put(assets / "a-other", block_length=8, weights="another")
    put(assets / "own", block_length=8, weights=info.weight_hash)
    choice = choose_drafter("auto", info)
    assert (choice.kind, choice.name, choice.why) == ("order", "own", "trained for this target")


def test_else_one_of_its_block_length_and_that_is_said(info: ModelInfo, assets: Path) -> None:
    put(assets / "narrow", block_length=4, weights="another")
    put(assets / "other", block_length=8, weights="another")
    choice = choose_drafter("auto", info)
    assert choice.name == "other"
    assert "trained on another target of block length 8" in choice.why


def test_else_ranking_never_nothing(info: ModelInfo, assets: Path) -> None:
    put(assets / "narrow", block_length=4, weights="another")
    choice = choose_drafter("auto", info)
    assert choice.kind == "ranking"
    assert isinstance(load_drafter(choice, block_length=8), RankingDrafter)


def test_none_is_draft_free(info: ModelInfo) -> None:
    assert load_drafter(choose_drafter("none", info), block_length=8) is None


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".json"])
def test_a_path_may_be_given_with_or_without_its_suffix(
    info: ModelInfo, tmp_path: Path, suffix: str
) -> None:
    put(tmp_path / "mine", block_length=8, weights="x")
    choice = choose_drafter(str(tmp_path / f"mine{suffix}"), info)
    assert choice.name == "mine"
    assert load_drafter(choice, block_length=8) is not None


def test_a_given_drafter_of_another_block_length_is_refused(
    info: ModelInfo, tmp_path: Path
) -> None:
    put(tmp_path / "narrow", block_length=4, weights="x")
    with pytest.raises(ValueError, match="for block length 4, the target's is 8"):
        choose_drafter(str(tmp_path / "narrow"), info)


def test_a_given_drafter_that_is_not_there_is_named(info: ModelInfo, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json: the drafter's card cannot be read"):
        choose_drafter(str(tmp_path / "nowhere"), info)


def test_a_given_drafter_without_its_tensors_is_refused(info: ModelInfo, tmp_path: Path) -> None:
    put(tmp_path / "mine", block_length=8, weights="x")
    (tmp_path / "mine.safetensors").unlink()
    with pytest.raises(ValueError, match=r"mine\.safetensors"):
        choose_drafter(str(tmp_path / "mine"), info)


def test_a_card_with_a_wrong_config_is_refused(info: ModelInfo, tmp_path: Path) -> None:
    put(tmp_path / "mine", block_length=8, weights="x")
    card = json.loads((tmp_path / "mine.json").read_text())
    card["config"]["depth"] = 3
    (tmp_path / "mine.json").write_text(json.dumps(card))
    with pytest.raises(ValueError, match=r"mine\.json"):
        choose_drafter(str(tmp_path / "mine"), info)


def test_the_packaged_drafters_load() -> None:
    for file in sorted(registry._ASSETS.glob("*.json")):
        card = json.loads(file.read_text())
        path = file.with_suffix("")
        width = card["config"]["block_length"]
        assert registry.load_order(path, block_length=width, device=torch.device("cpu"))
