"""Targets that decode blocks: each is a family's body over slots and a prefix cache, and a float32
head."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from spot_batch.checkpoints.dtypes import choose_dtype
from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.families import Family
from spot_batch.checkpoints.json_files import read_json
from spot_batch.checkpoints.registry import ModelInfo, check_weights
from spot_batch.checkpoints.shapes import num_parameters, read_sizes, tensor_shapes
from spot_batch.checkpoints.weights import weight_files
from spot_batch.models.attention import KVCache, SlotAttention
from spot_batch.models.body import HEAD, Body
from spot_batch.models.buckets import BucketRunner, lengths_agree
from spot_batch.models.device import onto
from spot_batch.models.experts import TILE_ROWS, tile_experts
from spot_batch.models.llada2 import llada2_body
from spot_batch.models.qwen3 import qwen3_body, qwen3_moe_body
from spot_batch.models.slots import Hidden, PrefixCache, SlotBatch
from spot_batch.models.tiles import (
    TILE_SIZES,
    RowTiles,
    TiledLinear,
    cut_activations,
    proven_tiles,
    tile_linears,
)
from spot_batch.records.progress import LoadProgress, LoadReport, unreported

logger = logging.getLogger(__name__)

BODIES: Mapping[str, Callable[..., Body]] = {
    "sdar": qwen3_body,
    "sdar-moe": qwen3_moe_body,
    "llada2": llada2_body,
}
"""The network of each family, by the family's name."""


_HEAD_ROWS = 256
"""A call of the head has so many rows at most: from there on its products take longer than reading
its weights."""


class BlockTarget:
    """A body that decodes blocks. There is one on a device, for many samples.

    `canonical` runs linears and experts in proven tiles and on CPU activations slot by slot, so
    that a slot's bits depend on its own sample only; without it any shape goes and outputs are not
    reproducible.
    """

    def __init__(self, body: Body, info: ModelInfo, *, canonical: bool = True) -> None:
        self.body = body
        self._block_length = info.block_length
        self._mask_id = info.mask_id
        network = body.network
        parameter = next(network.model.parameters())
        self._device: torch.device = parameter.device
        self._dtype: torch.dtype = parameter.dtype
        self._head_weight = network.lm_head.weight
        self._vocab_size = len(self._head_weight)
        forbidden = torch.zeros(self._vocab_size, device=self._device)
        forbidden[list(info.forbidden_ids)] = -math.inf
        self._forbidden = forbidden
        self.tiles = RowTiles(info.block_length, None)
        self.expert_tiles = RowTiles(TILE_ROWS, None)
        self.head_tiles = RowTiles(info.block_length, None)
        linears = tile_linears(network.model, self.tiles)
        if canonical:
            self.tiles.sizes = proven_tiles(linears, info.block_length)
            self.head_tiles.sizes = self._proven_head_tiles()
            experts = tile_experts(network.model, self.expert_tiles)
            if experts:
                self.expert_tiles.sizes = proven_tiles(experts[0].linears(), TILE_ROWS)
            if self._device.type == "cpu":
                for expert in experts:
                    cut_activations(expert, TILE_ROWS)
                cut_activations(network.model, info.block_length)
        self.buckets = self._bucket_runner() if self._device.type == "cuda" else None

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
        """The body's dtype; the head is float32."""
        return self._dtype

    def allocate(self, num_rows: int, num_positions: int) -> KVCache:
        """A cache for so many samples in flight."""
        sizes = self.body.sizes
        return KVCache(
            num_layers=sizes.num_layers,
            num_rows=num_rows,
            num_positions=num_positions,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    @torch.inference_mode()
    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        """One forward over the slots; see `SlotBatch` for what each of them sees."""
        assert isinstance(cache, KVCache), type(cache)
        hidden = self.buckets.forward(slots, cache) if self.buckets is not None else None
        if hidden is not None:
            return hidden
        num_slots, width = slots.ids.shape
        run = slots.padded(self.tiles.padded(num_slots), fill=self._mask_id)
        attention = SlotAttention.of(run, cache)
        position = run.start[:, None] + torch.arange(width)
        rows = self.body.network.model(
            input_ids=onto(run.ids.view(1, -1), self._device),
            position_ids=onto(position.view(1, -1), self._device),
            use_cache=False,
            slot_attention=attention,
        ).last_hidden_state
        return Hidden(rows.view(len(run), width, -1)[:num_slots], attention.kept_kv())

    def _bucket_runner(self) -> BucketRunner:
        any_length = self.tiles.sizes is None or lengths_agree(
            self.body.sizes, width=self._block_length, dtype=self._dtype, device=self._device
        )
        return BucketRunner(
            self.body.network.model,
            self.tiles,
            width=self._block_length,
            mask_id=self._mask_id,
            device=self._device,
            any_length=any_length,
        )

    @torch.inference_mode()
    def head(self, rows: Tensor) -> Tensor:
        """(n, W, d) hidden rows -> (n, W, V) float32 logits; a state's do not depend on n."""
        num_states, width, _ = rows.shape
        flat, weight = rows.float().flatten(0, 1), self._head_weight.t()
        logits = torch.empty(len(flat), self._vocab_size, device=rows.device)
        done = 0
        for count in self.head_tiles.plan(len(flat)):
            tile = slice(done, done + count)
            torch.addmm(self._forbidden, flat[tile], weight, out=logits[tile])
            done += count
        return logits.view(num_states, width, -1)

    def _proven_head_tiles(self) -> tuple[int, ...]:
        """The sizes of a call at which the head has the bits that one state alone has.

        A call with few rows costs what reading the head's weights costs, and many rows share that.
        """
        sizes = [1, *(size for size in TILE_SIZES[1:] if size * self._block_length <= _HEAD_ROWS)]
        linear = nn.Linear(self._head_weight.shape[1], self._vocab_size, device="meta")
        linear.weight = nn.Parameter(self._head_weight, requires_grad=False)
        linear.bias = nn.Parameter(self._forbidden, requires_grad=False)
        return proven_tiles(
            [TiledLinear(linear, self.head_tiles)], self._block_length, sizes=sizes, anchor=1
        )


def meta_body(
    config: Mapping[str, Any],
    family: Family,
    *,
    where: str = "config.json",
    dtype: torch.dtype = torch.bfloat16,
) -> Body:
    """A family's network as a config.json describes it, without memory and without weights."""
    sizes = read_sizes(config, family, where)
    return BODIES[family.name](config, sizes, where=where, dtype=dtype)


def check_network(info: ModelInfo) -> None:
    """ModelError for what of the config loading would refuse."""
    file = info.path / "config.json"
    meta_body(read_json(file), info.family, where=f"{file}")


def load_target(
    info: ModelInfo,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    canonical: bool = True,
    report: LoadReport = unreported,
) -> BlockTarget:
    """Load a target's weights onto a device; ModelError where they do not fit the config."""
    device = torch.device(device)
    file = info.path / "config.json"
    body = meta_body(
        read_json(file), info.family, where=f"{file}", dtype=dtype_on(device, info, wanted=dtype)
    )
    check_weights(info)
    body.materialise(device)
    _read_weights(body, info.path, report)
    return BlockTarget(body, info, canonical=canonical)


def random_target(
    info: ModelInfo,
    config: Mapping[str, Any],
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    canonical: bool = True,
) -> BlockTarget:
    """A body of a config's shape with random weights, made on the device: to time, not to read."""
    device = torch.device(device)
    body = meta_body(
        config, info.family, where=info.name, dtype=dtype_on(device, info, wanted=dtype)
    )
    body.materialise(device)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in body.published().values():
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
    if body.sizes.is_tied:
        body.tie_head()
    return BlockTarget(body, info, canonical=canonical)


def _read_weights(body: Body, path: Path, report: LoadReport) -> None:
    """Copy every stored tensor to its place on the device, one at a time."""
    places, files = {**body.published(), **body.stacked()}, weight_files(path)
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        begun = done
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    if name == HEAD and body.sizes.is_tied:
                        continue  # some store the copy too
                    tensor = stored.get_tensor(name)
                    place = places[name]
                    place.copy_(tensor)
                    _check_finite(place, f"{file}: {name}")
                    done += tensor.nbytes
                    report(LoadProgress("loading", done, total))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: the weights cannot be loaded ({error})") from error
        done = begun + file.stat().st_size  # with its header, and a copy that was left out
        report(LoadProgress("loading", done, total))
    if body.sizes.is_tied:
        body.tie_head()


def _check_finite(tensor: Tensor, name: str) -> None:
    """A float16 may be too small for what a bfloat16 held; and files may be damaged."""
    if not all(map(math.isfinite, (extreme.item() for extreme in tensor.aminmax()))):
        dtype = str(tensor.dtype).removeprefix("torch.")
        wider = "" if tensor.dtype == torch.float32 else ", or model.target.dtype must be wider"
        raise ModelError(f"{name} is not finite in {dtype}: the file is damaged{wider}")


def dtype_on(device: torch.device, info: ModelInfo, *, wanted: str = "auto") -> torch.dtype:
    """What a target's body is loaded in. Raises ModelError as `choose_dtype` does."""
    on_gpu = device.type == "cuda"
    choice = choose_dtype(
        wanted,
        device=device.type,
        # Without emulation: a T4 has bfloat16 by that alone, and is slow at it.
        has_bfloat16=on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        num_parameters=num_parameters(tensor_shapes(info.sizes, info.family)),
    )
    logger.info("%s: %s, %s", info.name, choice.name, choice.why)
    dtype: torch.dtype = getattr(torch, choice.name)
    return dtype
