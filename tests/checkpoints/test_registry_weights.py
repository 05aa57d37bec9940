"""Weight files that cannot be used are told by their headers, before anything is loaded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.registry import resolve_model
from spot_batch.checkpoints.weights import hash_is_free, hash_weights, read_headers
from tests.families import write_checkpoint

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "sharded"
    return write_checkpoint(folder, "sdar", num_shards=2, dtype=torch.bfloat16)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def point(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def as_integers(file: Path) -> None:
    """The same bytes, called whole numbers of as many bytes."""
    in_header('"BF16"', '"I16" ')(file)


def claims_to_be_huge() -> bytes:
    header = b'{"model.norm.weight":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'
    return len(header).to_bytes(8, "little") + header + bytes(4)


def in_header(old: str, new: str) -> Callable[[Path], None]:
    """Change a header in place: both texts are of one length."""
    assert len(old.encode()) == len(new.encode())

    def change(file: Path) -> None:
        data = file.read_bytes()
        assert old.encode() in data
        file.write_bytes(data.replace(old.encode(), new.encode()))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, rf"1 of 2 weight files are missing, the first: {SECOND} \("),
        (cut, rf"{SECOND}: truncated or damaged \(.*; its [\d,]+ bytes are not .* fetch the file"),
        (lengthen, rf"{SECOND}: truncated or damaged \("),
        (point, rf"{SECOND}: is a Git LFS pointer, not the weights: run `git lfs pull`"),
        (lambda file: file.write_bytes(b"short"), r"truncated or damaged \(.*; its 5 bytes"),
        (lambda file: file.write_bytes(b""), r"truncated or damaged \(.*; its 0 bytes"),
        (lambda file: file.write_bytes(b"\xff" * 64), r"truncated or damaged \("),
        (lambda file: file.write_bytes(claims_to_be_huge()), r"truncated or damaged \("),
        (in_header('{"', "{["), rf"{SECOND}: truncated or damaged \("),
        (in_header('"shape":[', '"shape":{'), r"truncated or damaged \("),
        (in_header("[0,", "[2,"), r"truncated or damaged \("),
        (in_header('"BF16"', '"' + "\u0416" * 2 + '"'), r"truncated or damaged \("),
        (as_integers, r"is stored as I16; want one of F64, F32, BF16, F16"),
        (in_header("up_proj", "no_proj"), r"is not in it, though model\.safetensors\.index\.json"),
    ],
)
def test_a_damaged_or_missing_file_is_one_sentence(
    sharded: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "damaged")
    damage(folder / SECOND)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(folder))
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        ({"model.norm.weight": "../elsewhere.safetensors"}, "want names of .safetensors files"),
        ({"model.norm.weight": 3}, "want names of .safetensors files beside it, got 3"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(
    sharded: Path, tmp_path: Path, weight_map: object, message: str
) -> None:
    folder = shutil.copytree(sharded, tmp_path / "damaged")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_shards_without_an_index_are_no_weights(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "damaged")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=rf"{FIRST} is there, but neither model\.safetensors nor"):
        resolve_model(str(folder))
    for name in (FIRST, SECOND):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("family", "stacked", "changes"),
    [
        ("sdar", False, {}),
        ("sdar", False, {"tie_word_embeddings": True}),
        ("sdar-moe", False, {}),
        ("sdar-moe", True, {"mlp_only_layers": [1]}),
        ("llada2", False, {}),
        ("llada2", True, {"num_shared_experts": 2}),
    ],
)
def test_every_layout_fits_its_config_and_no_other(
    tmp_path: Path, family: str, stacked: bool, changes: dict[str, object]
) -> None:
    folder = write_checkpoint(tmp_path / "mine", family, stacked=stacked, num_shards=2, **changes)
    resolve_model(str(folder))
    config = folder / "config.json"
    good = json.loads(config.read_text())
    for field, value, wrong in (
        ("intermediate_size" if family == "sdar" else "moe_intermediate_size", 64, "has the shape"),
        ("num_hidden_layers", 4, "is missing"),
        ("num_hidden_layers", 2, "is not known"),
    ):
        config.write_text(json.dumps({**good, field: value}))
        with pytest.raises(ModelError, match=rf"tensors do not fit the config, .* {wrong}"):
            resolve_model(str(folder))


def test_the_hubs_cache_gives_the_hash_of_large_files_by_name(
    sharded: Path, tmp_path: Path
) -> None:
    """Its blobs are named by their sha256: 61 GB need not be read again by every actor."""
    cached, blobs = tmp_path / "snapshots", tmp_path / "blobs"
    shutil.copytree(sharded, cached)
    blobs.mkdir()
    assert not hash_is_free(cached)
    whole = hash_weights(cached)
    for name in (FIRST, SECOND):
        with (cached / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        (cached / name).rename(blobs / digest)
        (cached / name).symlink_to(f"../blobs/{digest}")
    assert hash_is_free(cached)
    assert hash_weights(cached) == whole
    assert len(read_headers(cached)) == 36
