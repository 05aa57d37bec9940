"""The slots of a round: what the one forward of many samples is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from spot_batch.engine.sample import Sample
from spot_batch.engine.tree import ROOT, DraftTree, Key
from spot_batch.models.slots import SlotBatch


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample's tree, what its probabilities were scaled by, and the states that get a slot."""

    tree: DraftTree
    scale: float
    keys: Sequence[Key]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A drafted complete state: which kept slot it is, and the slot of the next block behind it."""

    kept: int
    next_slot: int


@dataclass(frozen=True, slots=True)
class SampleSlots:
    """A sample in a round: the slot of each of its states, and the draft that they are of."""

    sample: Sample
    draft: Draft | None
    states: Mapping[Key, int]
    crossings: Mapping[Key, Crossing]


@dataclass(slots=True)
class Round:
    """The slots of a round in their order, and which of them are whose."""

    mask_id: int
    width: int
    ids: list[list[int]] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    sees: list[tuple[int, ...]] = field(default_factory=list)
    store: list[bool] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)
    num_kept: int = 0
    samples: list[SampleSlots] = field(default_factory=list)

    def add(
        self,
        ids: list[int],
        *,
        start: int,
        row: int,
        behind: tuple[int, ...] = (),
        store: bool = False,
        keep: bool = False,
    ) -> int:
        """Append a slot that sees itself and the slots it stands behind; returns its index."""
        index = len(self.ids)
        self.ids.append(ids)
        self.start.append(start)
        self.row.append(row)
        self.sees.append((*behind, index))
        self.store.append(store)
        self.keep.append(keep)
        self.num_kept += keep
        return index

    def add_sample(self, sample: Sample, draft: Draft | None) -> None:
        """Append a sample's unstored clean blocks, its current state and its drafted states."""
        for block in sample.to_store:
            self.add(block.tokens, start=block.start, row=sample.row, store=True)
        current = [
            self.mask_id if masked else token
            for token, masked in zip(sample.tokens, sample.masked, strict=True)
        ]
        states = {ROOT: self.add(current, start=sample.start, row=sample.row)}
        crossings: dict[Key, Crossing] = {}
        num_open = sum(sample.masked)
        drafted = draft.keys if draft is not None else ()
        for key in drafted:
            ids = list(current)
            for position, token in key:
                ids[position] = token
            if len(key) < num_open:
                states[key] = self.add(ids, start=sample.start, row=sample.row)
            else:
                crossings[key] = self._add_crossing(ids, start=sample.start, row=sample.row)
        self.samples.append(SampleSlots(sample, draft, states, crossings))
        sample.num_forwards += 1
        sample.num_drafted += len(drafted)
        sample.num_clean_passes += len(sample.to_store) if sample.step else 0
        sample.to_store = []

    def _add_crossing(self, ids: list[int], *, start: int, row: int) -> Crossing:
        kept = self.num_kept
        clean = self.add(ids, start=start, row=row, keep=True)
        following = self.add(
            [self.mask_id] * self.width, start=start + self.width, row=row, behind=(clean,)
        )
        return Crossing(kept, following)

    def batch(self) -> SlotBatch:
        """The slots as a target takes them."""
        most = max(map(len, self.sees))
        sees = [[*seen, *[-1] * (most - len(seen))] for seen in self.sees]
        return SlotBatch(
            torch.tensor(self.ids),
            torch.tensor(self.start),
            torch.tensor(self.row),
            torch.tensor(sees),
            torch.tensor(self.store),
            torch.tensor(self.keep),
        )
