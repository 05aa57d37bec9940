"""Published checkpoints by name: what their config.json says, so that a name alone can be checked.

From the repositories' files where these could be read, else from the model that a checkpoint was
made of (docs/targets.md says which). A file always wins over this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedCheckpoint:
    """A published checkpoint. `num_named` ids have a text; the rows of the head behind have none.

    `sampling` is its generation_config; `unsure` says what of this could not be read.
    """

    name: str
    block_length: int
    config: Mapping[str, Any]
    mask_id: int
    stop_ids: tuple[int, ...]
    num_named: int
    sampling: Mapping[str, float]
    unsure: str | None = None


def published(name: str) -> PublishedCheckpoint | None:
    """The entry of a hub id, whatever its case."""
    return _BY_NAME.get(name.lower())


def published_names() -> list[str]:
    return [entry.name for entry in _BY_NAME.values()]


_QWEN3 = {
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
_SDAR = {**_QWEN3, "architectures": ["SDARForCausalLM"], "model_type": "sdar"}
_SDAR_SIZES: Mapping[str, Mapping[str, Any]] = {
    "1.7B": {
        **_SDAR,
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
    },
    "4B": {
        **_SDAR,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
    },
    "8B": {
        **_SDAR,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
}
_SDAR_30B: Mapping[str, Any] = {
    **_QWEN3,
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_LLADA2: Mapping[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 64,
    "rope_theta": 600000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "norm_softmax": False,
    "tie_word_embeddings": False,
    "vocab_size": 157184,
    "pad_token_id": 156892,
    "eos_token_id": 156892,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
_LLADA2_MINI: Mapping[str, Any] = {
    **_LLADA2,
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
}
_LLADA2_FLASH: Mapping[str, Any] = {
    **_LLADA2,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
}
_QWEN_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def _sdar(
    name: str, config: Mapping[str, Any], width: int, unsure: str | None
) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        block_length=width,
        config=config,
        mask_id=151669,
        stop_ids=(151643, 151645),
        num_named=151670,
        sampling=_QWEN_SAMPLING,
        unsure=unsure,
    )


def _llada2(name: str, config: Mapping[str, Any]) -> PublishedCheckpoint:
    return PublishedCheckpoint(
        name=name,
        block_length=32,
        config=config,
        mask_id=156895,
        stop_ids=(156892,),
        num_named=156896,
        sampling={},
        unsure=(
            "the repository's own config.json could not be read: context, <|role_end|>, which ends "
            "samples too, and the ids without a text are known once the files are here"
        ),
    )


def _entries() -> Iterator[PublishedCheckpoint]:
    widths = (4, 8, 16, 32, 64)
    for size, config in _SDAR_SIZES.items():
        for width in widths:
            suffix = "" if width == 4 else f"-b{width}"
            yield _sdar(f"JetLM/SDAR-{size}-Chat{suffix}", config, width, None)
    of_base = "the repository's own config.json could not be read: these are Qwen3-30B-A3B's sizes"
    for name, width in (("Chat", 4), ("Chat-b8", 8), ("Chat-b32", 32), ("Sci", 4)):
        yield _sdar(f"JetLM/SDAR-30B-A3B-{name}", _SDAR_30B, width, of_base)
    for name, config in (
        ("LLaDA2.0-mini", _LLADA2_MINI),
        ("LLaDA2.0-mini-preview", _LLADA2_MINI),
        ("LLaDA2.0-flash", _LLADA2_FLASH),
    ):
        yield _llada2(f"inclusionAI/{name}", config)


_BY_NAME: Mapping[str, PublishedCheckpoint] = {entry.name.lower(): entry for entry in _entries()}
