"""Attention over slots, registered with transformers' attention interface.

The slot stands on the batch axis, its keys are [stored prefix, slots that it sees, padding] in the
order of their positions, and the padded length is a function of how many these are. So a slot's
bits do not depend on what else is in the forward (docs/exactness.md, arithmetic).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from spot_batch.checkpoints.shapes import KEY_STEP, padded_length
from spot_batch.models.device import onto
from spot_batch.models.slots import KeptSlots, SlotBatch

ATTENTION_NAME = "spot_slots"


@dataclass(frozen=True, slots=True)
class KeptKV:
    """KV of the kept slots: (layers, n, kv heads, W, head dim) each."""

    keys: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.keys.shape[1]


class KVCache:
    """The prefix of each sample, stored once: (rows, kv heads, positions, head dim) a layer."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_positions: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_rows, num_kv_heads, padded_length(num_positions), head_dim)
        self.generation = 0  # of the memory: graphs that were captured over another one are void
        # Zeros, not junk: see `clear`.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_positions(self) -> int:
        """Positions that a row holds in every layer."""
        return min(layer.shape[2] for layer in (*self.keys, *self.values))

    def resize(self, num_rows: int, num_positions: int) -> None:
        """Hold so many rows of so many positions; what of it is stored stays."""
        num_positions = padded_length(num_positions)
        # One at a time, so that there is never more than one twice. Where memory ends in between,
        # all of them still hold what they held, and the next call evens them out.
        for layers in (self.keys, self.values):
            for index, layer in enumerate(layers):
                more = (0, 0, 0, num_positions - layer.shape[2], 0, 0, 0, num_rows - len(layer))
                if any(more):
                    layers[index] = functional.pad(layer, more)
                    self.generation += 1

    def clear(self, row: int) -> None:
        """Make a row zeros: masked keys get weight 0, and 0 times NaN would still be NaN."""
        for layer in (*self.keys, *self.values):
            layer[row].zero_()

    def adopt(self, kept: KeptSlots, index: int, *, row: int, start: int) -> None:
        """Store the KV of the `index`-th kept slot as the clean block at `start` of `row`."""
        assert isinstance(kept, KeptKV), type(kept)
        width = kept.keys.shape[3]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[row, :, start : start + width] = kept.keys[layer, index]
            values[row, :, start : start + width] = kept.values[layer, index]


@dataclass(slots=True)
class SlotGroup:
    """Slots whose padded key length is the same; one attention call each.

    index (G,) the slots; row (G,) their rows of the cache; mask (G, 1, 1, length) bool, padding.
    One entry a slot and slot that it sees: member (M, 1) place in the group, seen (M,) the slot
    that is seen, key_at (M, W) where its keys go.
    """

    index: Tensor
    length: int
    row: Tensor
    member: Tensor
    seen: Tensor
    key_at: Tensor
    mask: Tensor


@dataclass(slots=True)
class SlotAttention:
    """What a forward's attention needs besides queries, keys and values; made once a forward."""

    cache: KVCache
    width: int
    groups: Sequence[SlotGroup]
    store_row: Tensor
    store_at: Tensor
    stored: Tensor
    kept: Tensor
    kept_keys: list[Tensor] = field(default_factory=list)
    kept_values: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, slots: SlotBatch, cache: KVCache) -> SlotAttention:
        """Plan the attention of a forward over `slots`, on the host."""
        device, width = cache.keys[0].device, slots.ids.shape[1]
        offsets = torch.arange(width)
        prefix = slots.start[slots.sees[:, 0]]
        num_keys = prefix + (slots.sees >= 0).sum(1) * width
        lengths = padded_lengths(num_keys)
        groups = []
        for length in sorted(set(lengths.tolist())):
            assert length <= cache.num_positions, f"{length} keys, {cache.num_positions} in a row"
            index = torch.nonzero(lengths == length).squeeze(1)
            sees = slots.sees[index]
            member, place = torch.nonzero(sees >= 0, as_tuple=True)
            begin = prefix[index][member] + place * width
            masked = torch.arange(length) >= num_keys[index][:, None]
            groups.append(
                SlotGroup(
                    index=onto(index, device),
                    length=length,
                    row=onto(slots.row[index], device),
                    member=onto(member[:, None], device),
                    seen=onto(sees[member, place], device),
                    key_at=onto(begin[:, None] + offsets, device),
                    mask=onto(masked[:, None, None, :], device),
                )
            )
        stored = torch.nonzero(slots.store).squeeze(1)
        return cls(
            cache,
            width,
            groups,
            store_row=onto(slots.row[stored][:, None], device),
            store_at=onto(slots.start[stored][:, None] + offsets, device),
            stored=onto(stored, device),
            kept=onto(torch.nonzero(slots.keep).squeeze(1), device),
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(S, heads, W, dim) queries, (S, kv heads, W, dim) keys, values -> (S, W, heads, dim)."""
        cache_keys, cache_values = self.cache.keys[layer], self.cache.values[layer]
        if len(self.stored):
            # Advanced indices first and third: the heads move behind them.
            cache_keys[self.store_row, :, self.store_at] = key[self.stored].transpose(1, 2)
            cache_values[self.store_row, :, self.store_at] = value[self.stored].transpose(1, 2)
        if len(self.kept):
            self.kept_keys.append(key[self.kept])
            self.kept_values.append(value[self.kept])
        num_slots, num_heads, width, dim = query.shape
        num_kv_heads = key.shape[1]
        # A group's query heads share one key head and all see the same keys: more query rows.
        folded = query.reshape(num_slots, num_kv_heads, num_heads // num_kv_heads * width, dim)
        out = torch.empty_like(folded)
        for group in self.groups:
            keys = self._gather(cache_keys, key, group)
            values = self._gather(cache_values, value, group)
            bias = torch.zeros(group.mask.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(group.mask, float("-inf"))
            bias = bias.expand(-1, -1, folded.shape[2], -1)
            out[group.index] = functional.scaled_dot_product_attention(
                folded[group.index], keys, values, attn_mask=bias, scale=scale
            )
        return out.view(num_slots, num_heads, width, dim).transpose(1, 2)

    def _gather(self, cache: Tensor, own: Tensor, group: SlotGroup) -> Tensor:
        """Keys (or values) of a group in the order of positions: (G, kv heads, length, dim)."""
        rows = cache[:, :, : group.length].index_select(0, group.row)
        # As where they are stored: the heads move behind the indices.
        rows[group.member, :, group.key_at] = own[group.seen].transpose(1, 2)
        return rows

    def kept_kv(self) -> KeptKV:
        """The KV of the kept slots of the forward that has just run."""
        if not self.kept_keys:
            nothing = torch.empty(0, 0)
            return KeptKV(nothing, nothing)
        return KeptKV(torch.stack(self.kept_keys), torch.stack(self.kept_values))


def padded_lengths(num_keys: Tensor) -> Tensor:
    """`padded_length` of a tensor."""
    return (num_keys + KEY_STEP - 1).div(KEY_STEP, rounding_mode="floor") * KEY_STEP


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    slot_attention: SlotAttention,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, heads, S * W, dim) -> (1, S * W, heads, dim)."""
    assert dropout == 0.0, "slots are for inference"
    width = slot_attention.width

    def by_slot(rows: Tensor) -> Tensor:
        _, num_heads, num_rows, dim = rows.shape
        return rows.view(num_heads, num_rows // width, width, dim).transpose(0, 1)

    layer = module.layer_idx
    assert isinstance(layer, int)
    out = slot_attention.attend(layer, by_slot(query), by_slot(key), by_slot(value), scaling)
    return out.reshape(1, -1, *out.shape[2:]), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
