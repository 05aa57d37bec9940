"""A target of integers: exact arithmetic, planted ties, and nothing hidden.

A real implementation of the `Target` protocol whose "network" is a hash. A stored position holds a
hash of its token, of its whole block and of everything that its slot could see when it was stored,
and a slot's logits hash everything that the slot can see. So a wrong row, a wrong order, a block
stored half masked, a prefix that is another sample's or a drafted block that was never reached all
change the logits, and integers leave no round-off to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spot_batch.models.slots import Hidden, KeptSlots, PrefixCache, SlotBatch

_JUNK = 0xDEAD  # what a row holds where nothing was stored: no zeros, so that reading it shows
_BLOCK, _PREFIX, _STATE, _FIRM, _LOOSE = 11, 22, 33, 44, 55


def mix(*words: np.ndarray | int) -> np.ndarray:
    """uint64 words that broadcast together -> one well-mixed uint64 (splitmix64, chained)."""
    with np.errstate(over="ignore"):
        state = np.uint64(0x9E3779B97F4A7C15)
        for word in words:
            word = np.asarray(word).astype(np.uint64)
            state = (state ^ word) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(32))
    return state


@dataclass(frozen=True, slots=True)
class IntegerKept:
    """What the slots marked `keep` would leave in the cache: (n, W), and whether they are clean."""

    stored: np.ndarray
    clean: np.ndarray

    def __len__(self) -> int:
        return len(self.stored)


class IntegerCache:
    """(rows, positions) hashes; a position that nothing was stored at holds junk."""

    def __init__(self, num_rows: int, num_positions: int, block_length: int) -> None:
        self.block_length = block_length
        self.stored = np.full((num_rows, num_positions), _JUNK, dtype=np.uint64)

    def resize(self, num_rows: int, num_positions: int) -> None:
        """Hold so many rows of so many positions; what of it is stored stays."""
        kept = self.stored[:num_rows, :num_positions]
        self.stored = np.full((num_rows, num_positions), _JUNK, dtype=np.uint64)
        self.stored[: kept.shape[0], : kept.shape[1]] = kept

    def clear(self, row: int) -> None:
        """Forget all that a row holds."""
        self.stored[row] = _JUNK

    def adopt(self, kept: KeptSlots, index: int, *, row: int, start: int) -> None:
        """Store the `index`-th kept slot as the clean block at `start` of `row`."""
        assert isinstance(kept, IntegerKept), type(kept)
        assert kept.clean[index], "a block was adopted that still holds a mask"
        self.stored[row, start : start + self.block_length] = kept.stored[index]

    def seen(self, row: np.ndarray, start: np.ndarray) -> np.ndarray:
        """(n,) hash of all positions of `row` below `start`; each knows where it stands."""
        below = np.arange(self.stored.shape[1]) < start[:, None]
        with np.errstate(over="ignore"):
            return np.where(below, self.stored[row], np.uint64(0)).sum(axis=1, dtype=np.uint64)


class IntegerTarget:
    """Hash logits: `span` + `wobble` small integers, or reals spread over `scale`.

    The firm part of a logit depends on the prefix and the position, the loose part on the block's
    state as well, so that stale distributions are worth something, as a trained target's are. An
    eighth of the states give all positions one row of logits and another eighth give it to pairs:
    exact ties in the order of commits and, integers being few, among the tokens.
    `prompts_hold_masks`: the mask id may stand in a prompt as any other token.
    """

    def __init__(
        self,
        *,
        block_length: int = 4,
        vocab_size: int = 11,
        seed: int = 0,
        mask_id: int | None = None,
        span: int = 8,
        wobble: int = 2,
        ties: bool = True,
        scale: float | None = None,
        prompts_hold_masks: bool = False,
    ) -> None:
        self._block_length = block_length
        self._vocab_size = vocab_size
        self._mask_id = vocab_size - 1 if mask_id is None else mask_id
        self._seed = seed
        self._span, self._wobble, self._ties, self._scale = span, wobble, ties, scale
        self._clean_is_unmasked = not prompts_hold_masks

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
        return torch.device("cpu")

    def allocate(self, num_rows: int, num_positions: int) -> IntegerCache:
        """A cache for so many samples in flight."""
        return IntegerCache(num_rows, num_positions, self._block_length)

    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        """One forward; writes the slots marked `store` into the cache."""
        assert isinstance(cache, IntegerCache), type(cache)
        ids, start = slots.ids.numpy(), slots.start.numpy()
        row, sees = slots.row.numpy(), slots.sees.numpy()
        self._check(slots)
        store = slots.store.numpy()
        # Blocks that are stored see each other, so in the order in which they stand.
        for at in np.unique(start[store]):
            now = np.flatnonzero(store & (start == at))
            entries = self._entries(ids[now], start[now], cache.seen(row[now], start[now]))
            cache.stored[row[now], at : at + self._block_length] = entries
        seen = cache.seen(row, start[sees[:, 0]])
        entries = np.empty(ids.shape, dtype=np.uint64)
        # A slot that sees others stands behind them, so in the order of how many these are.
        for depth in range(sees.shape[1]):
            now = np.flatnonzero((sees >= 0).sum(axis=1) == depth + 1)
            with np.errstate(over="ignore"):
                seen[now] += entries[sees[now, :depth]].sum(axis=(1, 2), dtype=np.uint64)
            entries[now] = self._entries(ids[now], start[now], seen[now])
        keep = slots.keep.numpy()
        unmasked = (ids[keep] != self._mask_id).all(axis=1)
        kept = IntegerKept(entries[keep], unmasked | (not self._clean_is_unmasked))
        return Hidden(torch.from_numpy(self._rows(ids, start, seen).view(np.int64)), kept)

    def head(self, rows: Tensor) -> Tensor:
        """(n, W, 2) hidden rows -> (n, W, V) float32 logits, the mask id at -inf."""
        firm, loose = np.moveaxis(rows.numpy().view(np.uint64), 2, 0)[..., None]
        return torch.from_numpy(self._logits(firm, loose))

    def logits_of(self, prefix: Sequence[int], block: Sequence[int]) -> np.ndarray:
        """(W, V) float32 logits of one state from its tokens alone: no cache, no slots."""
        width = self._block_length
        assert len(prefix) % width == 0, "the prefix is whole blocks"
        assert len(block) == width, "the block is whole"
        seen = np.zeros(1, dtype=np.uint64)
        for start in range(0, len(prefix), width):
            clean = np.asarray(prefix[start : start + width], dtype=np.int64)[None]
            entries = self._entries(clean, np.array([start]), seen)
            with np.errstate(over="ignore"):
                seen = seen + entries.sum(axis=1, dtype=np.uint64)
        ids = np.asarray(block, dtype=np.int64)[None]
        rows = self._rows(ids, np.array([len(prefix)]), seen)[0]
        return self._logits(rows[:, :1], rows[:, 1:])

    def _logits(self, firm: np.ndarray, loose: np.ndarray) -> np.ndarray:
        """Hashes (..., 1) of what is seen -> (..., V) logits."""
        vocab = np.arange(self._vocab_size)
        firm, loose = mix(firm, vocab), mix(loose, vocab)
        if self._scale is None:
            whole = firm % np.uint64(self._span) + loose % np.uint64(self._wobble + 1)
            logits = whole.astype(np.float32)
        else:
            real = firm.astype(np.float64) + 0.3 * loose.astype(np.float64)
            logits = (self._scale * real * 2.0**-64).astype(np.float32)
        logits[..., self._mask_id] = -np.inf
        return logits

    def _entries(self, ids: np.ndarray, start: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """(n, W) ids at (n,) starts that see (n,) prefixes -> (n, W) what they leave to read."""
        whole = mix(_PREFIX, self._seed, seen, self._block(ids))
        position = start[:, None] + np.arange(self._block_length)
        return mix(whole[:, None], ids, position)

    def _rows(self, ids: np.ndarray, start: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """(n, W, 2) hidden rows: the hash of the firm part and that of the loose part."""
        state = mix(_STATE, self._seed, seen, self._block(ids))
        position = start[:, None] + np.arange(self._block_length)
        if self._ties:
            kind = (state & np.uint64(7))[:, None]
            position = np.where(kind == 0, 0, np.where(kind == 1, position // 2, position))
        firm = mix(_FIRM, self._seed, seen[:, None], position)
        return np.stack((firm, mix(_LOOSE, state[:, None], position)), axis=2)

    def _block(self, ids: np.ndarray) -> np.ndarray:
        """(n, W) ids, masks included -> (n,) hash of the block's state."""
        return mix(_BLOCK, *ids.T)

    def _check(self, slots: SlotBatch) -> None:
        """What the engine owes a target."""
        ids, sees = slots.ids, slots.sees
        assert ids.shape[1] == self._block_length, tuple(ids.shape)
        assert bool((slots.start % self._block_length == 0).all()), "slots are aligned"
        unmasked = bool((ids[slots.store] != self._mask_id).all())
        assert unmasked or not self._clean_is_unmasked, "a stored slot holds a mask"
        assert not bool((slots.store & slots.keep).any()), "stored or kept, not both"
        for slot, seen in enumerate(sees.tolist()):
            chain = [at for at in seen if at >= 0]
            assert chain[-1] == slot, "a slot sees what stands before it, not behind"
            for place, at in enumerate(chain):
                assert sees[at, : place + 1].tolist() == chain[: place + 1], "a chain sees its own"
                assert int(slots.start[at]) == int(slots.start[chain[0]]) + place * ids.shape[1]
