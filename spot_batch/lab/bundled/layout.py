"""Training rows: samples packed side by side, who sees whom, what is masked, what is learnt.

Blocks are counted from the first token of each sample and position ids restart with it, so a
packed row scores every sample as if it stood alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]

CLEAN = 0  # the copy that noised blocks read their past from; noised copies are 1, 2
PADDING = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its response in token ids; the response ends with its end token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows, every field (rows, length); padding belongs to sample -1."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    positions: Tensor
    samples: Tensor
    blocks: Tensor
    copies: Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """One sample laid out: every field (length,)."""

    tokens: Ids
    targets: Ids
    weights: NDArray[np.float32]
    positions: Ids
    blocks: Ids
    copies: Ids


def causal_piece(sample: Sample, *, fill_id: int, prompt_weight: float) -> Piece:
    """A sample for next-token training: row i is scored on token i + 1."""
    full = np.array([*sample.prompt, *sample.response, fill_id], dtype=np.int64)
    size = len(full) - 1
    weights = np.full(size, prompt_weight, dtype=np.float32)
    weights[len(sample.prompt) - 1 :] = 1.0
    positions = np.arange(size)
    zeros = np.zeros(size, dtype=np.int64)
    return Piece(full[:-1], full[1:], weights, positions, positions, zeros)


def filled(sample: Sample, *, block_length: int, fill_id: int, extra_blocks: int) -> Ids:
    """The whole sample, filled to the end of its last block and `extra_blocks` further ones."""
    size = len(sample.prompt) + len(sample.response)
    total = (-(-size // block_length) + extra_blocks) * block_length
    tokens = np.full(total, fill_id, dtype=np.int64)
    tokens[:size] = (*sample.prompt, *sample.response)
    return tokens


def diffusion_piece(
    tokens: Ids,
    *,
    prompt_length: int,
    block_length: int,
    mask_id: int,
    levels: NDArray[np.float64],
    rng: np.random.Generator,
) -> Piece:
    """A filled sample for block diffusion: its clean past, then two complementary noised copies.

    BD3-LM's [noised; clean] input (Arriola et al. 2025) less what nobody reads: the last clean
    block and the noised copies of prompt blocks. `levels` (noised blocks,) in [0, 1) set how many
    of a block's m free positions are masked, n = 1 + floor(level * m); the second copy masks the
    other m - n, so every response token is learnt once. A masked token weighs m / n, which makes
    a block's expected loss its any-order bound.
    """
    num_blocks = len(tokens) // block_length
    first = prompt_length // block_length
    assert len(tokens) % block_length == 0, f"{len(tokens)} tokens are no whole blocks"
    assert levels.shape == (num_blocks - first,), f"want {num_blocks - first} levels"
    positions = np.arange(len(tokens))
    parts: list[tuple[Ids, Ids, NDArray[np.float32], int]] = []  # tokens, positions, weights, copy
    past = positions[: (num_blocks - 1) * block_length]
    parts.append((tokens[past], past, np.zeros(len(past), dtype=np.float32), CLEAN))
    for block, level in zip(range(first, num_blocks), levels, strict=True):
        span = positions[block * block_length : (block + 1) * block_length]
        free = span[span >= prompt_length]
        num_masked = 1 + int(level * len(free))
        order = rng.permutation(free)
        for copy, hidden in enumerate((order[:num_masked], order[num_masked:]), start=1):
            if len(hidden) == 0:
                continue
            noised = tokens[span].copy()
            weights = np.zeros(block_length, dtype=np.float32)
            noised[hidden - span[0]] = mask_id
            weights[hidden - span[0]] = len(free) / len(hidden)
            parts.append((noised, span, weights, copy))
    where = np.concatenate([part[1] for part in parts])
    return Piece(
        tokens=np.concatenate([part[0] for part in parts]),
        targets=tokens[where],
        weights=np.concatenate([part[2] for part in parts]),
        positions=where,
        blocks=where // block_length,
        copies=np.concatenate([np.full(len(part[0]), part[3]) for part in parts]),
    )


def diffusion_pieces(
    samples: Sequence[Sample],
    *,
    block_length: int,
    fill_id: int,
    mask_id: int,
    extra_block_share: float,
    rng: np.random.Generator,
) -> list[Piece]:
    """Pieces of a batch, the noise levels stratified over all of its blocks."""
    extra = rng.random(len(samples)) < extra_block_share
    tokens = [
        filled(sample, block_length=block_length, fill_id=fill_id, extra_blocks=int(more))
        for sample, more in zip(samples, extra, strict=True)
    ]
    counts = [
        len(row) // block_length - len(sample.prompt) // block_length
        for row, sample in zip(tokens, samples, strict=True)
    ]
    total = sum(counts)
    levels = (rng.permutation(total) + rng.random(total)) / total
    ends = np.cumsum(counts)
    return [
        diffusion_piece(
            row,
            prompt_length=len(sample.prompt),
            block_length=block_length,
            mask_id=mask_id,
            levels=levels[end - count : end],
            rng=rng,
        )
        for row, sample, count, end in zip(tokens, samples, counts, ends, strict=True)
    ]


def pack(pieces: Sequence[Piece], *, row_length: int, fill_id: int) -> Rows:
    """Lay pieces into as few rows as first-fit of the longest first finds."""
    space: list[int] = []
    places: list[tuple[int, int]] = []
    order = sorted(range(len(pieces)), key=lambda i: (-len(pieces[i].tokens), i))
    for index in order:
        size = len(pieces[index].tokens)
        assert size <= row_length, f"a piece of {size} does not fit a row of {row_length}"
        row = next((r for r, left in enumerate(space) if left >= size), len(space))
        if row == len(space):
            space.append(row_length)
        places.append((row, row_length - space[row]))
        space[row] -= size
    shape = (len(space), row_length)
    tokens = np.full(shape, fill_id, dtype=np.int64)
    targets = np.full(shape, fill_id, dtype=np.int64)
    weights = np.zeros(shape, dtype=np.float32)
    positions = np.zeros(shape, dtype=np.int64)
    owners = np.full(shape, PADDING, dtype=np.int64)
    blocks = np.zeros(shape, dtype=np.int64)
    copies = np.zeros(shape, dtype=np.int64)
    for index, (row, start) in zip(order, places, strict=True):
        piece = pieces[index]
        span = slice(start, start + len(piece.tokens))
        tokens[row, span] = piece.tokens
        targets[row, span] = piece.targets
        weights[row, span] = piece.weights
        positions[row, span] = piece.positions
        owners[row, span] = index
        blocks[row, span] = piece.blocks
        copies[row, span] = piece.copies
    fields = (tokens, targets, weights, positions, owners, blocks, copies)
    return Rows(*(torch.from_numpy(field) for field in fields))


def visibility(rows: Rows) -> Tensor:
    """(rows, 1, length, length), query by key: the BD3-LM mask, block-diagonal over samples.

    A clean block sees clean blocks up to itself; a noised block sees itself and clean blocks
    strictly earlier. With one position a block and no noised copy this is the causal mask.
    """
    same = of_one(rows.samples)
    earlier = rows.blocks[:, None, :] < rows.blocks[:, :, None]
    clean = (rows.copies == CLEAN)[:, None, :]
    own = of_one(rows.blocks) & of_one(rows.copies)
    allowed = same & ((clean & earlier) | own)
    return allowed[:, None]


def of_one(field: Tensor) -> Tensor:
    """(rows, length) -> (rows, length, length): whether two places hold the same value."""
    return field[:, :, None] == field[:, None, :]


def block_causal(length: int, *, block_length: int) -> Tensor:
    """(length, length), query by key: a position sees its own block and earlier ones."""
    blocks = torch.arange(length) // block_length
    return blocks[None, :] <= blocks[:, None]
