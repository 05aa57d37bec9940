"""Slots: what a forward of a target is made of, and what every target can do with them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """Slots of many samples for one forward, S of them, each W rows that stand side by side.

    All of it is on the host, whatever device runs the forward: shapes follow from it.

    ids (S, W) int64, the mask id where masked; start (S,) absolute position of the first row, any;
    row (S,) the sample's row of the cache; sees (S, K) int64 indices of the slots whose rows this
    slot reads, itself among them, in the order of their positions, then -1; store (S,) bool, the
    slot is clean and certain: its KV is written to the cache at `start`, and every slot of the
    batch that reads those positions from the cache reads it there; keep (S,) bool, the slot is
    clean and drafted: its KV is handed back for the case that the walk reaches it.

    A slot reads the cache below the first slot that it sees, and all rows of the slots that it
    sees; nothing else. So a state that stands on the cache alone sees itself, the block behind a
    drafted one sees that one and itself, and in a canvas each slot sees all of them.
    """

    ids: Tensor
    start: Tensor
    row: Tensor
    sees: Tensor
    store: Tensor
    keep: Tensor

    def __post_init__(self) -> None:
        num_slots = len(self.ids)
        assert self.ids.device.type == "cpu", f"slots are on the host, got {self.ids.device}"
        for name in ("start", "row", "store", "keep"):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_slots,), f"{name}: want ({num_slots},), got {shape}"
        self._check_sees()

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, index: Tensor) -> SlotBatch:
        """The slots at `index`, in that order, each once and with all that it sees."""
        place = torch.full((len(self) + 1,), -1, dtype=torch.int64, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        sees = self.sees[index]
        moved = place[sees]  # -1 finds the last entry, which stays -1
        assert bool((moved >= 0).eq(sees >= 0).all()), "a slot was taken without one that it sees"
        return SlotBatch(
            self.ids[index],
            self.start[index],
            self.row[index],
            moved,
            self.store[index],
            self.keep[index],
        )

    def parts(self, most: int) -> list[SlotBatch]:
        """The slots in their order, at most so many a part, none apart from what it sees."""
        num_slots = len(self)
        if num_slots <= most:
            return [self]
        last = self.sees.amax(1).cummax(0).values
        first = self.sees.masked_fill(self.sees < 0, num_slots).amin(1)
        first = first.flip(0).cummin(0).values.flip(0)
        behind = torch.arange(1, num_slots, device=self.sees.device)
        whole = (last[:-1] < behind) & (first[1:] >= behind)
        cuts = [0, *behind[whole].tolist(), num_slots]
        parts: list[SlotBatch] = []
        begin = 0
        while begin < num_slots:
            end = cuts[bisect_right(cuts, begin + most) - 1]
            assert end > begin, f"more than {most} slots see one another"
            parts.append(self.take(torch.arange(begin, end, device=self.sees.device)))
            begin = end
        return parts

    def padded(self, num_slots: int, *, fill: int) -> SlotBatch:
        """So many slots: behind these, ones of `fill` that see themselves and that nobody reads."""
        missing = num_slots - len(self)
        if not missing:
            return self
        alone = self.sees.new_full((missing, self.sees.shape[1]), -1)
        alone[:, 0] = torch.arange(len(self), num_slots, device=alone.device)
        return SlotBatch(
            functional.pad(self.ids, (0, 0, 0, missing), value=fill),
            functional.pad(self.start, (0, missing)),
            functional.pad(self.row, (0, missing)),
            torch.cat((self.sees, alone)),
            functional.pad(self.store, (0, missing)),
            functional.pad(self.keep, (0, missing)),
        )

    def _check_sees(self) -> None:
        num_slots, sees = len(self), self.sees
        assert sees.ndim == 2, f"sees: want ({num_slots}, K), got {tuple(sees.shape)}"
        assert len(sees) == num_slots, f"sees: want ({num_slots}, K), got {tuple(sees.shape)}"
        own = torch.arange(num_slots, device=sees.device)[:, None]
        assert bool((sees == own).any(1).all()), "a slot does not see itself"
        if sees.shape[1] == 1:
            return
        inside = (sees >= -1) & (sees < num_slots)
        assert bool(inside.all()), f"sees: indices are -1 or of the {num_slots} slots"
        seen = sees >= 0
        assert bool((seen[:, :-1] | ~seen[:, 1:]).all()), "sees: -1 stands behind the seen slots"
        at, width = self.start[sees], self.ids.shape[1]
        assert bool((~seen[:, 1:] | (at[:, 1:] - at[:, :-1] >= width)).all()), (
            "sees: slots stand in the order of their positions and do not overlap"
        )
        assert bool((~seen | (self.row[sees] == self.row[:, None])).all()), (
            "a slot sees one of another row"
        )


class KeptSlots(Protocol):
    """The KV of the slots marked `keep`, in the order of the batch; only the cache of the same
    target can read it."""

    def __len__(self) -> int: ...


class PrefixCache(Protocol):
    """KV of the clean blocks of the samples in flight, one row a sample, owned by us."""

    def resize(self, num_rows: int, num_positions: int) -> None:
        """Hold so many rows of so many positions; what of it is stored stays."""

    def clear(self, row: int) -> None:
        """Forget all that a row holds: whoever has it next must not read what is not its own."""

    def adopt(self, kept: KeptSlots, index: int, *, row: int, start: int) -> None:
        """Store the KV of the `index`-th kept slot as the clean block at `start` of `row`."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What a forward leaves: (S, W, d) final hidden rows, and the KV of the slots marked `keep`."""

    rows: Tensor
    kept: KeptSlots


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
