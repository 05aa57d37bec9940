"""Maps: which tensor of somebody else's file is which of an order model, written by a person.

config: {block_length: 32, num_layers: 3, hidden_size: 128, num_heads: 8}
tensors:
  features.weight: input.weight
  position.weight: {from: pos, rows: "0:32"}
  layers.0.qkv.weight: {concat: [l.0.q.weight, l.0.k.weight, l.0.v.weight]}
  layers.0.up.weight: {from: l.0.fc.weight, transpose: true}
  head.weight: {concat: [head.weight, {constant: 0}]}
  head.bias: {concat: [head.bias, {constant: 3}]}
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from spot_batch.drafters.distributions import TOP_K
from spot_batch.drafters.order import OrderConfig, OrderModel
from spot_batch.lab.foreign.files import (
    ForeignFile,
    config_by_shapes,
    layers_of,
    looks_like,
    wanted_shapes,
)

_RANGES = re.compile(r"\d+(:\d+)?(,\d+(:\d+)?)*")
_MAX_MAP_BYTES = 1_000_000


class Section(BaseModel):
    """A part of a map; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Piece(Section):
    """Where a tensor, or a part of one, comes from: a tensor of the file, several joined along
    `axis`, or a constant, which fills what the others leave. Ranges are written "0:32,35,34".

    What is taken is transposed first, then cut to rows and columns, then scaled.
    """

    source: str | None = Field(default=None, alias="from")
    concat: tuple[Piece, ...] | None = Field(default=None, min_length=1)
    constant: float | None = Field(default=None, allow_inf_nan=False)
    axis: int = Field(default=0, ge=0, le=1)
    transpose: bool = False
    rows: str | None = None
    columns: str | None = None
    scale: float = Field(default=1.0, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _a_name_alone(cls, value: object) -> object:
        if value is None:
            raise ValueError("is null: say where it comes from")
        return {"from": value} if isinstance(value, str) else value

    @field_validator("rows", "columns", mode="before")
    @classmethod
    def _ranges(cls, value: object) -> object:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if text is not None and not (isinstance(text, str) and _RANGES.fullmatch(text)):
            raise ValueError(f'want ranges such as "0:32,35", got {value!r}')
        return text

    @model_validator(mode="after")
    def _one_origin(self) -> Piece:
        given = [self.source is not None, self.concat is not None, self.constant is not None]
        if sum(given) != 1:
            raise ValueError("want one of from, concat and constant")
        if self.concat is not None:
            if any(part.concat is not None for part in self.concat):
                raise ValueError("concat takes tensors and constants, not another concat")
            if sum(part.constant is not None for part in self.concat) > 1:
                raise ValueError("concat takes one constant at most: it fills what is left")
        return self


class DrafterMap(Section):
    """A whole map: the order model's shape, and where each of its tensors comes from."""

    config: OrderConfig
    tensors: dict[str, Piece]

    @field_validator("config", mode="before")
    @classmethod
    def _checked_config(cls, value: object) -> OrderConfig:
        if isinstance(value, OrderConfig):
            return value
        if not isinstance(value, dict):
            raise ValueError("want block_length, num_layers, hidden_size and num_heads")
        try:
            return OrderConfig(**value)
        except TypeError as error:
            raise ValueError(str(error).replace("OrderConfig.__init__()", "config")) from error


def read_map(path: Path) -> DrafterMap:
    """The map of a YAML or JSON file. Raises ValueError naming the file and the key."""
    try:
        if path.stat().st_size > _MAX_MAP_BYTES:
            raise ValueError("larger than a megabyte")
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        return DrafterMap.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(each) for each in first["loc"]) or "the map"
        said = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        raise ValueError(f"{path}: {where}: {said}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a map ({str(error).splitlines()[0]})") from error


def assemble(file: ForeignFile, plan: DrafterMap) -> OrderModel:
    """The order model that a map makes of a file.

    Raises ValueError naming the tensor, and both shapes where they differ; nothing is loaded before
    every tensor is accounted for.
    """
    if plan.config.top_k != TOP_K:
        raise ValueError(f"the drafter reads top-{plan.config.top_k}, we keep top-{TOP_K}")
    wanted = wanted_shapes(plan.config)
    for name in plan.tensors:
        if name not in wanted:
            raise ValueError(f"{name}: no tensor of an order drafter{_near(name, wanted)}")
    missing = [name for name in wanted if name not in plan.tensors]
    if missing:
        raise ValueError(f"the map leaves out {', '.join(missing)}")
    for name, shape in wanted.items():
        _check(file, name, plan.tensors[name], shape)
    with torch.device("meta"):
        model = OrderModel(plan.config)
    tensors = {name: _made(file, plan.tensors[name], shape) for name, shape in wanted.items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: holds values that are not finite")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _check(file: ForeignFile, name: str, piece: Piece, shape: tuple[int, ...]) -> None:
    if piece.constant is not None:
        return
    sizes = [_shape(file, name, part) for part in piece.concat or (piece,)]
    known = [size for size in sizes if size is not None]
    if piece.concat is None:
        found: tuple[int, ...] = known[0]
    else:
        if not known or piece.axis >= len(known[0]):
            raise ValueError(f"{name}: nothing to join along axis {piece.axis}")
        across = {size[: piece.axis] + size[piece.axis + 1 :] for size in known}
        if len(across) > 1:
            raise ValueError(
                f"{name}: cannot join {' and '.join(str(list(size)) for size in known)} "
                f"along axis {piece.axis}"
            )
        total = sum(size[piece.axis] for size in known)
        if len(known) < len(sizes) and len(shape) > piece.axis:
            total = max(total, shape[piece.axis])
        found = (*known[0][: piece.axis], total, *known[0][piece.axis + 1 :])
    if found != shape:
        raise ValueError(f"{name}: the map gives {list(found)}, want {list(shape)}")


def _shape(file: ForeignFile, name: str, piece: Piece) -> tuple[int, ...] | None:
    """What a piece comes to; None for a constant."""
    if piece.source is None:
        return None
    names = {tensor.name for tensor in file.tensors}
    if piece.source not in names:
        raise ValueError(
            f"{name}: the file has no tensor {piece.source}{_near(piece.source, names)}"
        )
    tensor = file[piece.source]
    if not tensor.dtype.startswith(("float", "bfloat")):
        raise ValueError(f"{name}: {piece.source} is of {tensor.dtype}, want floating point")
    shape = tensor.shape
    if piece.transpose or piece.columns is not None:
        if len(shape) != 2:
            raise ValueError(f"{name}: {piece.source} is {list(shape)}, want a matrix")
        shape = shape[::-1] if piece.transpose else shape
    for axis, ranges in ((0, piece.rows), (1, piece.columns)):
        if ranges is None:
            continue
        if not shape:
            raise ValueError(f"{name}: {piece.source} is a number and has no rows")
        index = _index(ranges)
        if not index or max(index) >= shape[axis]:
            raise ValueError(
                f"{name}: {piece.source} is {list(shape)}, it has no {ranges!r} along axis {axis}"
            )
        shape = (*shape[:axis], len(index), *shape[axis + 1 :])
    return shape


def _index(ranges: str) -> list[int]:
    index: list[int] = []
    for each in ranges.split(","):
        first, colon, last = each.partition(":")
        if int(last or first) > 10_000_000:
            raise ValueError(f"{each}: beyond any tensor of a drafter")
        index += range(int(first), int(last)) if colon else [int(first)]
    return index


def _made(file: ForeignFile, piece: Piece, shape: tuple[int, ...]) -> Tensor:
    if piece.constant is not None:
        return torch.full(shape, piece.constant)
    if piece.concat is None:
        return _taken(file, piece)
    parts = [None if part.source is None else _taken(file, part) for part in piece.concat]
    left = shape[piece.axis] - sum(part.shape[piece.axis] for part in parts if part is not None)
    size = (*shape[: piece.axis], left, *shape[piece.axis + 1 :])
    filled = [
        torch.full(size, of.constant or 0.0) if part is None else part
        for part, of in zip(parts, piece.concat, strict=True)
    ]
    return (torch.cat(filled, dim=piece.axis) * piece.scale).contiguous()


def _taken(file: ForeignFile, piece: Piece) -> Tensor:
    assert piece.source is not None
    tensor = file.load(piece.source)
    if piece.transpose:
        tensor = tensor.T
    if piece.rows is not None:
        tensor = tensor[_index(piece.rows)]
    if piece.columns is not None:
        tensor = tensor[:, _index(piece.columns)]
    return (tensor * piece.scale).contiguous()


def _near(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


# -- a map to start from ---------------------------------------------------------------------------

_HINTS = {
    "attention_norm": r"norm_?1|ln_?1|attn_norm|attention_norm|input_layernorm",
    "qkv": r"in_proj|qkv|c_attn",
    "out": r"out_proj|o_proj|attn.*proj|\bout\b",
    "feed_norm": r"norm_?2|ln_?2|ffn?_norm|feed_norm|post_attention_layernorm",
    "up": r"linear1|fc_?1|up|c_fc|(?:mlp|ffn?|feed)\.0",
    "down": r"linear2|fc_?2|down|c_proj|(?:mlp|ffn?|feed)\.[23]",
    "features": r"feat|in_?proj|input|embed_?in",
    "position": r"pos",
    "status": r"state|status|type|slot",
    "norm": r"norm|ln_f",
    "hidden": r"head\.0|hidden|out\.0",
    "head": r"head|out|score",
}


def starter_map(file: ForeignFile) -> str:
    """A map to complete by hand, as YAML: guesses by shape and name, null where there is none."""
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    config = config_by_shapes(shapes)
    looks = looks_like(file)
    size = looks.hidden_size or 128
    heads = next(count for count in (8, 4, 2, 1) if size % count == 0)
    guess = OrderConfig(
        block_length=looks.block_length or 32,
        num_layers=looks.num_layers or 3,
        hidden_size=size,
        num_heads=heads,
    )
    lines = [
        "# Complete this by hand: null has no guess, and a guess goes by shape and name alone.",
        "# num_heads does not show in a file. docs/drafters.md says how to write a tensor.",
        f"config: {json.dumps(_fields(guess))}",
        "tensors:",
    ]
    guesses: dict[str, object] = {}
    for name, shape in wanted_shapes(guess).items():
        found = name if config is not None else _guess(name, shape, shapes, guesses)
        guesses[name] = found
        lines.append(f"  {name}: {json.dumps(found)}  # {list(shape)}")
    return "\n".join(lines) + "\n"


def _fields(config: OrderConfig) -> dict[str, int]:
    return {
        name: getattr(config, name)
        for name in ("block_length", "num_layers", "hidden_size", "num_heads")
    }


def _guess(
    name: str,
    shape: tuple[int, ...],
    shapes: Mapping[str, Sequence[int]],
    guesses: Mapping[str, object],
) -> object:
    """A tensor of this shape in the right place with a telling name, or pieces to join."""
    stem, _, what = name.rpartition(".")
    of_weight = guesses.get(f"{stem}.weight")
    if what == "bias" and isinstance(of_weight, str) and of_weight.endswith("weight"):
        beside = of_weight.removesuffix("weight") + "bias"
        if tuple(shapes.get(beside, ())) == shape:
            return beside
    part = stem.rpartition(".")[2]
    taken = {each for each in guesses.values() if isinstance(each, str)}
    among = [
        each
        for each in _place_of(name, shapes)
        if each not in taken and each.endswith("bias") == (what == "bias")
    ]
    fitting = [each for each in among if tuple(shapes[each]) == shape]
    told = [each for each in fitting if re.search(_HINTS[part], each, re.I)]
    if told:
        return told[0]
    if len(shape) == 2 and len(fitting) == 1:
        return fitting[0]
    if part == "qkv":
        return _three(among, shape, shapes)
    if part == "head":  # one output of a model without an agreement head: then always sure
        single = [each for each in among if tuple(shapes[each]) == (1, *shape[1:])]
        if single:
            return {"concat": [single[-1], {"constant": 0 if what == "weight" else 3}]}
    return None


def _place_of(name: str, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The tensors of the layer that a tensor of ours is in, or those outside all layers."""
    layers = layers_of(shapes)
    match = re.match(r"layers\.(\d+)\.", name)
    if match is None:
        inside = {each for names in layers.values() for each in names.values()}
        return [each for each in shapes if each not in inside]
    at = int(match[1])
    return list(list(layers.values())[at].values()) if at < len(layers) else []


def _three(
    among: Sequence[str], shape: tuple[int, ...], shapes: Mapping[str, Sequence[int]]
) -> object:
    """Query, key and value in three tensors."""
    third = [each for each in among if tuple(shapes[each]) == (shape[0] // 3, *shape[1:])]
    for letters in ("qkv", ("query", "key", "value")):
        of_letter = [re.compile(rf"(?:^|[._]){each}(?:_?proj)?[._]", re.I) for each in letters]
        parts = [next((name for name in third if sign.search(name)), None) for sign in of_letter]
        if None not in parts:
            return {"concat": parts}
    return None
