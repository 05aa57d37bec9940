"""What a config says of a target's weights: every tensor's name and shape, and what is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.families import Family
from spot_batch.checkpoints.json_files import Fields

_ROTARY = ("rope_theta", "partial_rotary_factor")  # what newer files have in rope_parameters
_MOST_PARTS = 1_000_000  # a config that says more is damaged, and would fill the memory here

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

KEY_STEP = 128
"""Keys are padded to a multiple of this, so that few shapes occur."""


VISIT_BYTES = 4 << 30
"""What the states that one call of head and transition looks at may take together; one state is
looked at in any case."""

LOGITS_GREEDY, LOGITS_SAMPLED, LOGITS_FILTERED = 4, 7, 16
"""A state's float32 logits as often as they are held at once while it is looked at: with what is
computed of them at temperature 0, above it, and above it with top-p or top-k (measured 3.0, 5.7
and 14.3)."""


def padded_length(num_keys: int) -> int:
    """Keys a slot attends over, padding included, given how many it really has."""
    return -(-num_keys // KEY_STEP) * KEY_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The sparse layers of a body. `has_bias`: the router corrects its choice by a bias."""

    num_experts: int
    inner_size: int
    num_shared: int
    has_bias: bool
    sparse: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A body's sizes. `inner_size` is that of the dense feed-forward layers; an attention bias is
    that of queries, keys and values, an output bias that of the projection behind them."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    vocab_size: int
    max_context: int
    is_tied: bool
    has_attention_bias: bool
    has_output_bias: bool
    experts: Experts | None

    def kv_bytes(self, element_bytes: int) -> int:
        """Bytes that one position of a stored prefix takes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


def read_sizes(config: Mapping[str, Any], family: Family, where: str) -> Sizes:
    """The sizes of a config.json; ModelError names the field that is missing or of no use."""
    config = with_rotary(config, where)
    if config.get("quantization_config") is not None:
        raise ModelError(f"{where}: quantised weights are not supported")
    read = Fields(config, where)
    num_layers, num_heads = read.count("num_hidden_layers"), read.count("num_attention_heads")
    num_kv_heads, hidden_size = read.count("num_key_value_heads"), read.count("hidden_size")
    if num_heads % num_kv_heads:
        raise ModelError(f"{where}: {num_heads} heads do not share {num_kv_heads} key heads evenly")
    head_dim = read.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim must be even: its halves are rotated, got {head_dim}")
    experts = _EXPERTS[family.name](read, num_layers)
    num_parts = num_layers * (1 if experts is None else experts.num_experts)
    if num_parts > _MOST_PARTS:
        raise ModelError(f"{where}: {num_parts:,} layers or experts are more than any model has")
    has_bias = read.flag("attention_bias")
    return Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        inner_size=read.count("intermediate_size"),
        vocab_size=read.count("vocab_size"),
        max_context=read.count("max_position_embeddings"),
        is_tied=read.flag("tie_word_embeddings"),
        has_attention_bias=read.flag("use_qkv_bias") or has_bias,
        has_output_bias=read.flag("use_bias") or has_bias,
        experts=experts,
    )


def with_rotary(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A config.json with its rotary fields at the top, where newer files have them one below.

    Raises ModelError for a rotation that is scaled, and where a field is said twice and otherwise.
    """
    scaling, below = config.get("rope_scaling"), config.get("rope_parameters") or {}
    if scaling is not None and (
        not isinstance(scaling, Mapping) or _rope_type(scaling) != "default"
    ):
        raise ModelError(f"{where}: rope_scaling {scaling!r} is not supported")
    if not isinstance(below, Mapping):
        raise ModelError(f"{where}: rope_parameters must be an object, got {below!r}")
    if _rope_type(below, "default") != "default":
        raise ModelError(f"{where}: rope_type {_rope_type(below)!r} is not supported")
    fields = {name: below[name] for name in _ROTARY if below.get(name) is not None}
    for name, value in fields.items():
        if config.get(name) not in (None, value):
            raise ModelError(
                f"{where}: {name} is {config[name]!r}, and {value!r} in rope_parameters"
            )
    return {**config, **fields}


def _rope_type(rope: Mapping[str, Any], default: str | None = None) -> object:
    """How a rotation is scaled; older files call it `type`."""
    return rope.get("rope_type", rope.get("type", default))


def _no_experts(read: Fields, num_layers: int) -> None:
    return None


def _qwen3_experts(read: Fields, num_layers: int) -> Experts:
    dense = read.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ModelError(f"{read.where}: mlp_only_layers must be a list of layers, got {dense!r}")
    step = read.count("decoder_sparse_step", 1)
    return Experts(
        num_experts=read.count("num_experts"),
        inner_size=read.count("moe_intermediate_size"),
        num_shared=0,
        has_bias=False,
        sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )


def _llada2_experts(read: Fields, num_layers: int) -> Experts:
    num_dense = read.count("first_k_dense_replace", 0, least=0)
    return Experts(
        num_experts=read.count("num_experts"),
        inner_size=read.count("moe_intermediate_size"),
        num_shared=read.count("num_shared_experts", 0, least=0),
        has_bias=read.flag("moe_router_enable_expert_bias", True),
        sparse=tuple(layer >= num_dense for layer in range(num_layers)),
    )


_EXPERTS = {"sdar": _no_experts, "sdar-moe": _qwen3_experts, "llada2": _llada2_experts}


# -- tensors ---------------------------------------------------------------------------------------


def tensor_shapes(sizes: Sizes, family: Family) -> Shapes:
    """Every tensor of a published checkpoint of these sizes, by name."""
    return dict(_tensors(sizes, *_LAYOUTS[family.name]))


def num_parameters(shapes: Mapping[str, Shape]) -> int:
    return sum(map(math.prod, shapes.values()))


def _tensors(sizes: Sizes, embedding: str, attention: _Attention) -> Iterator[tuple[str, Shape]]:
    hidden = (sizes.hidden_size,)
    yield f"model.{embedding}.weight", (sizes.vocab_size, sizes.hidden_size)
    for layer in range(sizes.num_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", hidden
        yield from attention(sizes, at)
        yield f"{at}.post_attention_layernorm.weight", hidden
        yield from _feed_forward(sizes, layer)
    yield "model.norm.weight", hidden
    if not sizes.is_tied:
        yield "lm_head.weight", (sizes.vocab_size, sizes.hidden_size)


def _linear(at: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.weight", (rows, columns)
    if bias:
        yield f"{at}.bias", (rows,)


def _qwen3_attention(sizes: Sizes, at: str) -> Iterator[tuple[str, Shape]]:
    hidden, head, bias = sizes.hidden_size, sizes.head_dim, sizes.has_attention_bias
    of_query, of_key = sizes.num_heads * head, sizes.num_kv_heads * head
    for name, rows in (("q", of_query), ("k", of_key), ("v", of_key)):
        yield from _linear(f"{at}.self_attn.{name}_proj", rows, hidden, bias=bias)
    yield from _linear(f"{at}.self_attn.o_proj", hidden, of_query, bias=sizes.has_output_bias)
    yield f"{at}.self_attn.q_norm.weight", (head,)
    yield f"{at}.self_attn.k_norm.weight", (head,)


def _llada2_attention(sizes: Sizes, at: str) -> Iterator[tuple[str, Shape]]:
    hidden, head, bias = sizes.hidden_size, sizes.head_dim, sizes.has_attention_bias
    of_query, of_all = sizes.num_heads * head, (sizes.num_heads + 2 * sizes.num_kv_heads) * head
    yield from _linear(f"{at}.attention.query_key_value", of_all, hidden, bias=bias)
    yield f"{at}.attention.query_layernorm.weight", (head,)
    yield f"{at}.attention.key_layernorm.weight", (head,)
    yield from _linear(f"{at}.attention.dense", hidden, of_query, bias=sizes.has_output_bias)


def _feed_forward(sizes: Sizes, layer: int) -> Iterator[tuple[str, Shape]]:
    at, experts = f"model.layers.{layer}.mlp", sizes.experts
    if experts is None or not experts.sparse[layer]:
        yield from _swiglu(at, sizes.hidden_size, sizes.inner_size)
        return
    yield f"{at}.gate.weight", (experts.num_experts, sizes.hidden_size)
    if experts.has_bias:
        yield f"{at}.gate.expert_bias", (experts.num_experts,)
    for expert in range(experts.num_experts):
        yield from _swiglu(f"{at}.experts.{expert}", sizes.hidden_size, experts.inner_size)
    if experts.num_shared:
        inner = experts.num_shared * experts.inner_size
        yield from _swiglu(f"{at}.shared_experts", sizes.hidden_size, inner)


def _swiglu(at: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


_Attention = Callable[[Sizes, str], Iterator[tuple[str, Shape]]]
_LAYOUTS: Mapping[str, tuple[str, _Attention]] = {  # what the embedding is called, and who attends
    "sdar": ("embed_tokens", _qwen3_attention),
    "sdar-moe": ("embed_tokens", _qwen3_attention),
    "llada2": ("word_embeddings", _llada2_attention),
}

# Experts in one tensor, as dFactory (a name each) and transformers (gate over up) write them.
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")


def unstacked(stored: Mapping[str, Shape]) -> Shapes:
    """The shapes with stacked experts spelled out as the published layout has them."""
    shapes: Shapes = {}
    for name, shape in stored.items():
        stacked = _STACKED.fullmatch(name)
        if stacked is None or len(shape) != 3:
            shapes[name] = shape
            continue
        at, which = stacked[1], stacked[2]
        num_experts, rows, columns = shape
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
        for expert in range(num_experts):
            for part in parts:
                shapes[f"{at}.{expert}.{part}.weight"] = (rows // len(parts), columns)
    return shapes


def misfits(stored: Mapping[str, Shape], sizes: Sizes, family: Family) -> list[str]:
    """What of the stored tensors is not as the config says: missing, unknown, of another shape."""
    wanted, found = tensor_shapes(sizes, family), unstacked(stored)
    if sizes.is_tied:
        found.pop("lm_head.weight", None)  # a copy of the embedding
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is not known" for name in found if name not in wanted]
    wrong += [
        f"{name} has the shape {list(found[name])}, want {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return wrong
