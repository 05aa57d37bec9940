"""SDAR on transformers' Qwen3 and Qwen3-MoE: another mask, another cache rule, the same bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model, Qwen3MoeConfig, Qwen3MoeModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.json_files import Fields
from spot_batch.checkpoints.shapes import Sizes, with_rotary
from spot_batch.models.attention import ATTENTION_NAME
from spot_batch.models.body import Body, Network, without_memory
from spot_batch.models.experts import best


class Router(nn.Module):
    """Softmax over all experts in float32, the best of them, their weights in the rows' dtype.

    Called as transformers' own is: whose choice between equal experts it does not take over.
    """

    def __init__(self, config: Qwen3MoeConfig) -> None:
        super().__init__()
        self.top_k: int = config.num_experts_per_tok
        self.sums_to_one: bool = config.norm_topk_prob
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(N, d) -> (N, E) logits, (N, k) weights, (N, k) experts."""
        logits = self.proj(rows)
        shares = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = best(shares, self.top_k)
        weights = shares.gather(1, chosen)
        if self.sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(rows.dtype), chosen


def qwen3_body(config: Mapping[str, Any], sizes: Sizes, *, where: str, dtype: torch.dtype) -> Body:
    """SDAR's network; ModelError names the field of config.json that is of no use."""
    read = qwen3_config(config, sizes, where=where)
    with without_memory(dtype):
        model = Qwen3Model(read)
        network = Network(model, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    return _body(network, sizes, lambda: Qwen3RotaryEmbedding(read))


def qwen3_moe_body(
    config: Mapping[str, Any], sizes: Sizes, *, where: str, dtype: torch.dtype
) -> Body:
    """SDAR-MoE's network; ModelError names the field of config.json that is of no use."""
    read = qwen3_moe_config(config, sizes, where=where)
    with without_memory(dtype):
        model = Qwen3MoeModel(read)
        for layer in model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.gate = Router(read)
        network = Network(model, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    return _body(network, sizes, lambda: Qwen3MoeRotaryEmbedding(read))


def qwen3_config(config: Mapping[str, Any], sizes: Sizes, *, where: str) -> Qwen3Config:
    """A config.json as Qwen3's, without the fields that its own code needs."""
    return Qwen3Config(**_common(config, sizes, where))


def qwen3_moe_config(config: Mapping[str, Any], sizes: Sizes, *, where: str) -> Qwen3MoeConfig:
    """A config.json as Qwen3-MoE's; how experts are chosen must be said."""
    assert sizes.experts is not None, "its family has experts"
    num_chosen, sums_to_one = config.get("num_experts_per_tok"), config.get("norm_topk_prob")
    if type(num_chosen) is not int or not 1 <= num_chosen <= sizes.experts.num_experts:
        raise ModelError(
            f"{where}: num_experts_per_tok must be 1 to num_experts {sizes.experts.num_experts}, "
            f"got {num_chosen!r}"
        )
    if not isinstance(sums_to_one, bool):
        raise ModelError(f"{where}: norm_topk_prob must be true or false, got {sums_to_one!r}")
    return Qwen3MoeConfig(
        **_common(config, sizes, where),
        num_experts=sizes.experts.num_experts,
        moe_intermediate_size=sizes.experts.inner_size,
        num_experts_per_tok=num_chosen,
        norm_topk_prob=sums_to_one,
        mlp_only_layers=[at for at, sparse in enumerate(sizes.experts.sparse) if not sparse],
        decoder_sparse_step=1,
    )


def _common(config: Mapping[str, Any], sizes: Sizes, where: str) -> dict[str, Any]:
    config = with_rotary(config, where)
    if config.get("use_sliding_window"):
        raise ModelError(f"{where}: use_sliding_window is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act {activation!r} is not supported")
    read = Fields(config, where)
    theta = read.number("rope_theta", above=0)
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.inner_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": activation,
        "max_position_embeddings": sizes.max_context,
        "rms_norm_eps": read.number("rms_norm_eps", 1e-6, above=0),
        "attention_bias": sizes.has_attention_bias,
        "tie_word_embeddings": sizes.is_tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attn_implementation": ATTENTION_NAME,
    }


def _body(network: Network, sizes: Sizes, rotary: Callable[[], nn.Module]) -> Body:
    return Body(
        network=network,
        sizes=sizes,
        rotary=rotary,
        embedding="model.embed_tokens.weight",
    )
