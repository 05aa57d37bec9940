"""LLaDA2: a mixture of many small experts, routed by groups. Our own module.

Its parts are transformers' where they are the same; names are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeMLP,
    Qwen3MoeRMSNorm,
    apply_rotary_pos_emb,
)

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.json_files import Fields
from spot_batch.checkpoints.shapes import Experts, Sizes, with_rotary
from spot_batch.models.attention import SlotAttention, slot_attention
from spot_batch.models.body import Body, Network, without_memory
from spot_batch.models.experts import best


@dataclass(frozen=True, kw_only=True, slots=True)
class Llada2Config:
    """What its config.json must say. `library` is the same for the parts that are transformers'."""

    sizes: Sizes
    experts: Experts
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    num_experts_per_tok: int
    num_groups: int
    num_kept_groups: int
    routed_scaling_factor: float
    library: Qwen3MoeConfig


class Rotary(nn.Module):
    """Cosines and sines of the rotated dimensions, for halves that stand side by side."""

    inv_freq: Tensor

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        self.config = config
        exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
        self.register_buffer("inv_freq", 1.0 / config.rope_theta**exponent, persistent=False)

    def forward(self, rows: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """(1, N) positions -> (1, N, rotary_dim) each, in the rows' dtype."""
        angle = position[..., None].float() * self.inv_freq
        both = torch.cat((angle, angle), dim=-1)
        return both.cos().to(rows.dtype), both.sin().to(rows.dtype)


class Attention(nn.Module):
    """Queries, keys and values of one linear, normed a head, the first dimensions rotated."""

    def __init__(self, config: Llada2Config, layer_idx: int) -> None:
        super().__init__()
        sizes = config.sizes
        self.layer_idx = layer_idx
        self.head_dim = sizes.head_dim
        self.rotary_dim = config.rotary_dim
        self.scaling = sizes.head_dim**-0.5
        self.heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
        self.query_key_value = nn.Linear(
            sizes.hidden_size, sum(self.heads) * sizes.head_dim, bias=False
        )
        self.query_layernorm = Qwen3MoeRMSNorm(sizes.head_dim, eps=config.rms_norm_eps)
        self.key_layernorm = Qwen3MoeRMSNorm(sizes.head_dim, eps=config.rms_norm_eps)
        self.dense = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.hidden_size, bias=False)

    def forward(
        self, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: SlotAttention
    ) -> Tensor:
        """(1, N, d) -> (1, N, d)"""
        heads = self.query_key_value(rows).view(*rows.shape[:-1], -1, self.head_dim)
        query, key, value = heads.split(self.heads, dim=-2)
        query, key = self._rotated(
            self.query_layernorm(query).transpose(1, 2),
            self.key_layernorm(key).transpose(1, 2),
            rotation,
        )
        out, _ = slot_attention(
            self,
            query,
            key,
            value.transpose(1, 2),
            None,
            self.scaling,
            slot_attention=attention,
        )
        mixed: Tensor = self.dense(out.reshape(*rows.shape[:-1], -1))
        return mixed

    def _rotated(
        self, query: Tensor, key: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        split = self.rotary_dim
        turned = apply_rotary_pos_emb(query[..., :split], key[..., :split], *rotation)
        return (
            torch.cat((turned[0], query[..., split:]), dim=-1),
            torch.cat((turned[1], key[..., split:]), dim=-1),
        )


class Router(nn.Module):
    """Sigmoid scores in float32; a bias, then the best groups, decide who is chosen.

    The bias and the groups do nothing else: the weights are the chosen scores themselves.
    """

    expert_bias: Tensor | None

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        experts = config.experts
        self.top_k = config.num_experts_per_tok
        self.num_groups = config.num_groups
        self.num_kept_groups = config.num_kept_groups
        self.scale = config.routed_scaling_factor
        self.act_fn = nn.Sigmoid()
        self.proj = nn.Linear(
            config.sizes.hidden_size, experts.num_experts, bias=False, dtype=torch.float32
        )
        bias = torch.zeros(experts.num_experts, dtype=torch.float32) if experts.has_bias else None
        self.register_buffer("expert_bias", bias)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(N, d) -> (N, k) experts and (N, k) weights, float32."""
        scores = self.act_fn(self.proj(rows.float()))
        choice = scores if self.expert_bias is None else scores + self.expert_bias
        chosen = best(self._in_kept_groups(choice), self.top_k)
        weights = scores.gather(1, chosen)
        if self.top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale

    def _in_kept_groups(self, choice: Tensor) -> Tensor:
        """(N, E), at -inf what is outside the groups whose two largest sum up to most."""
        groups = choice.view(len(choice), self.num_groups, -1)
        largest = groups.topk(2, dim=-1).values
        kept = best(largest[..., 0] + largest[..., 1], self.num_kept_groups)
        outside = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, kept, False)
        return groups.masked_fill(outside[..., None], -torch.inf).flatten(1)


class SparseMLP(nn.Module):
    """Routed experts, their sum rounded once, and experts that everyone shares, unscaled."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        experts = config.experts
        self.gate = Router(config)
        self.experts = Qwen3MoeExperts(config.library)
        self.shared_experts = (
            Qwen3MoeMLP(config.library, intermediate_size=experts.num_shared * experts.inner_size)
            if experts.num_shared
            else None
        )

    def forward(self, rows: Tensor) -> Tensor:
        """(1, N, d) -> (1, N, d)"""
        flat = rows.flatten(0, 1)
        chosen, weights = self.gate(flat)
        routed: Tensor = self.experts(flat, chosen, weights).view_as(rows)
        return routed if self.shared_experts is None else routed + self.shared_experts(rows)


class Layer(nn.Module):
    """Attention, then experts (or one dense block), each of normed rows and added to them."""

    def __init__(self, config: Llada2Config, layer_idx: int) -> None:
        super().__init__()
        sizes = config.sizes
        self.input_layernorm = Qwen3MoeRMSNorm(sizes.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, layer_idx)
        self.post_attention_layernorm = Qwen3MoeRMSNorm(sizes.hidden_size, eps=config.rms_norm_eps)
        self.mlp = (
            SparseMLP(config) if config.experts.sparse[layer_idx] else Qwen3MoeMLP(config.library)
        )

    def forward(
        self, rows: Tensor, rotation: tuple[Tensor, Tensor], attention: SlotAttention
    ) -> Tensor:
        """(1, N, d) -> (1, N, d)"""
        rows = rows + self.attention(self.input_layernorm(rows), rotation, attention)
        fed: Tensor = self.mlp(self.post_attention_layernorm(rows))
        return rows + fed


class Llada2Model(nn.Module):
    """The body: embedding, layers, final norm."""

    def __init__(self, config: Llada2Config) -> None:
        super().__init__()
        sizes = config.sizes
        self.word_embeddings = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(sizes.num_layers))
        self.norm = Qwen3MoeRMSNorm(sizes.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Rotary(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        slot_attention: SlotAttention,
        use_cache: bool = False,
    ) -> BaseModelOutput:
        """(1, N) ids and positions -> (1, N, d) final hidden rows."""
        assert not use_cache, "the prefix cache is ours"
        rows: Tensor = self.word_embeddings(input_ids)
        rotation = self.rotary_emb(rows, position_ids)
        for layer in self.layers:
            rows = layer(rows, rotation, slot_attention)
        return BaseModelOutput(last_hidden_state=self.norm(rows))


def llada2_body(config: Mapping[str, Any], sizes: Sizes, *, where: str, dtype: torch.dtype) -> Body:
    """The network of a config.json; ModelError names the field that is missing or of no use."""
    read = llada2_config(config, sizes, where=where)
    with without_memory(dtype):
        network = Network(
            Llada2Model(read), hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size
        )
    return Body(
        network=network,
        sizes=sizes,
        rotary=lambda: Rotary(read),
        embedding="model.word_embeddings.weight",
    )


# With another value the checkpoint is another model; left out they are what they must be.
_OFFERED: Mapping[str, object] = {
    "hidden_act": "silu",
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "norm_softmax": False,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
# What its own class would fill in fits no checkpoint.
_NEEDED = (
    "head_dim",
    "moe_intermediate_size",
    "num_shared_experts",
    "first_k_dense_replace",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "partial_rotary_factor",
    "rope_theta",
    "rms_norm_eps",
)


def llada2_config(config: Mapping[str, Any], sizes: Sizes, *, where: str) -> Llada2Config:
    """A config.json, read; ModelError for a field that is missing, or of a model not offered."""
    config = with_rotary(config, where)
    missing = [name for name in _NEEDED if type(config.get(name)) not in (int, float)]
    if missing:
        raise ModelError(f"{where}: {', '.join(missing)} must be given, as numbers")
    for name, offered in _OFFERED.items():
        if config.get(name) not in (None, offered):
            raise ModelError(f"{where}: {name} {config[name]!r} is not supported")
    experts, fields = sizes.experts, Fields(config, where)
    assert experts is not None, "its family has experts"
    read = Llada2Config(
        sizes=sizes,
        experts=experts,
        rms_norm_eps=fields.number("rms_norm_eps", above=0),
        rope_theta=fields.number("rope_theta", above=0),
        rotary_dim=int(sizes.head_dim * fields.number("partial_rotary_factor", above=0)),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        num_groups=fields.count("n_group"),
        num_kept_groups=fields.count("topk_group"),
        routed_scaling_factor=fields.number("routed_scaling_factor", above=0),
        library=Qwen3MoeConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.inner_size,
            moe_intermediate_size=experts.inner_size,
            num_experts=experts.num_experts,
            hidden_act="silu",
            experts_implementation="grouped_mm",
        ),
    )
    _check_routing(read, where)
    if config.get("rotary_dim") not in (None, read.rotary_dim) or read.rotary_dim % 2:
        raise ModelError(
            f"{where}: rotary_dim {config.get('rotary_dim')!r} is not the even part of head_dim "
            f"that partial_rotary_factor says, {read.rotary_dim}"
        )
    return read


def _check_routing(read: Llada2Config, where: str) -> None:
    num_experts, num_groups, num_kept = (
        read.experts.num_experts,
        read.num_groups,
        read.num_kept_groups,
    )
    if num_groups < 1 or num_experts % num_groups or num_experts < 2 * num_groups:
        raise ModelError(
            f"{where}: {num_experts} experts are not {num_groups} even groups of two or more"
        )
    if not 1 <= num_kept <= num_groups:
        raise ModelError(f"{where}: topk_group must be 1 to n_group {num_groups}, got {num_kept}")
    most = num_experts // num_groups * num_kept
    if not 1 <= read.num_experts_per_tok <= most:
        raise ModelError(
            f"{where}: num_experts_per_tok must be 1 to {most}, the experts of {num_kept} groups, "
            f"got {read.num_experts_per_tok}"
        )
