"""Slots: what a forward of a target is made of, and what every target can do with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Slots of many samples for one forward, S of them, each W rows of one block.

    ids (S, W) int64, the mask id where masked; start (S,) absolute position of the first row;
    row (S,) the sample's row of the cache; parent (S,) index of the clean slot that stands between
    the stored prefix and this slot, -1 for none (the second slot of a crossing piece); store (S,)
    bool, the slot is clean and certain: its KV is written to the cache at `start`, and every slot
    of the batch that starts later in the same row reads it there; keep (S,) bool, the slot is clean
    and drafted: its KV is handed back for the case that the walk reaches it.

    A slot sees the cache below its own start (its parent's rows from the parent, not the cache),
    and all of itself; no other slot.
    """

    ids: Tensor
    start: Tensor
    row: Tensor
    parent: Tensor
    store: Tensor
    keep: Tensor

    def __post_init__(self) -> None:
        num_slots = len(self.ids)
        for name in ("start", "row", "parent", "store", "keep"):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_slots,), f"{name}: want ({num_slots},), got {shape}"

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: Tensor) -> SlotBatch:
        """The slots at `index`, in that order; parents are re-numbered and must be among them."""
        place = torch.full((len(self) + 1,), -1, dtype=torch.int64, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        parent = self.parent[index]
        moved = place[parent]  # -1 finds the last entry, which stays -1
        assert bool((moved >= 0).eq(parent >= 0).all()), "a slot was taken without its parent"
        return SlotBatch(
            self.ids[index],
            self.start[index],
            self.row[index],
            moved,
            self.store[index],
            self.keep[index],
        )


class Kept(Protocol):
    """KV of the slots marked `keep`, in the order of the batch."""


class PrefixCache(Protocol):
    """KV of the clean blocks of the samples in flight, one row a sample, owned by us."""

    def ensure(self, num_positions: int) -> None:
        """Make every row hold at least so many positions; what is stored stays."""

    def adopt(self, kept: Kept, index: int, *, row: int, start: int) -> None:
        """Store the KV of the `index`-th kept slot as the clean block at `start` of `row`."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward leaves: (S, W, d) final hidden rows, and the KV of the slots marked `keep`."""

    rows: Tensor
    kept: Kept


class Target(Protocol):
    """A block-diffusion model as the engine sees it."""

    @property
    def block_length(self) -> int: ...

    @property
    def mask_id(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def allocate(self, num_rows: int, num_positions: int) -> PrefixCache:
        """A cache for so many samples in flight."""

    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        """One forward; writes the KV of the slots marked `store` into the cache."""

    def head(self, rows: Tensor) -> Tensor:
        """(n, W, d) hidden rows -> (n, W, V) float32 logits, forbidden ids at -inf.

        A state's logits do not depend on n.
        """
