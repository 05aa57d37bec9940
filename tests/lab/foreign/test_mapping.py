"""Maps from somebody else's tensors to an order model's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from safetensors.torch import save_file
from torch import Tensor

from spot_batch.drafters.order import OrderConfig, OrderModel
from spot_batch.lab.foreign.files import ForeignFile, open_foreign
from spot_batch.lab.foreign.mapping import assemble, read_map, starter_map
from tests.lab.foreign.test_files import Spotlike

CONFIG = {"block_length": 8, "num_layers": 1, "hidden_size": 16, "num_heads": 2}


def tensors_of(model: OrderModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def model() -> OrderModel:
    torch_generator = torch.Generator().manual_seed(5)
    model = OrderModel(OrderConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch_generator))
    return model


def opened(folder: Path, tensors: Mapping[str, Tensor]) -> ForeignFile:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "their.safetensors")
    return open_foreign(folder / "their.safetensors")


def written(folder: Path, tensors: Mapping[str, Any], **config: object) -> Path:
    path = folder / "map.yaml"
    path.write_text(yaml.safe_dump({"config": {**CONFIG, **config}, "tensors": dict(tensors)}))
    return path


def same(model: OrderModel) -> dict[str, Any]:
    """The map of a file that has our names."""
    return {name: name for name in model.state_dict()}


def test_every_tensor_comes_from_where_the_map_says(tmp_path: Path, model: OrderModel) -> None:
    theirs = {f"net.{name}": tensor for name, tensor in tensors_of(model).items()}
    plan = read_map(written(tmp_path, {name: f"net.{name}" for name in same(model)}))
    made = assemble(opened(tmp_path, theirs), plan)
    for name, tensor in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name


def test_json_is_a_map_too(tmp_path: Path, model: OrderModel) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"config": CONFIG, "tensors": same(model)}))
    assert read_map(path).config == OrderConfig(**CONFIG)


def test_parts_are_joined_turned_cut_scaled_and_filled(tmp_path: Path, model: OrderModel) -> None:
    theirs, plan = tensors_of(model), same(model)
    query, key, value = theirs.pop("layers.0.qkv.weight").chunk(3)
    theirs |= {"q": query, "k": key, "v": value}
    plan["layers.0.qkv.weight"] = {"concat": ["q", "k", "v"]}
    theirs["up"] = theirs.pop("layers.0.up.weight").T
    plan["layers.0.up.weight"] = {"from": "up", "transpose": True}
    theirs["pos"] = torch.cat(
        (torch.zeros(2, 16), theirs.pop("position.weight"), torch.ones(9, 16))
    )
    plan["position.weight"] = {"from": "pos", "rows": "2:10"}
    features = theirs.pop("features.weight")
    theirs["in"] = torch.cat((features[:, 32:] / 8, features[:, :32]), dim=1)
    plan["features.weight"] = {
        "concat": [
            {"from": "in", "columns": "4:36"},
            {"from": "in", "columns": "0,1,2,3", "scale": 8},
        ],
        "axis": 1,
    }
    theirs["score"], theirs["score_bias"] = (
        theirs.pop("head.weight")[:1],
        theirs.pop("head.bias")[:1],
    )
    plan["head.weight"] = {"concat": ["score", {"constant": 0}]}
    plan["head.bias"] = {"concat": ["score_bias", {"constant": 3}]}
    plan["norm.bias"] = {"constant": 0.5}
    made = assemble(opened(tmp_path, theirs), read_map(written(tmp_path, plan))).state_dict()
    own = model.state_dict()
    for name in ("layers.0.qkv.weight", "layers.0.up.weight", "position.weight", "features.weight"):
        torch.testing.assert_close(made[name], own[name])
    assert torch.equal(made["head.weight"][0], own["head.weight"][0])
    assert made["head.weight"][1].tolist() == [0.0] * 16
    assert made["head.bias"].tolist() == [own["head.bias"][0].item(), 3.0]
    assert made["norm.bias"].tolist() == [0.5] * 16


@pytest.mark.parametrize(
    ("name", "piece", "said"),
    [
        ("norm.weight", "nowhere", "norm.weight: the file has no tensor nowhere"),
        ("norm.weight", "norm.wieght", "did you mean norm.weight"),
        ("norm.weight", "features.weight", r"norm.weight: the map gives \[16, 36\], want \[16\]"),
        ("norm.weight", {"from": "norm.weight", "transpose": True}, "want a matrix"),
        ("norm.weight", {"from": "norm.weight", "rows": "0:99"}, r"is \[16\], it has no '0:99'"),
        ("norm.weight", {"from": "ids"}, "norm.weight: ids is of int64, want floating point"),
        ("norm.weight", {"from": "bad"}, "norm.weight: holds values that are not finite"),
        (
            "hidden.weight",
            {"concat": ["norm.weight", "hidden.weight"]},
            "hidden.weight: cannot join",
        ),
        ("head.weight", {"concat": ["hidden.weight"]}, r"gives \[16, 16\], want \[2, 16\]"),
        ("head.bias", {"concat": [{"constant": 1}]}, "head.bias: nothing to join"),
        (
            "nrm.weight",
            "norm.weight",
            "nrm.weight: no tensor of an order drafter; did you mean norm",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_shapes(
    tmp_path: Path, model: OrderModel, name: str, piece: object, said: str
) -> None:
    theirs = tensors_of(model)
    theirs |= {"ids": torch.zeros(16, dtype=torch.int64), "bad": torch.full((16,), torch.nan)}
    plan = read_map(written(tmp_path, {**same(model), name: piece}))
    with pytest.raises(ValueError, match=said):
        assemble(opened(tmp_path, theirs), plan)


def test_tensors_that_the_map_leaves_out_are_all_named(tmp_path: Path, model: OrderModel) -> None:
    plan = same(model)
    del plan["norm.bias"], plan["head.bias"]
    with pytest.raises(ValueError, match=r"the map leaves out norm\.bias, head\.bias"):
        assemble(opened(tmp_path, tensors_of(model)), read_map(written(tmp_path, plan)))


def test_another_top_k_is_refused(tmp_path: Path, model: OrderModel) -> None:
    plan = read_map(written(tmp_path, same(model), top_k=16))
    with pytest.raises(ValueError, match="reads top-16, we keep top-32"):
        assemble(opened(tmp_path, tensors_of(model)), plan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2", "not a map"),
        ("3", "the map"),
        ("tensors: {}", "config: Field required"),
        ("config: {block_length: 8, depth: 3}\ntensors: {}", "config: .*'depth'"),
        ("config: {block_length: 0}\ntensors: {}", "block_length must be a whole number"),
        ("config: {block_length: 8}\ntensors: {a: null}", "tensors.a: is null"),
        ("config: {block_length: 8}\ntensors: {a: {}}", "want one of from, concat and constant"),
        ("config: {block_length: 8}\ntensors: {a: {from: x, row: 3}}", "tensors.a.row"),
        ("config: {block_length: 8}\ntensors: {a: {from: x, rows: '3-4'}}", "want ranges"),
        ("config: {block_length: 8}\ntensors: {a: {constant: .nan}}", "tensors.a.constant"),
        (
            "config: {block_length: 8}\ntensors: {a: {concat: [{constant: 1}, {constant: 2}]}}",
            "one constant at most",
        ),
    ],
)
def test_a_map_that_cannot_be_is_refused_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        read_map(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_starter_map_of_our_own_names_is_complete(tmp_path: Path, model: OrderModel) -> None:
    file = opened(tmp_path, tensors_of(model))
    (tmp_path / "map.yaml").write_text(
        starter_map(file).replace('"num_heads": 8', '"num_heads": 2')
    )
    made = assemble(file, read_map(tmp_path / "map.yaml"))
    assert torch.equal(made.head.weight, model.head.weight)


def test_a_starter_map_guesses_common_names(tmp_path: Path) -> None:
    file = opened(tmp_path, Spotlike().state_dict())
    tree = yaml.safe_load(starter_map(file))
    assert tree["config"]["num_layers"] == 3
    assert tree["tensors"]["layers.2.qkv.weight"] == "enc.layers.2.self_attn.in_proj_weight"
    assert tree["tensors"]["layers.0.feed_norm.bias"] == "enc.layers.0.norm2.bias"
    assert tree["tensors"]["features.weight"] == "inp.weight"
    assert tree["tensors"]["head.weight"] == {"concat": ["head.2.weight", {"constant": 0}]}


def test_a_starter_map_joins_query_key_and_value(tmp_path: Path, model: OrderModel) -> None:
    theirs = tensors_of(model)
    for kind in ("weight", "bias"):
        parts = theirs.pop(f"layers.0.qkv.{kind}").chunk(3)
        theirs |= {f"layers.0.{each}_proj.{kind}": p for each, p in zip("qkv", parts, strict=True)}
    tree = yaml.safe_load(starter_map(opened(tmp_path, theirs)))
    names = [f"layers.0.{each}_proj.weight" for each in "qkv"]
    assert tree["tensors"]["layers.0.qkv.weight"] == {"concat": names}


def test_a_model_taken_over_by_its_starter_map_scores_as_it_did(tmp_path: Path) -> None:
    theirs = Spotlike(feed_forward=64).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    file = opened(tmp_path, theirs.state_dict())
    (tmp_path / "map.yaml").write_text(
        starter_map(file).replace('"num_heads": 8', '"num_heads": 2')
    )
    ours = assemble(file, read_map(tmp_path / "map.yaml"))
    features = torch.rand(5, 8, 36, generator=generator)
    status = torch.randint(3, (5, 8), generator=generator)
    with torch.inference_mode():
        score, agreement = ours(features, status)
        torch.testing.assert_close(score, theirs(features, status), rtol=1e-4, atol=1e-5)
    assert agreement.unique().tolist() == [3.0]
