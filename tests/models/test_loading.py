"""How far a target is on its way to a device, as those who load it are told."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.registry import resolve_model
from spot_batch.models.block import load_target
from spot_batch.records.progress import LoadProgress
from tests.families import save_tensors, write_checkpoint

NUM_SHARDS = 3


@pytest.fixture(scope="module", params=["sdar", "llada2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / request.param
    return write_checkpoint(folder, request.param, num_shards=NUM_SHARDS)


def num_stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def assert_whole(told: list[LoadProgress], *, stage: str, total: int) -> None:
    """Never back, never beyond, and at the end all of it."""
    assert {progress.stage for progress in told} == {stage}
    assert {progress.num_bytes_total for progress in told} == {total}
    assert all(one.num_bytes <= other.num_bytes for one, other in pairwise(told))
    assert told[-1].num_bytes == total


def test_weights_that_are_read_for_their_hash_are_counted(folder: Path) -> None:
    told: list[LoadProgress] = []
    info = resolve_model(str(folder), report=told.append)
    assert_whole(told, stage="checking", total=num_stored_bytes(folder))
    assert info.weight_hash == resolve_model(str(folder)).weight_hash


def test_weights_that_come_to_a_device_are_counted_tensor_by_tensor(folder: Path) -> None:
    told: list[LoadProgress] = []
    info = resolve_model(str(folder))
    load_target(info, report=told.append)
    assert_whole(told, stage="loading", total=num_stored_bytes(folder))
    num_tensors = sum(1 for one, other in pairwise(told) if one.num_bytes < other.num_bytes)
    assert num_tensors > NUM_SHARDS


def test_the_copy_of_a_tied_head_that_is_left_out_counts_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tied", "sdar")
    config = folder / "config.json"
    config.write_text(
        config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    told: list[LoadProgress] = []
    load_target(resolve_model(str(folder)), report=told.append)
    assert_whole(told, stage="loading", total=num_stored_bytes(folder))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    folder = write_checkpoint(tmp_path / "model", "sdar")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_tensors(folder, tensors)
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight is not finite in float32: the file is damaged$"
    ):
        load_target(resolve_model(str(folder)))


def test_a_weight_that_float16_cannot_hold_is_named(tmp_path: Path) -> None:
    """float16 is what `auto` takes on a GPU without bfloat16 where float32 does not fit."""
    folder = write_checkpoint(tmp_path / "model", "sdar", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_tensors(folder, tensors)
    info = resolve_model(str(folder))
    load_target(info, dtype="bfloat16")
    with pytest.raises(ModelError, match=r"not finite in float16.*dtype must be wider"):
        load_target(info, dtype="float16")
