"""The arithmetic of an actor, and actors that compute other bits."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.models.block import load_target
from spot_batch.models.numerics import NumericsMismatch, measure_numerics
from spot_batch.models.tiles import RowTiles, SlotActivation, TiledLinear, proven_tiles
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_two_loads_of_one_model_have_one_probe(folder: Path) -> None:
    info = resolve_model(str(folder))
    first, second = measure_numerics(load_target(info)), measure_numerics(load_target(info))
    assert first == second
    second.require(asdict(first))


def test_another_dtype_is_another_arithmetic_and_is_named(folder: Path) -> None:
    info = resolve_model(str(folder))
    wide = measure_numerics(load_target(info, dtype="float32"))
    narrow = measure_numerics(load_target(info, dtype="bfloat16"))
    with pytest.raises(NumericsMismatch, match=r"hardware differs.*dtype 'float32' then"):
        narrow.require(asdict(wide))


def test_other_bits_under_the_same_settings_are_refused_too(folder: Path) -> None:
    numerics = measure_numerics(load_target(resolve_model(str(folder))))
    other = replace(numerics, probe="0" * 64)
    with pytest.raises(NumericsMismatch, match="the same settings, other bits"):
        other.require(asdict(numerics))


def test_sizes_whose_bits_differ_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return real(rows, weight, bias) + (1e-3 if len(rows) > 8 * 4 else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", fickle)
    tiles = RowTiles(4, None)
    linear = TiledLinear(torch.nn.Linear(16, 8), tiles)
    assert proven_tiles([linear], 4) == (1, 2, 4, 8)


def test_linears_of_one_shape_and_two_dtypes_are_both_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.nn.functional.linear

    def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wrong = rows.dtype == torch.float32 and len(rows) == 8
        return real(rows, weight, bias) + (1e-3 if wrong else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", fickle)
    narrow = TiledLinear(torch.nn.Linear(16, 8, dtype=torch.bfloat16), RowTiles(4, None))
    wide = TiledLinear(torch.nn.Linear(16, 8), RowTiles(4, None))
    assert proven_tiles([narrow, wide], 4, sizes=(1, 2, 4)) == (1, 4)
    assert proven_tiles([narrow], 4, sizes=(1, 2, 4)) == (1, 2, 4)


def test_an_anchored_class_holds_its_anchor_and_what_agrees_with_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.nn.functional.linear

    def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return real(rows, weight, bias) + (1e-3 if len(rows) in (3, 6) else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", fickle)
    linear = TiledLinear(torch.nn.Linear(16, 8), RowTiles(3, None))
    assert proven_tiles([linear], 3, sizes=(1, 2, 4, 8)) == (4, 8)
    assert proven_tiles([linear], 3, sizes=(1, 2, 4, 8), anchor=1) == (1, 2)
    assert proven_tiles([linear], 3, sizes=(1, 4, 8), anchor=1) == (1,)


def test_a_head_over_many_states_has_the_bits_of_each_alone(folder: Path) -> None:
    target = load_target(resolve_model(str(folder)))
    rows = torch.randn(13, 8, 64, generator=torch.Generator().manual_seed(0))
    together = target.head(rows)
    assert torch.equal(together, torch.cat([target.head(row[None]) for row in rows]))
    assert target.head_tiles.sizes is not None
    assert target.head_tiles.sizes[0] == 1, "no state is padded"
    target.head_tiles.sizes = (1,)
    assert torch.equal(target.head(rows), together)


def test_where_no_two_sizes_agree_all_calls_have_eight_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = torch.nn.functional.linear

    def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return real(rows, weight, bias) + 1e-3 * len(rows)

    monkeypatch.setattr(torch.nn.functional, "linear", fickle)
    linear = TiledLinear(torch.nn.Linear(16, 8), RowTiles(4, None))
    assert proven_tiles([linear], 4) == (8,)


def test_rows_are_cut_into_proven_sizes_largest_first() -> None:
    assert RowTiles(4, (1, 2, 8)).plan(4 * 13) == (32, 8, 8, 4)
    assert RowTiles(4, (8,)).padded(13) == 16
    assert RowTiles(4, None).plan(4 * 13) == (52,)


def test_only_canonical_numerics_cut_activations(folder: Path) -> None:
    info = resolve_model(str(folder))
    for canonical in (True, False):
        modules = load_target(info, canonical=canonical).body.network.modules()
        cut = [module for module in modules if isinstance(module, SlotActivation)]
        assert len(cut) == (2 if canonical else 0), "one a layer"


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("activation", [torch.nn.SiLU(), torch.nn.Sigmoid()], ids=repr)
def test_an_activation_cut_by_slot_gives_a_slot_the_same_bits_in_any_company(
    activation: torch.nn.Module, num_threads: int
) -> None:
    width, num_slots = 5, 300
    rows = torch.randn(1, num_slots * width, 41, generator=torch.Generator().manual_seed(0))
    cut = SlotActivation(activation, width)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        alone = torch.cat([activation(slot.clone()) for slot in rows.split(width, dim=1)], dim=1)
        uncut, together = activation(rows), cut(rows.clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    if torch.equal(uncut, alone):
        pytest.skip("on this machine it does not depend on how many elements there are")
