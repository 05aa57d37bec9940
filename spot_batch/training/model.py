"""The bundled target's body: Qwen3 modules of any size, their logits, and SDAR's config."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3Model

IMPOSSIBLE = float("-inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """The shape of an SDAR model with tied embeddings."""

    vocab_size: int = 512
    hidden_size: int = 256
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 576
    rope_theta: float = 10_000.0
    max_positions: int = 2048
    norm_eps: float = 1e-6


def make_model(size: ModelSize, *, seed: int) -> Qwen3Model:
    """A freshly initialised body; its weights depend on the seed only."""
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.ffn_size,
        max_position_embeddings=size.max_positions,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = Qwen3Model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
                continue
            scale = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= (2 * size.num_layers) ** 0.5  # GPT-2: keeps the residual's variance
            weight.normal_(0.0, scale, generator=generator)
    return model


def hidden_rows(model: Qwen3Model, tokens: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
    """(rows, length) tokens and positions, (rows, 1, length, length) mask -> hidden states."""
    assert tokens.ndim == 2, f"want (rows, length), got {tuple(tokens.shape)}"
    output = model(
        input_ids=tokens, position_ids=positions, attention_mask=allowed, use_cache=False
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def tied_logits(model: Qwen3Model, hidden: Tensor, *, mask_id: int) -> Tensor:
    """(n, d) hidden states -> (n, vocab) fp32 logits; the mask is never an output."""
    logits = F.linear(hidden, model.embed_tokens.weight.to(hidden.dtype)).float()
    forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool)
    forbidden[mask_id] = True
    return logits.masked_fill(forbidden, IMPOSSIBLE)
