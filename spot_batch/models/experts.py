"""Mixtures of experts that drop no row, so that a row's bits do not depend on who else went to its
expert.

How many rows an expert gets is a matter of the whole forward, and a GEMM's bits may depend on its
number of rows. So under canonical numerics the rows of an expert are padded to whole tiles, the
GEMMs run in tiles of proven sizes (tiles.py), and a row's results are summed in the order of its
own ranking, in float32, by products and sums that are each rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from spot_batch.models.tiles import RowTiles, TiledLinear

TILE_ROWS = 4
"""An expert's tiles are multiples of so many rows: with fewer a GEMM takes other kernels."""

_ROWS_A_CALL = 1024
"""A grouped GEMM on a GPU always has so many rows, for its kernel is chosen by their number."""

_CALL_TILES = 2
"""What a call costs beside its rows, counted in tiles: it reads the weights once more."""


@lru_cache(maxsize=10_000)
def cheapest_calls(num_tiles: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Calls of these sizes (ascending) that hold so many tiles, more where that takes fewer calls.

    Which calls they are changes no bit: that is what the sizes are proven for.
    """
    within = [size for size in sizes if size <= num_tiles]
    beyond = [size for size in sizes if size >= num_tiles]
    ways: list[tuple[int, ...]] = [(beyond[0],)] if beyond else []
    if within:
        rest = num_tiles - within[-1]
        ways.append((within[-1], *(cheapest_calls(rest, sizes) if rest else ())))
    return min(ways, key=lambda calls: sum(calls) + _CALL_TILES * len(calls))


def best(scores: Tensor, count: int) -> Tensor:
    """(N, E) -> (N, count) indices of the largest, from the largest down; of equal ones the first.

    `topk` leaves equal ones open, and in bfloat16 the logits of two experts often are.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where the rows of a forward stand when they are put side by side by expert.

    place (N, k) of a row for each of its experts; ends (E,) of the experts' rows, padding included.
    """

    place: Tensor
    ends: Tensor

    @classmethod
    def of(cls, experts: Tensor, *, num_experts: int) -> Dispatch:
        """(N, k) the experts of each row."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        padded = (counts + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        ends = padded.cumsum(0)
        # A row's rank among those of its expert, counted from where the padded rows begin.
        shift = (ends - padded) - (counts.cumsum(0) - counts)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=flat.device) + shift[flat[order]]
        return cls(place.view_as(experts), ends)

    def by_expert(self, rows: Tensor, num_places: int) -> Tensor:
        """(N, d) rows -> (num_places, d), zeros where padded."""
        spread = rows.new_zeros(num_places, rows.shape[1])
        spread[self.place.flatten()] = rows.repeat_interleave(self.place.shape[1], dim=0)
        return spread

    def weighted(self, spread: Tensor, weights: Tensor) -> Tensor:
        """(places, d) results and (N, k) weights -> (N, d) float32 sums over each row's experts."""
        total = torch.zeros(len(weights), spread.shape[1], device=spread.device)
        for place, weight in zip(self.place.unbind(1), weights.float().unbind(1), strict=True):
            # Two roundings, whatever the number of rows: a fused product and sum would have one.
            total += spread[place].float() * weight[:, None]
        return total


class StackedExperts(Protocol):
    """SwiGLU experts as transformers keeps them.

    gate_up_proj (E, 2 * inner, d), the gate's rows first; down_proj (E, d, inner).
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    act_fn: Callable[[Tensor], Tensor]


class TiledExperts(nn.Module):
    """Experts in tiles. Takes over the weights of transformers', and is called as they are."""

    def __init__(self, experts: StackedExperts, tiles: RowTiles) -> None:
        super().__init__()
        assert tiles.block_length == TILE_ROWS, f"experts are tiled by {TILE_ROWS} rows"
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.act_fn = experts.act_fn
        self.tiles = tiles

    def linears(self) -> list[TiledLinear]:
        """The first expert's linears, to prove tiles on: the others have the same shapes."""
        return [_linear(weight[0], self.tiles) for weight in (self.gate_up_proj, self.down_proj)]

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(N, d) rows, (N, k) their experts and weights -> (N, d)."""
        dispatch = Dispatch.of(experts, num_experts=len(self.gate_up_proj))
        spread = (
            self.grouped(rows, dispatch)
            if rows.device.type == "cuda" and rows.dtype == torch.bfloat16
            else self.looped(rows, dispatch)
        )
        return dispatch.weighted(spread, weights).to(rows.dtype)

    def looped(self, rows: Tensor, dispatch: Dispatch) -> Tensor:
        """One expert after the other, in tiles: (places, d)."""
        ends = dispatch.ends.tolist()
        begins = [0, *ends[:-1]]
        spread = dispatch.by_expert(rows, ends[-1])
        out = torch.empty_like(spread)
        for expert, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if begin < end:
                self._one(expert, spread[begin:end], out[begin:end])
        return out

    def _one(self, expert: int, rows: Tensor, out: Tensor) -> None:
        """`rows` through an expert; SwiGLU goes row by row, for the gate's rows have gaps."""
        inner = self._in_tiles(rows, self.gate_up_proj[expert])
        gate, up = inner.chunk(2, dim=-1)
        out.copy_(self._in_tiles(self.act_fn(gate) * up, self.down_proj[expert]))

    def _in_tiles(self, rows: Tensor, weight: Tensor) -> Tensor:
        sizes = self.tiles.sizes
        if sizes is None:
            return functional.linear(rows, weight)
        calls = [TILE_ROWS * size for size in cheapest_calls(len(rows) // TILE_ROWS, sizes)]
        padding = sum(calls) - len(rows)
        padded = functional.pad(rows, (0, 0, 0, padding)) if padding else rows
        tiles = [functional.linear(tile, weight) for tile in padded.split(calls)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[: len(rows)]

    def grouped(
        self, rows: Tensor, dispatch: Dispatch, *, rows_a_call: int = _ROWS_A_CALL
    ) -> Tensor:
        """All experts at once, in calls of one shape: (places, d), junk behind the last expert's.

        The number of calls follows from the number of rows alone: nothing waits for the device.
        """
        num_experts = len(self.gate_up_proj)
        most = dispatch.place.numel() + num_experts * (TILE_ROWS - 1)
        num_calls = -(-most // rows_a_call)
        spread = dispatch.by_expert(rows, num_calls * rows_a_call)
        out = torch.empty_like(spread)
        into, back = self.gate_up_proj.transpose(1, 2), self.down_proj.transpose(1, 2)
        for call in range(num_calls):
            at = slice(call * rows_a_call, (call + 1) * rows_a_call)
            ends = (dispatch.ends - at.start).clamp(0, rows_a_call).to(torch.int32)
            inner = functional.grouped_mm(spread[at], into, offs=ends)
            gate, up = inner.chunk(2, dim=-1)
            out[at] = functional.grouped_mm(self.act_fn(gate) * up, back, offs=ends)
        return out


def tile_experts(model: nn.Module, tiles: RowTiles) -> list[TiledExperts]:
    """Replace the stacked experts of every layer below `model` by tiled ones; returns them."""
    tiled = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3MoeExperts):
                replacement = TiledExperts(child, tiles)
                setattr(parent, name, replacement)
                tiled.append(replacement)
    return tiled


def _linear(weight: Tensor, tiles: RowTiles) -> TiledLinear:
    num_out, num_in = weight.shape
    linear = nn.Linear(num_in, num_out, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return TiledLinear(linear, tiles)
