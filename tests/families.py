"""Tiny random checkpoints of every family, in the layout in which theirs are published."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from spot_batch.checkpoints.families import FAMILIES
from spot_batch.checkpoints.json_files import read_json
from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.checkpoints.shapes import read_sizes, tensor_shapes
from tests.tiny_models import attend, byte_tokenizer

Config = dict[str, Any]

_SIZES: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGS: Mapping[str, Config] = {
    "sdar": {
        **_SIZES,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": 4,
    },
    "sdar-moe": {
        **_SIZES,
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "block_size": 8,
    },
    "llada2": {
        **_SIZES,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "partial_rotary_factor": 0.5,
        "rotary_dim": 8,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
    },
}
"""By the family's name; LLaDA2's block length, 32, is in no config."""


def write_checkpoint(
    folder: Path,
    family: str,
    *,
    num_shards: int = 1,
    stacked: bool = False,
    scale: float = 2.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **changes: object,
) -> Path:
    """A checkpoint folder; `changes` are fields of its config, `scale` widens the logits.

    `stacked`: all experts of a layer in one tensor a projection, as dFactory stores them.
    """
    tokenizer = byte_tokenizer()
    vocab_size = len(tokenizer) + 4
    config = {
        **CONFIGS[family],
        "vocab_size": vocab_size,
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.pad_token_id,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id]})
    )
    tensors = random_tensors(config, scale=scale, dtype=dtype, seed=seed)
    save_tensors(folder, in_stacks(tensors) if stacked else tensors, num_shards=num_shards)
    return folder


def random_tensors(
    config: Config, *, scale: float, dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Weights at which nothing is negligible: norms about 1, biases that change who is chosen."""
    family = FAMILIES[config["architectures"][0]]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(read_sizes(config, family, "tiny"), family).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("expert_bias"):
            tensors[name] = 0.2 * noise
        elif len(shape) == 1:
            tensors[name] = (1 + 0.1 * noise).to(dtype)
        else:
            spread = scale if "lm_head" in name or "embed" in name else 1.0
            tensors[name] = (spread * noise * (1 if "embed" in name else shape[1] ** -0.5)).to(
                dtype
            )
    return tensors


def in_stacks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`...experts.{e}.gate_proj.weight` of all e as `...experts.gate_proj`."""
    stacks: dict[str, list[Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".mlp.experts.")
        if found:
            stacks.setdefault(f"{before}{found}{after.split('.')[1]}", []).append(tensor)
        else:
            others[name] = tensor
    return {**others, **{name: torch.stack(parts) for name, parts in stacks.items()}}


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, num_shards: int = 1) -> None:
    """As one file, or as so many with an index, the tensors dealt out among them."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        held = names[number::num_shards]
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    )


class LibraryModel:
    """SDAR as transformers has it: Qwen3 (or Qwen3-MoE) under a 4-D mask, nothing of ours."""

    def __init__(self, info: ModelInfo, dtype: torch.dtype = torch.float32) -> None:
        given = read_json(info.path / "config.json")
        theta = given.pop("rope_theta")
        own = {"architectures", "model_type", "torch_dtype", "rope_scaling"}
        fields = {name: value for name, value in given.items() if name not in own}
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        is_dense = info.family.name == "sdar"
        config = Qwen3Config(**fields) if is_dense else Qwen3MoeConfig(**fields)
        model = Qwen3ForCausalLM if is_dense else Qwen3MoeForCausalLM
        how = {} if is_dense else {"experts_implementation": "eager"}
        self.model = model.from_pretrained(
            info.path, config=config, dtype=dtype, attn_implementation="eager", **how
        ).eval()
        self._dtype = dtype

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(n,) ids from position 0 on, (n, n) bool, who sees whom -> (n, V) logits."""
        out = self.model(
            input_ids=ids[None],
            position_ids=torch.arange(len(ids))[None],
            attention_mask=attend(mask, self._dtype),
            use_cache=False,
        )
        logits: Tensor = out.logits[0]
        return logits


class PlainLlada2:
    """LLaDA2 once more, from its formulas and the published tensors by name.

    One head, one token, one expert at a time; Python decides who is chosen.
    """

    def __init__(self, info: ModelInfo, dtype: torch.dtype = torch.float64) -> None:
        self.config = read_json(info.path / "config.json")
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(info.path.glob("*.safetensors")):
            self.tensors |= {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        self.chosen: dict[tuple[int, int], list[int]] = {}
        self.weights: dict[tuple[int, int], list[float]] = {}

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(n,) ids from position 0 on, (n, n) bool, who sees whom -> (n, V) logits."""
        rows = self.tensors["model.word_embeddings.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            rows = rows + self._attention(at, self._norm(f"{at}.input_layernorm", rows), mask)
            normed = self._norm(f"{at}.post_attention_layernorm", rows)
            if layer < self.config["first_k_dense_replace"]:
                rows = rows + self._swiglu(f"{at}.mlp", normed)
            else:
                fed = [self._experts(layer, token, row) for token, row in enumerate(normed)]
                rows = rows + torch.stack(fed)
        return self._norm("model.norm", rows) @ self.tensors["lm_head.weight"].T

    def _norm(self, name: str, rows: Tensor) -> Tensor:
        size = (rows**2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return rows / size.sqrt() * self.tensors[f"{name}.weight"]

    def _swiglu(self, at: str, rows: Tensor) -> Tensor:
        gate, up, down = (
            self.tensors[f"{at}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        inner = rows @ gate.T
        return (inner / (1 + torch.exp(-inner)) * (rows @ up.T)) @ down.T

    def _attention(self, at: str, rows: Tensor, mask: Tensor) -> Tensor:
        num_heads, num_kv_heads, dim = (
            self.config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        weight = self.tensors[f"{at}.attention.query_key_value.weight"]
        assert len(weight) == (num_heads + 2 * num_kv_heads) * dim
        heads = [rows @ weight[begin : begin + dim].T for begin in range(0, len(weight), dim)]
        queries, keys = heads[:num_heads], heads[num_heads : num_heads + num_kv_heads]
        values = heads[num_heads + num_kv_heads :]
        keys = [self._turned(self._norm(f"{at}.attention.key_layernorm", key)) for key in keys]
        mixed = []
        for number, query in enumerate(queries):
            turned = self._turned(self._norm(f"{at}.attention.query_layernorm", query))
            shared = number // (num_heads // num_kv_heads)
            scores = (turned @ keys[shared].T / math.sqrt(dim)).masked_fill(~mask, -math.inf)
            mixed.append(scores.softmax(-1) @ values[shared])
        return torch.cat(mixed, dim=-1) @ self.tensors[f"{at}.attention.dense.weight"].T

    def _turned(self, head: Tensor) -> Tensor:
        """Each pair (j, j + half) of the first dimensions, turned by its position's angle."""
        size = int(self.config["head_dim"] * self.config["partial_rotary_factor"])
        turned, half = head.clone(), size // 2
        for j in range(half):
            angle = torch.arange(len(head)) * self.config["rope_theta"] ** (-2 * j / size)
            cos, sin = angle.to(head.dtype).cos(), angle.to(head.dtype).sin()
            turned[:, j] = head[:, j] * cos - head[:, j + half] * sin
            turned[:, j + half] = head[:, j + half] * cos + head[:, j] * sin
        return turned

    def _experts(self, layer: int, token: int, row: Tensor) -> Tensor:
        at = f"model.layers.{layer}.mlp"
        logits = (self.tensors[f"{at}.gate.weight"] @ row).tolist()
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        bias = self.tensors[f"{at}.gate.expert_bias"].tolist()
        choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
        size = len(choice) // self.config["n_group"]
        groups = [list(range(begin, begin + size)) for begin in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(sorted(choice[expert] for expert in group)[-2:]))
        allowed = [expert for group in groups[: self.config["topk_group"]] for expert in group]
        allowed.sort(key=lambda expert: -choice[expert])
        chosen = allowed[: self.config["num_experts_per_tok"]]
        total = sum(scores[expert] for expert in chosen) + 1e-20
        weights = [
            scores[expert] / total * self.config["routed_scaling_factor"] for expert in chosen
        ]
        self.chosen[layer, token], self.weights[layer, token] = chosen, weights
        out = self._swiglu(f"{at}.shared_experts", row)
        for expert, weight in zip(chosen, weights, strict=True):
            out = out + weight * self._swiglu(f"{at}.experts.{expert}", row)
        return out


Oracle = LibraryModel | PlainLlada2


def oracle(info: ModelInfo) -> Oracle:
    """Another implementation of a target: transformers' where it has one, else the formulas."""
    return PlainLlada2(info) if info.family.name == "llada2" else LibraryModel(info)
