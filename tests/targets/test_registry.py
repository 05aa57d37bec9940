"""What a model folder says of itself, and folders that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spot_batch.targets.qwen3 import load_target
from spot_batch.targets.registry import ModelError, resolve_model
from tests.models import write_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "SDAR-tiny-Chat")


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    file.write_text(json.dumps(config))


def test_the_folder_says_block_length_mask_and_stop_ids(folder: Path) -> None:
    info = resolve_model(str(folder))
    assert (info.family.name, info.block_length, info.mask_id) == ("sdar", 8, 259)
    assert info.stop_ids == (256, 258)
    assert info.mask_id in info.forbidden_ids
    assert set(range(260, 264)) <= set(info.forbidden_ids), "rows without a text may be written"


def test_the_name_says_the_block_length_where_the_config_does_not(folder: Path) -> None:
    change_config(folder, block_size=None)
    assert resolve_model(str(folder)).block_length == 4  # the family's
    wide = folder.rename(folder.with_name("SDAR-tiny-Chat-b16"))
    assert resolve_model(str(wide)).block_length == 16


def test_the_tokenizer_says_the_mask_where_the_config_does_not(folder: Path) -> None:
    change_config(folder, mask_token_id=None)
    assert resolve_model(str(folder)).mask_id == 259


def test_what_is_given_wins(folder: Path) -> None:
    info = resolve_model(str(folder), block_length=16, mask_id=261)
    assert (info.block_length, info.mask_id) == (16, 261)


def test_another_chat_template_is_another_model(folder: Path) -> None:
    before = resolve_model(str(folder)).identity()
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")
    after = resolve_model(str(folder)).identity()
    assert before["weights"] == after["weights"]
    assert before["tokenizer"] != after["tokenizer"]


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    first, second = resolve_model(str(folder)).identity(), resolve_model(str(other)).identity()
    assert first["weights"] != second["weights"]
    assert first["tokenizer"] == second["tokenizer"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_a_folder_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(name)
    assert name in str(caught.value)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_an_unknown_architecture_is_refused_with_the_known_ones(folder: Path) -> None:
    change_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(ModelError, match=r"LlamaForCausalLM is not supported; known: .*SDARFor"):
        resolve_model(str(folder))


def test_a_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        resolve_model(str(folder))


def test_a_mask_outside_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="mask id 9999 is outside the vocabulary of 264"):
        resolve_model(str(folder), mask_id=9999)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        resolve_model(str(folder))


def test_truncated_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="the weights cannot be loaded"):
        load_target(resolve_model(str(folder)))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelError, match="tensors do not fit the config"):
        load_target(resolve_model(str(folder)))


def test_rope_scaling_is_refused_not_ignored(folder: Path) -> None:
    change_config(folder, rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(ModelError, match="rope_scaling"):
        load_target(resolve_model(str(folder)))


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype must be auto or one of"):
        load_target(resolve_model(str(folder)), dtype="float8")


def test_sizes_that_canonical_numerics_do_not_hold_for_are_refused(tmp_path: Path) -> None:
    """SiLU takes other instructions for what does not fill a vector register."""
    odd = resolve_model(str(write_target(tmp_path / "odd", intermediate_size=90, block_length=5)))
    with pytest.raises(ModelError, match="a multiple of 32, got 5 x 90"):
        load_target(odd)
    load_target(odd, canonical=False)
