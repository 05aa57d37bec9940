"""Linears and activations in calls of proven sizes: a row's bits do not depend on the batch.

A GEMM library picks its kernel and its blocking by the shape of the call; another number of rows
may mean another order of summation and other last bits. Within one call a row depends neither on
the other rows' content nor on its place. So every linear is called in tiles whose row counts were
shown, on this machine, to give equal bits (docs/exactness.md, arithmetic).

A pointwise kernel on a CPU cuts its elements evenly among the threads and treats what does not fill
a vector register with other instructions; for a product or a sum these round alike, for an
exponential they do not. So an activation is called on one slot at a time: always the same cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""The row counts that are tried, in slots."""

_FALLBACK_TILE = 8
_PROBE_ROUNDS = 1


class RowTiles:
    """How the rows of a forward are cut into calls. One object a target, shared by its linears.

    `sizes` in slots, ascending. None leaves rows uncut (`numerics: fast`).
    """

    def __init__(self, block_length: int, sizes: Sequence[int] | None) -> None:
        self.block_length = block_length
        self.sizes = None if sizes is None else tuple(sorted(sizes))
        self._plans: dict[int, tuple[int, ...]] = {}

    def padded(self, num_slots: int) -> int:
        """The number of slots to run so that the tiles fit."""
        if self.sizes is None:
            return num_slots
        smallest = self.sizes[0]
        return -(-num_slots // smallest) * smallest

    def plan(self, num_rows: int) -> tuple[int, ...]:
        """Row counts of the calls that make up `num_rows`, largest first."""
        plan = self._plans.get(num_rows)
        if plan is None:
            plan = self._plans[num_rows] = self._cut(num_rows)
        return plan

    def _cut(self, num_rows: int) -> tuple[int, ...]:
        if self.sizes is None:
            return (num_rows,)
        num_slots, odd = divmod(num_rows, self.block_length)
        assert not odd, f"{num_rows} rows are not whole slots of {self.block_length}"
        calls: list[int] = []
        for size in reversed(self.sizes):
            count, num_slots = divmod(num_slots, size)
            calls += [size * self.block_length] * count
        assert not num_slots, f"{num_rows} rows are not padded to tiles of {self.sizes}"
        return tuple(calls)


class TiledLinear(nn.Module):
    """A linear that runs in the calls its tiles say. Takes over the weight of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear, tiles: RowTiles) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.tiles = tiles

    def forward(self, rows: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        flat = rows.reshape(-1, rows.shape[-1])
        plan = self.tiles.plan(len(flat))
        if len(plan) == 1:
            out = functional.linear(flat, self.weight, self.bias)
        else:
            out = flat.new_empty(len(flat), len(self.weight))
            done = 0
            for count in plan:
                tile = functional.linear(flat[done : done + count], self.weight, self.bias)
                out[done : done + count] = tile
                done += count
        return out.view(*rows.shape[:-1], -1)


def tile_linears(model: nn.Module, tiles: RowTiles) -> list[TiledLinear]:
    """Replace every linear below `model` by a tiled one; returns them."""
    tiled = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                replacement = TiledLinear(child, tiles)
                setattr(parent, name, replacement)
                tiled.append(replacement)
    return tiled


class SlotActivation(nn.Module):
    """An activation that goes over one slot at a time."""

    def __init__(self, activation: nn.Module, num_rows: int) -> None:
        super().__init__()
        self.activation = activation
        self.num_rows = num_rows

    def forward(self, rows: Tensor) -> Tensor:
        """(..., slots * num_rows, n) -> the same, in place."""
        for slot in rows.split(self.num_rows, dim=-2):
            slot.copy_(self.activation(slot))
        return rows


def cut_activations(model: nn.Module, num_rows: int) -> None:
    """Make every activation below `model` go over so many rows at a time; they are few, by name."""
    for parent in list(model.modules()):
        activation = getattr(parent, "act_fn", None)
        if isinstance(activation, nn.Module) and not isinstance(activation, SlotActivation):
            parent.act_fn = SlotActivation(activation, num_rows)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What decides which kernel a linear takes."""

    num_in: int
    num_out: int
    bias: bool
    dtype: torch.dtype


@torch.inference_mode()
def proven_tiles(
    linears: Iterable[TiledLinear],
    block_length: int,
    *,
    sizes: Sequence[int] = TILE_SIZES,
    anchor: int | None = None,
) -> tuple[int, ...]:
    """The largest set of tile sizes at which all the linears give equal bits, on this machine.

    Each shape is probed on random rows: a size belongs to a class if every row comes out as it does
    from the class's largest size, wherever it stands in the call. If no two sizes agree the answer
    is tiles of 8 slots. With an `anchor` it is the class of that size, itself alone at the least.
    """
    shapes: dict[LinearShape, TiledLinear] = {}
    for linear in linears:
        num_out, num_in = linear.weight.shape
        shape = LinearShape(num_in, num_out, linear.bias is not None, linear.weight.dtype)
        shapes.setdefault(shape, linear)
    agreeing = {(a, b): True for a in sizes for b in sizes}
    for number, (shape, linear) in enumerate(
        sorted(shapes.items(), key=lambda item: repr(item[0]))
    ):
        for round_index in range(_PROBE_ROUNDS):
            generator = torch.Generator().manual_seed(1000 * number + round_index)
            rows = torch.randn(sizes[-1] * block_length, shape.num_in, generator=generator)
            rows = rows.to(linear.weight.device, linear.weight.dtype)
            outputs = {size: _in_tiles(linear, rows, size * block_length) for size in sizes}
            for a, b in agreeing:
                agreeing[a, b] &= torch.equal(outputs[a], outputs[b])
    if anchor is not None:
        return tuple(size for size in sizes if agreeing[size, anchor])
    classes = [tuple(size for size in sizes if agreeing[size, one]) for one in sizes]
    best = max(classes, key=lambda sizes: (len(sizes), sizes[-1]))
    return best if len(best) > 1 else (_FALLBACK_TILE,)


def _in_tiles(linear: TiledLinear, rows: Tensor, count: int) -> Tensor:
    """The linear of `rows`, `count` at a time; a row's place in its call changes with count."""
    tiles = [functional.linear(tile, linear.weight, linear.bias) for tile in rows.split(count)]
    return torch.cat(tiles)
