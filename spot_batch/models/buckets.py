"""Forwards in a few fixed shapes, each captured once as a CUDA graph.

Launching a body's kernels one by one takes longer than a small batch's arithmetic. A bucket fixes
all shapes of a forward: slots, keys of a slot, slots that a slot sees, slots that are stored and
kept. What is missing is filled up: with slots that nobody reads, and in lists of indices by saying
the same once more, which writes the same values again. On a CPU a bucket runs op by op, so that
what filling up does to the bits can be seen without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from spot_batch.checkpoints.shapes import Sizes
from spot_batch.models.attention import KeptKV, KVCache, SlotAttention, SlotGroup, padded_lengths
from spot_batch.models.device import GRAPH_BYTES, onto
from spot_batch.models.slots import Hidden, SlotBatch
from spot_batch.models.tiles import RowTiles

logger = logging.getLogger(__name__)

SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KEYS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROVEN = (*range(128, 2048, 128), *range(2048, KEYS[-1] + 1, 512))
"""The padded lengths that `lengths_agree` tries: those of buckets, and those that occur where
forwards run op by op."""

_KEPT_SHARE = 4
"""One slot of so many may be a drafted clean block: these are few, and each keeps its KV."""
_WARM_UPS = 2

_PROBE_SLOTS = 2
_PROBE_KEYS = (8, 100, 200, 300, 450, 700, 1000, 1500, 3000, 5000)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shapes of a forward; `num_seen`: slots that a slot sees at most, itself included."""

    num_slots: int
    num_keys: int
    num_seen: int
    num_stored: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that a forward of a bucket reads, all of it int64."""

    ids: Tensor
    position: Tensor
    row: Tensor
    num_keys: Tensor
    member: Tensor
    seen: Tensor
    key_at: Tensor
    store_row: Tensor
    store_at: Tensor
    stored: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """The inputs of a forward, one behind the other: they go to the device in one copy."""

    flat: Tensor
    shapes: Sequence[torch.Size]

    @classmethod
    def of(cls, *inputs: Tensor) -> Packed:
        return cls(torch.cat([each.reshape(-1) for each in inputs]), [x.shape for x in inputs])

    def onto(self, device: torch.device) -> Packed:
        return Packed(onto(self.flat, device), self.shapes)

    def inputs(self) -> _Inputs:
        """Views."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return _Inputs(*(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)))


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, the memory that it reads, and the memory that it leaves rows and KV in."""

    graph: torch.cuda.CUDAGraph
    packed: Packed
    rows: Tensor
    kept: KeptKV

    @property
    def num_bytes(self) -> int:
        """What it holds between replays, in no other graph's memory."""
        held = (self.packed.flat, self.rows, self.kept.keys, self.kept.values)
        return sum(tensor.nbytes for tensor in held)


@dataclass(slots=True)
class Graphs:
    """The graphs over one cache's memory. Their own memory is shared by them, and by no others:
    a pool that all its graphs have left takes no new ones."""

    generation: int
    by_bucket: dict[Bucket, Captured] = field(default_factory=dict)
    pool: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())

    def find(self, bucket: Bucket) -> Captured | None:
        """The bucket's graph, which is then the last to be dropped."""
        captured = self.by_bucket.pop(bucket, None)
        if captured is not None:
            self.by_bucket[bucket] = captured
        return captured

    def keep(self, bucket: Bucket, captured: Captured) -> None:
        """Add a graph; those that were not used for longest go where all hold too much."""
        self.by_bucket[bucket] = captured
        num_bytes = sum(each.num_bytes for each in self.by_bucket.values())
        for oldest in [each for each in self.by_bucket if each != bucket]:
            if num_bytes <= GRAPH_BYTES:
                return
            num_bytes -= self.by_bucket.pop(oldest).num_bytes


class BucketRunner:
    """Runs a body's forwards in buckets; on a GPU each bucket is a graph.

    `any_length`: whether slots of several padded lengths may stand in one bucket (`fast` numerics,
    or where `lengths_agree`). Graphs read a cache where it lay when they were captured: each cache
    has its own, made anew when its memory is.
    """

    def __init__(
        self,
        model: nn.Module,
        tiles: RowTiles,
        *,
        width: int,
        mask_id: int,
        device: torch.device,
        any_length: bool,
    ) -> None:
        self._model, self._tiles = model, tiles
        self._width, self._mask_id, self._device = width, mask_id, device
        self._any_length, self._is_off = any_length, False
        # Weak: graphs must not outlive the cache, nor keep the memory of one that is gone.
        self._graphs: WeakKeyDictionary[KVCache, Graphs] = WeakKeyDictionary()

    def bucket(self, slots: SlotBatch, cache: KVCache) -> Bucket | None:
        """The smallest that holds the slots; None where none does."""
        most = next((size for size in SLOTS if size >= len(slots)), None)
        num_keys = self._bucket_keys(padded_lengths(_num_keys(slots)), cache.num_positions)
        if most is None or num_keys is None:
            return None
        most = self._tiles.padded(most)
        num_kept = int(slots.keep.sum())
        if num_kept > max(1, most // _KEPT_SHARE):
            return None
        return Bucket(
            num_slots=most,
            num_keys=num_keys,
            num_seen=slots.sees.shape[1],
            num_stored=most if bool(slots.store.any()) else 0,
            num_kept=max(1, most // _KEPT_SHARE) if num_kept else 0,
        )

    def _bucket_keys(self, lengths: Tensor, num_positions: int) -> int | None:
        """Keys of each slot where these padded lengths stand in one bucket over such a cache."""
        longest = int(lengths.max())
        if not self._any_length:
            return longest if longest in KEYS and bool((lengths == longest).all()) else None
        sizes = [size for size in KEYS if longest <= size <= num_positions]
        if not sizes and longest <= num_positions in PROVEN:
            return num_positions  # the cache ends between two sizes
        return sizes[0] if sizes else None

    def forward(self, slots: SlotBatch, cache: KVCache) -> Hidden | None:
        """One forward, or None where no bucket holds it."""
        bucket = None if self._is_off else self.bucket(slots, cache)
        if bucket is None:
            return None
        packed = self._packed(slots, bucket)
        num_slots, num_kept = len(slots), int(slots.keep.sum())
        if self._device.type != "cuda":
            rows, kept = self._once(packed.onto(self._device).inputs(), bucket, cache)
            return Hidden(rows[:num_slots], _first(kept, num_kept))
        stream = torch.cuda.current_stream(self._device)
        try:
            captured = self._captured(packed, bucket, cache)
        except torch.OutOfMemoryError:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            self._graphs.clear()  # they hold memory that forwards in parts may need
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)
            why = str(error).partition("\n")[0]
            logger.warning("forwards run op by op: %s", why)
            self._graphs.clear()
            self._is_off = True
            return None
        captured.packed.flat.copy_(packed.onto(self._device).flat)
        captured.graph.replay()
        # The graph's own memory: the next replay writes over it.
        kept = _first(captured.kept, num_kept)
        return Hidden(
            captured.rows[:num_slots].clone(), KeptKV(kept.keys.clone(), kept.values.clone())
        )

    def _captured(self, packed: Packed, bucket: Bucket, cache: KVCache) -> Captured:
        graphs = self._graphs.get(cache)
        if graphs is None or graphs.generation != cache.generation:
            graphs = self._graphs[cache] = Graphs(cache.generation)
        captured = graphs.find(bucket)
        if captured is None:
            static = packed.onto(self._device)
            inputs = static.inputs()
            # Warming up stores what the forward stores anyway.
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    expected, _ = self._once(inputs, bucket, cache)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # What other threads do with their devices is no matter of this capture.
            with torch.cuda.graph(graph, pool=graphs.pool, capture_error_mode="thread_local"):
                rows, kept = self._once(inputs, bucket, cache)
            graph.replay()
            if not torch.equal(rows, expected):
                raise RuntimeError(f"{bucket}: a graph's rows are not those of op by op")
            captured = Captured(graph, static, rows, kept)
            graphs.keep(bucket, captured)
            logger.debug("captured %s", bucket)
        return captured

    def _once(self, inputs: _Inputs, bucket: Bucket, cache: KVCache) -> tuple[Tensor, KeptKV]:
        """(num_slots, W, d) rows, and KV of the kept slots with fillers behind."""
        masked = torch.arange(bucket.num_keys, device=self._device) >= inputs.num_keys[:, None]
        group = SlotGroup(
            index=torch.arange(bucket.num_slots, device=self._device),
            length=bucket.num_keys,
            row=inputs.row,
            member=inputs.member,
            seen=inputs.seen,
            key_at=inputs.key_at,
            mask=masked[:, None, None, :],
        )
        attention = SlotAttention(
            cache,
            self._width,
            (group,),
            store_row=inputs.store_row,
            store_at=inputs.store_at,
            stored=inputs.stored,
            kept=inputs.kept,
        )
        rows = self._model(
            input_ids=inputs.ids,
            position_ids=inputs.position,
            use_cache=False,
            slot_attention=attention,
        ).last_hidden_state
        return rows.view(bucket.num_slots, self._width, -1), attention.kept_kv()

    def _packed(self, slots: SlotBatch, bucket: Bucket) -> Packed:
        run = slots.padded(bucket.num_slots, fill=self._mask_id)
        offsets = torch.arange(self._width)
        num_seen = (run.sees >= 0).sum(1, keepdim=True)
        place = torch.minimum(torch.arange(bucket.num_seen), num_seen - 1)  # the last once more
        prefix = run.start[run.sees[:, 0]]
        key_at = (prefix[:, None] + place * self._width).flatten()[:, None] + offsets
        stored, kept = (
            _filled(torch.nonzero(which).squeeze(1), num)
            for which, num in ((run.store, bucket.num_stored), (run.keep, bucket.num_kept))
        )
        member = torch.arange(bucket.num_slots)[:, None].expand_as(place)
        inputs = _Inputs(
            ids=run.ids.reshape(1, -1),
            position=(run.start[:, None] + offsets).view(1, -1),
            row=run.row,
            num_keys=_num_keys(run),
            member=member.reshape(-1, 1),
            seen=run.sees.gather(1, place).flatten(),
            key_at=key_at,
            store_row=run.row[stored][:, None],
            store_at=run.start[stored][:, None] + offsets,
            stored=stored,
            kept=kept,
        )
        return Packed.of(*(getattr(inputs, each.name) for each in fields(inputs)))


def _num_keys(slots: SlotBatch) -> Tensor:
    """(S,) keys that each slot reads."""
    width = slots.ids.shape[1]
    return slots.start[slots.sees[:, 0]] + (slots.sees >= 0).sum(1) * width


def _filled(index: Tensor, num: int) -> Tensor:
    """`index` and then its first entry again, `num` in all."""
    return torch.cat((index, index[:1].expand(num - len(index)))) if num else index


def _first(kept: KeptKV, num: int) -> KeptKV:
    """KV of the first `num` kept slots: fillers stand behind them."""
    return KeptKV(kept.keys[:, :num], kept.values[:, :num]) if num else kept


@torch.inference_mode()
def lengths_agree(sizes: Sizes, *, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention over so many keys has the same bits at every padded length that occurs,
    tried on this device: a kernel may cut the keys by how many there are, the masked included."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    rows = sizes.num_heads // sizes.num_kv_heads * width
    query = drawn(_PROBE_SLOTS, sizes.num_kv_heads, rows, sizes.head_dim)
    shape = (_PROBE_SLOTS, sizes.num_kv_heads, PROVEN[-1], sizes.head_dim)
    keys, values = drawn(*shape), drawn(*shape)

    def attended(num_keys: int, length: int) -> Tensor:
        bias = torch.zeros(_PROBE_SLOTS, 1, 1, length, dtype=dtype, device=device)
        bias[..., num_keys:] = float("-inf")
        return functional.scaled_dot_product_attention(
            query,
            keys[:, :, :length].contiguous(),  # as they are gathered from a cache
            values[:, :, :length].contiguous(),
            attn_mask=bias.expand(-1, -1, rows, -1),
        )

    for num_keys in _PROBE_KEYS:
        first, *others = (length for length in PROVEN if length >= num_keys)
        wanted = attended(num_keys, first)
        if not all(torch.equal(attended(num_keys, length), wanted) for length in others):
            return False
    return True
