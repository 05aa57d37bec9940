"""SDAR on transformers' Qwen3 modules: another mask, another cache rule, the same body."""

from __future__ import annotations

import math
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from spot_batch.targets.attention import ATTENTION_NAME, KVCache, SlotAttention
from spot_batch.targets.registry import ModelError, ModelInfo, read_json
from spot_batch.targets.rows import RowTiles, proven_tiles, tile_linears
from spot_batch.targets.slots import Hidden, PrefixCache, SlotBatch

# Pointwise kernels cut their elements evenly among threads and treat what does not fill a vector
# register with other instructions. Halves of slots of the published sizes always fill them; thirds
# need not, nor do slots whose widest rows are no multiple of 32 elements.
_MOST_THREADS = 2


class BlockTarget:
    """A Qwen3 body that decodes blocks; one on a device, for many samples.

    `canonical` runs the linears in proven tiles, so that a slot's bits depend on its own sample
    only; without it any shape goes and outputs are not reproducible.
    """

    def __init__(self, model: Qwen3ForCausalLM, info: ModelInfo, *, canonical: bool = True) -> None:
        self._model = model.eval()
        self._block_length = info.block_length
        self._mask_id = info.mask_id
        parameter = model.model.embed_tokens.weight
        self._device: torch.device = parameter.device
        self._dtype: torch.dtype = parameter.dtype
        self._vocab_size = len(model.lm_head.weight)
        self._head_weight = model.lm_head.weight.detach().float()
        forbidden = torch.zeros(self._vocab_size, device=self._device)
        forbidden[list(info.forbidden_ids)] = -math.inf
        self._forbidden = forbidden
        self.tiles = RowTiles(info.block_length, None)
        linears = tile_linears(model.model, self.tiles)
        if canonical:
            self.tiles.sizes = proven_tiles(linears, info.block_length)

    @property
    def block_length(self) -> int:
        return self._block_length

    @property
    def mask_id(self) -> int:
        return self._mask_id

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Of the body; the head is float32."""
        return self._dtype

    def allocate(self, num_rows: int, num_positions: int) -> KVCache:
        """A cache for so many samples in flight."""
        config = self._model.config
        return KVCache(
            num_layers=config.num_hidden_layers,
            num_rows=num_rows,
            num_positions=num_positions,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    @torch.inference_mode()
    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        """One forward over the slots; see `SlotBatch` for what each of them sees."""
        assert isinstance(cache, KVCache), type(cache)
        num_slots, width = slots.ids.shape
        padding = self.tiles.padded(num_slots) - num_slots
        ids = functional.pad(slots.ids, (0, 0, 0, padding), value=self._mask_id)
        start = functional.pad(slots.start, (0, padding))
        run = SlotBatch(
            ids,
            start,
            functional.pad(slots.row, (0, padding)),
            functional.pad(slots.parent, (0, padding), value=-1),
            functional.pad(slots.store, (0, padding)),
            functional.pad(slots.keep, (0, padding)),
        )
        attention = SlotAttention.of(run, cache)
        position = start[:, None] + torch.arange(width, device=ids.device)
        out = self._model.model(
            input_ids=ids.view(1, -1),
            position_ids=position.view(1, -1),
            attention_mask={"full_attention": None},
            use_cache=False,
            slot_attention=attention,
        )
        rows = out.last_hidden_state.view(num_slots + padding, width, -1)[:num_slots]
        return Hidden(rows, attention.kept_kv())

    @torch.inference_mode()
    def head(self, rows: Tensor) -> Tensor:
        """(n, W, d) hidden rows -> (n, W, V) float32 logits; W rows a call, whatever n."""
        num_states, width, _ = rows.shape
        logits = torch.empty(num_states, width, self._vocab_size, device=rows.device)
        for index, state in enumerate(rows.float()):
            torch.addmm(self._forbidden, state, self._head_weight.t(), out=logits[index])
        return logits


def load_target(
    info: ModelInfo,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    canonical: bool = True,
) -> BlockTarget:
    """Load a target's weights onto a device.

    Raises ModelError where they do not fit the config, and for more CPU threads than canonical
    numerics hold for.
    """
    device = torch.device(device)
    if canonical and device.type == "cpu" and torch.get_num_threads() > _MOST_THREADS:
        raise ModelError(
            f"canonical numerics hold for at most {_MOST_THREADS} CPU threads an actor, got "
            f"{torch.get_num_threads()}: set resources.cpu_threads lower and take more actors"
        )
    config = qwen3_config(info)
    if canonical and device.type == "cpu" and info.block_length * config.intermediate_size % 32:
        raise ModelError(
            f"{info.path}: canonical numerics on CPU want block length x intermediate size to be "
            f"a multiple of 32, got {info.block_length} x {config.intermediate_size}: "
            "set speculation.numerics to fast"
        )
    try:
        model, report = Qwen3ForCausalLM.from_pretrained(
            info.path,
            config=config,
            dtype=_dtype(dtype, device),
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{info.path}: the weights cannot be loaded ({error})") from error
    wrong = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if wrong or report["mismatched_keys"]:
        names = [*wrong, *(str(key) for key in report["mismatched_keys"])]
        raise ModelError(
            f"{info.path}: {len(names)} tensors do not fit the config, the first: {names[0]}"
        )
    return BlockTarget(model.to(device), info, canonical=canonical)


def qwen3_config(info: ModelInfo) -> Qwen3Config:
    """The checkpoint's config as Qwen3's, without the fields that its own code needs."""
    given: dict[str, Any] = read_json(info.path / "config.json")
    known = {
        name: given[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "max_position_embeddings",
            "rms_norm_eps",
            "tie_word_embeddings",
            "attention_bias",
        )
        if given.get(name) is not None
    }
    if given.get("rope_scaling") is not None:
        raise ModelError(f"{info.path}: rope_scaling {given['rope_scaling']!r} is not supported")
    rope = given.get("rope_parameters") or {}
    theta = given.get("rope_theta", rope.get("rope_theta", 10000.0))
    return Qwen3Config(**known, rope_parameters={"rope_type": "default", "rope_theta": theta})


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
        if name not in known:
            raise ModelError(f"dtype must be auto or one of {', '.join(known)}, got {name!r}")
        return known[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.float32
