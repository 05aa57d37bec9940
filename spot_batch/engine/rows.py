"""The rows of the prefix cache, one a sample in flight, and what to do where memory ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.checkpoints.shapes import padded_length
from spot_batch.engine.memory import Ladder, is_out_of_memory, longest_prefix
from spot_batch.models.slots import KeptSlots, PrefixCache, SlotBatch, Target
from spot_batch.records.sampling import Request

logger = logging.getLogger(__name__)

_LEAST_SLOTS = 2
"""A forward has room for a finished block and the one behind it at least."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a round's forward leaves: the hidden rows of all slots, and where the KV of each kept
    slot is."""

    rows: Tensor
    kept: Sequence[tuple[KeptSlots, int]]


class CacheRows:
    """The cache of an engine: rows for samples to join, and forwards over them.

    Memory that ends changes speed alone. A forward that it does not hold is run in halves, and all
    are from then on. Where it does not hold the rows, half as many samples fly from then on.
    `max_positions` is of all rows together, padding included.
    """

    def __init__(
        self, target: Target, *, max_sequences: int, max_slots: int, max_positions: int | None
    ) -> None:
        self._target = target
        self._num_rows = max_sequences
        self._slots = Ladder("slots a forward", max_slots, _LEAST_SLOTS)
        self._max_positions = max_positions
        self._is_draining = False
        width = target.block_length
        self._held = (self._rows_that_fit(padded_length(width)), width)
        self._cache: PrefixCache = target.allocate(*self._held)

    def row_for(self, request: Request, flying: Mapping[int, Request]) -> int | None:
        """A free row, cleared, that holds the sample at its longest beside those that are `flying`,
        by row; None while others must land first."""
        while True:
            if self._is_draining:
                if flying:
                    return None
                self._halve()
            row = self._free_row(request, flying)
            if row is not None:
                self._cache.clear(row)
            if not self._is_draining:
                return row

    def forward(self, slots: SlotBatch) -> Forwarded:
        """One forward over the slots, in parts where it is larger than memory holds.

        Nothing is lost where one is run again: what a forward stores it stores again, the same.
        """
        while True:
            rows: list[Tensor] = []
            kept: list[tuple[KeptSlots, int]] = []
            try:
                for part in slots.parts(self._slots.most):
                    hidden = self._target.forward(part, self._cache)
                    rows.append(hidden.rows)
                    kept += [(hidden.kept, index) for index in range(len(hidden.kept))]
                return Forwarded(rows[0] if len(rows) == 1 else torch.cat(rows), kept)
            except (MemoryError, RuntimeError) as error:
                self._slots.step_down(error, len(slots))
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()

    def adopt(self, kept: tuple[KeptSlots, int], *, row: int, start: int) -> None:
        """Store a kept slot of the last forward as the clean block at `start` of a row."""
        of_forward, index = kept
        self._cache.adopt(of_forward, index, row=row, start=start)

    def _free_row(self, request: Request, flying: Mapping[int, Request]) -> int | None:
        """Rows are of one length, so there are as many as fit at that of the longest in flight."""
        if len(flying) >= self._num_rows:
            return None
        width = self._target.block_length
        longest = max(longest_prefix(each, width) for each in (request, *flying.values()))
        num_rows = self._rows_that_fit(longest)
        row = min(set(range(len(flying) + 1)) - flying.keys())
        if max(row, *flying, 0) >= num_rows:
            return None
        held_rows, held_positions = self._held
        if row >= held_rows or longest > held_positions:
            try:
                self._cache.resize(num_rows, longest)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or num_rows == 1:
                    raise
                self._num_rows, self._is_draining = num_rows, True
                return None
            self._held = (num_rows, longest)
        return row

    def _rows_that_fit(self, num_positions: int) -> int:
        most = self._max_positions
        return self._num_rows if most is None else min(self._num_rows, most // num_positions)

    def _halve(self) -> None:
        """Make the cache anew with half its rows, now that nothing is in it."""
        self._num_rows = max(1, self._num_rows // 2)
        logger.warning("out of memory: at most %d samples in flight now", self._num_rows)
        del self._cache  # before there is another one
        self._held = (self._num_rows, self._target.block_length)
        self._cache = self._target.allocate(*self._held)
        self._is_draining = False
