"""Mixtures of experts: where rows go, what their neighbours may not change, and the GPU's path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from spot_batch.models.experts import TILE_ROWS, Dispatch, TiledExperts, best, cheapest_calls
from spot_batch.models.tiles import RowTiles, proven_tiles
from tests.slots import seeded

NUM_EXPERTS = 8


def library_experts(
    *, hidden_size: int, inner_size: int, dtype: torch.dtype = torch.float32
) -> Qwen3MoeExperts:
    experts = Qwen3MoeExperts(
        Qwen3MoeConfig(
            hidden_size=hidden_size,
            moe_intermediate_size=inner_size,
            num_experts=NUM_EXPERTS,
            experts_implementation="eager",
        )
    ).requires_grad_(False)
    generator = seeded(0)
    for weight in (experts.gate_up_proj, experts.down_proj):
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[2] ** -0.5)
    return experts.to(dtype)


def tiled(experts: Qwen3MoeExperts) -> TiledExperts:
    tiles = RowTiles(TILE_ROWS, None)
    ours = TiledExperts(experts, tiles)
    tiles.sizes = proven_tiles(ours.linears(), TILE_ROWS)
    return ours


def routed(num_rows: int, top_k: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """(N, k) experts, some of which are much asked for, and their weights."""
    generator = seeded(seed)
    scores = torch.randn(num_rows, NUM_EXPERTS, generator=generator)
    scores += torch.linspace(-2, 2, NUM_EXPERTS)
    weights = torch.rand(num_rows, top_k, generator=generator)
    return best(scores, top_k), weights / weights.sum(1, keepdim=True)


@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 1000))
def test_every_row_goes_to_each_of_its_experts_and_to_no_other(
    num_rows: int, top_k: int, seed: int
) -> None:
    experts, _ = routed(num_rows, top_k, seed=seed)
    dispatch = Dispatch.of(experts, num_experts=NUM_EXPERTS)
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), dispatch.ends[:-1]))
    sizes = dispatch.ends - begins
    counts = torch.bincount(experts.flatten(), minlength=NUM_EXPERTS)
    assert torch.equal(sizes, -(-counts // TILE_ROWS) * TILE_ROWS), "whole tiles, none dropped"
    assert len(set(dispatch.place.flatten().tolist())) == num_rows * top_k
    assert bool((dispatch.place >= begins[experts]).all())
    assert bool((dispatch.place < (begins + counts)[experts]).all())
    rows = torch.arange(1, num_rows + 1)[:, None].float()
    spread = dispatch.by_expert(rows, int(dispatch.ends[-1]))
    assert torch.equal(spread[dispatch.place].squeeze(2), rows.expand(-1, top_k))
    assert int((spread != 0).sum()) == num_rows * top_k


@given(st.integers(1, 300), st.sets(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=1))
def test_calls_hold_all_tiles_and_few_more(num_tiles: int, sizes: set[int]) -> None:
    calls = cheapest_calls(num_tiles, tuple(sorted(sizes)))
    assert set(calls) <= sizes
    assert sum(calls) >= num_tiles
    assert sum(calls) - num_tiles < max(calls), "a call that holds nothing"
    of_smallest = -(-num_tiles // min(sizes)) * (min(sizes) + 2)
    assert sum(calls) + 2 * len(calls) <= of_smallest


def test_a_few_rows_more_are_cheaper_than_another_call() -> None:
    sizes = (1, 2, 4, 8, 16)
    calls = {number: cheapest_calls(number, sizes) for number in (1, 5, 13, 15, 17, 33)}
    assert calls == {1: (1,), 5: (4, 1), 13: (16,), 15: (16,), 17: (16, 1), 33: (16, 16, 1)}


def test_of_equal_experts_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert best(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert best(scores, 4).tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("num_rows", [1, 4, 33, 200])
def test_tiled_experts_are_the_librarys(num_rows: int) -> None:
    experts = library_experts(hidden_size=64, inner_size=32)
    rows = torch.randn(num_rows, 64, generator=seeded(1))
    chosen, weights = routed(num_rows, 2, seed=2)
    torch.testing.assert_close(
        tiled(experts)(rows, chosen, weights), experts(rows, chosen, weights), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_a_call", [8, 64, 1024])
def test_the_grouped_path_is_the_looped_one(rows_a_call: int, dtype: torch.dtype) -> None:
    """What a GPU runs, by the CPU's kernel of the same name; calls may cut an expert in two."""
    ours = tiled(library_experts(hidden_size=64, inner_size=32, dtype=dtype))
    for num_rows in (1, 7, 120):
        rows = torch.randn(num_rows, 64, generator=seeded(1)).to(dtype)
        chosen, weights = routed(num_rows, 3, seed=2)
        dispatch = Dispatch.of(chosen, num_experts=NUM_EXPERTS)
        looped, grouped = (
            dispatch.weighted(spread, weights)
            for spread in (
                ours.looped(rows, dispatch),
                ours.grouped(rows, dispatch, rows_a_call=rows_a_call),
            )
        )
        close = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(grouped, looped, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 32), (1024, 256)], ids=["narrow", "wide"])
def test_a_rows_bits_do_not_depend_on_who_else_went_to_its_experts(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    hidden_size, inner_size = sizes
    ours = tiled(library_experts(hidden_size=hidden_size, inner_size=inner_size, dtype=dtype))
    num_rows = 96
    rows = torch.randn(num_rows, hidden_size, generator=seeded(1)).to(dtype)
    chosen, weights = routed(num_rows, 2, seed=2)
    expected = ours(rows, chosen, weights)
    for seed in range(3):
        order = torch.randperm(num_rows, generator=seeded(seed))
        for taken in (order, order[:1], order[:5], order[:40]):
            found = ours(rows[taken], chosen[taken], weights[taken])
            assert torch.equal(found, expected[taken])
    company = 100 * torch.randn(num_rows, hidden_size, generator=seeded(3)).to(dtype)
    company[::7] = rows[::7]
    assert torch.equal(ours(company, chosen, weights)[::7], expected[::7])


def test_sizes_that_give_other_bits_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM whose bits depend on its number of rows: tiles of one size are left."""
    plain = torch.nn.functional.linear

    def uneven(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(rows, weight, bias) * (1 + 1e-5 * len(rows))

    experts = library_experts(hidden_size=64, inner_size=32)
    monkeypatch.setattr(torch.nn.functional, "linear", uneven)
    ours = tiled(experts)
    assert ours.tiles.sizes == (8,)
    rows = torch.randn(50, 64, generator=seeded(1))
    chosen, weights = routed(50, 2, seed=2)
    expected = ours(rows, chosen, weights)
    differing = 0
    for count in (1, 3, 20):
        assert torch.equal(ours(rows[:count], chosen[:count], weights[:count]), expected[:count])
        untiled = experts(rows[:count], chosen[:count], weights[:count])
        differing += not torch.equal(untiled, experts(rows, chosen, weights)[:count])
    assert differing == 3, "untiled experts were to depend on their number of rows"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_rows_bits_do_not_depend_on_who_else_went_to_its_experts() -> None:
    looped, ours = (
        tiled(library_experts(hidden_size=1024, inner_size=256, dtype=torch.bfloat16).to(device))
        for device in ("cpu", "cuda")
    )
    rows = torch.randn(512, 1024, generator=seeded(1)).bfloat16()
    chosen, weights = routed(512, 2, seed=2)
    on_gpu = rows.cuda(), chosen.cuda(), weights.cuda()
    expected = ours(*on_gpu)
    torch.testing.assert_close(expected.cpu(), looped(rows, chosen, weights), rtol=2e-2, atol=2e-2)
    for seed in range(3):
        order = torch.randperm(512, generator=seeded(seed)).cuda()
        for taken in (order, order[:1], order[:40], order[:300]):
            assert torch.equal(ours(*(part[taken] for part in on_gpu)), expected[taken])
