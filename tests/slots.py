"""Slot batches for the tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from spot_batch.models.slots import SlotBatch

NUM_LETTERS = 256  # the byte tokens; special ones stand behind them


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def letters(num_slots: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, NUM_LETTERS, (num_slots, width), generator=generator)


def slots_of(ids: Tensor, *, start: Tensor, row: Tensor) -> SlotBatch:
    """Slots that see themselves alone and are neither stored nor kept."""
    no = torch.zeros(len(ids), dtype=torch.bool)
    return SlotBatch(ids, start, row, torch.arange(len(ids))[:, None], no, no)


def clean_slots(blocks: Tensor, *, row: int, first: int = 0) -> SlotBatch:
    """Finished blocks of one row, to be stored from block `first` on."""
    bare = _side_by_side(blocks, start=first * blocks.shape[1], row=row)
    return replace(bare, store=torch.ones(len(blocks), dtype=torch.bool))


def canvas(ids: Tensor, *, start: int, row: int) -> SlotBatch:
    """Slots side by side from `start` on, each of which sees all of them."""
    bare = _side_by_side(ids, start=start, row=row)
    return replace(bare, sees=torch.arange(len(ids)).expand(len(ids), -1))


def chain(ids: Tensor, *, start: int, row: int) -> SlotBatch:
    """Slots side by side from `start` on, each of which sees those before it and itself."""
    bare = _side_by_side(ids, start=start, row=row)
    own = torch.arange(len(ids))
    return replace(bare, sees=torch.where(own <= own[:, None], own, -1))


def joined(*batches: SlotBatch) -> SlotBatch:
    """Batches one behind the other; the slots of one do not see those of another."""
    most = max(batch.sees.shape[1] for batch in batches)
    sees, num_slots = [], 0
    for batch in batches:
        moved = torch.where(batch.sees >= 0, batch.sees + num_slots, -1)
        sees.append(functional.pad(moved, (0, most - moved.shape[1]), value=-1))
        num_slots += len(batch)
    return SlotBatch(
        torch.cat([batch.ids for batch in batches]),
        torch.cat([batch.start for batch in batches]),
        torch.cat([batch.row for batch in batches]),
        torch.cat(sees),
        torch.cat([batch.store for batch in batches]),
        torch.cat([batch.keep for batch in batches]),
    )


def _side_by_side(ids: Tensor, *, start: int, row: int) -> SlotBatch:
    num_slots, width = ids.shape
    return slots_of(
        ids,
        start=start + torch.arange(num_slots) * width,
        row=torch.full((num_slots,), row),
    )
