"""Calibration errors, the fit of a calibration, and the figures of held-out states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spot_batch.drafters.distributions import (
    COMMITTED,
    MASKED,
    SINCE,
    Queries,
    StaleStore,
    candidates,
)
from spot_batch.drafters.order import (
    Calibration,
    OrderConfig,
    OrderDrafter,
    OrderModel,
    edge_weights,
    order_features,
)
from spot_batch.learning.calibration import (
    Chains,
    calibration_error,
    chain_masses,
    fit_calibration,
)
from spot_batch.learning.drafter import DrafterSettings, fitted_model
from spot_batch.learning.figures import compare, comparison_table, measure, tables
from spot_batch.learning.queries import DepthLaw
from spot_batch.learning.trajectories import Trajectories, load_trajectories
from tests.learning.recorded import SMALL, WIDTH, record
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Trajectories:
    target = write_target(tmp_path_factory.mktemp("target"), block_length=WIDTH, scale=3.0)
    return load_trajectories([record(tmp_path_factory.mktemp("job"), target, num_rows=24)])


@pytest.fixture(scope="module")
def model(states: Trajectories) -> OrderModel:
    settings = DrafterSettings(config=SMALL, steps=150, batch=64, learning_rate=3e-3)
    return fitted_model(states, settings, torch.device("cpu"))


def sharpened(model: OrderModel, times: float) -> OrderModel:
    """The same model, so many times as sure of everything."""
    sharp = OrderModel(model.config)
    sharp.load_state_dict(model.state_dict())
    with torch.no_grad():
        sharp.head.weight *= times
        sharp.head.bias *= times
    return sharp.eval()


def test_claims_that_come_true_as_often_as_they_say_have_no_error() -> None:
    claimed = torch.tensor([0.25] * 4 + [0.95] * 20)
    hit = torch.tensor([True] + [False] * 3 + [True] * 19 + [False])
    assert calibration_error(claimed, hit).error == pytest.approx(0.0, abs=1e-5)


def test_the_error_is_the_gap_in_percent_weighed_by_how_many_claim_so() -> None:
    claimed = torch.tensor([0.25, 0.25, 0.25, 1.0])
    hit = torch.tensor([True, True, True, True])
    assert calibration_error(claimed, hit).error == pytest.approx(100 * 3 / 4 * 0.75)


def test_gaps_of_opposite_sign_do_not_cancel() -> None:
    claimed = torch.tensor([0.0, 1.0])
    assert calibration_error(claimed, torch.tensor([True, False])).error == pytest.approx(100.0)


@pytest.mark.stat
def test_right_claims_show_about_the_error_that_chance_gives() -> None:
    """Fails by chance less than once in a thousand; the seed is fixed."""
    generator = torch.Generator().manual_seed(0)
    claimed = torch.rand(4000, generator=generator)
    hit = torch.rand(4000, generator=generator) < claimed
    found = calibration_error(claimed, hit)
    assert 0.5 * found.by_chance < found.error < 2.0 * found.by_chance


def test_no_claims_are_no_error() -> None:
    assert calibration_error(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).error == 0.0


def test_each_depth_has_its_own_entry_and_the_last_serves_all_beyond() -> None:
    score = torch.tensor([[1.0, 0.0, 3.0, 0.0]]).expand(4, -1)
    agreement = torch.tensor([[2.0, 1.0, 0.0, 0.0]]).expand(4, -1)
    status = torch.tensor([[MASKED, MASKED, SINCE, COMMITTED]]).expand(4, -1)
    calibration = Calibration(order=(1.0, 2.0), agreement=(1.0, 4.0), offset=(0.0, 1.0))
    weight, other = edge_weights(
        score, agreement, status, torch.tensor([0, 1, 2, 9]), calibration.table()
    )
    shallow = torch.tensor([1.0, 0.0]).softmax(0) * torch.tensor([2.0, 1.0]).sigmoid()
    deep = torch.tensor([0.5, 0.0]).softmax(0) * torch.tensor([1.5, 1.25]).sigmoid()
    torch.testing.assert_close(weight[:, :2], torch.stack((shallow, shallow, deep, deep)))
    assert not bool(weight[:, 2:].any())
    torch.testing.assert_close((weight + other).sum(1), torch.ones(4))


def test_the_engine_drafts_with_calibrated_weights(model: OrderModel) -> None:
    logits = 3 * torch.randn(1, WIDTH, 50, generator=torch.Generator().manual_seed(3))
    stale = StaleStore(1, WIDTH, 50, torch.device("cpu"))
    zero = torch.tensor([0])
    stale.put(zero, logits, torch.ones(1, WIDTH, dtype=torch.bool), zero)
    status = torch.tensor([[SINCE, SINCE] + [MASKED] * (WIDTH - 2)])
    queries = Queries(
        row=zero,
        status=status,
        guessed=torch.full_like(status, -1),
        start=zero,
        num_committed=torch.tensor([2]),
        noise_key=zero,
        temperature=torch.tensor([0.0]),
        top_p=torch.tensor([1.0]),
        top_k=zero,
    )
    calibration = Calibration(order=(1.0, 3.0), agreement=(1.0, 0.5), offset=(0.0, -4.0))
    found = OrderDrafter(model, calibration=calibration).propose(stale, queries, "position_step")
    guessed = candidates(stale, queries, "position_step")
    two = torch.tensor([2])
    with torch.inference_mode():
        score, agreement = model(order_features(guessed, status, two.float()), status)
        first, other = edge_weights(score, agreement, status, two, calibration.table())
    want = torch.where(
        found.token == guessed.token.gather(1, found.position),
        first.gather(1, found.position),
        0.6 * other.gather(1, found.position),
    )
    torch.testing.assert_close(found.weight, want)
    assert bool((found.token != guessed.token.gather(1, found.position)).any())


def test_the_fit_undoes_what_made_a_model_too_sure(model: OrderModel, states: Trajectories) -> None:
    plain = fit_calibration(model, states)
    sharp = fit_calibration(sharpened(model, 3.0), states)
    assert sharp.order[0] / plain.order[0] == pytest.approx(3.0, rel=0.1)
    assert sharp.agreement[0] / plain.agreement[0] == pytest.approx(3.0, rel=0.2)
    assert sharp.offset[0] == pytest.approx(plain.offset[0], abs=0.2)


def test_masses_are_nearer_to_what_happens_after_the_fit_on_prompts_it_has_not_seen(
    model: OrderModel, states: Trajectories
) -> None:
    for_fit, for_figures = states.halves()
    sharp = sharpened(model, 3.0)
    errors = compare(sharp, Calibration(), fit_calibration(sharp, for_fit), for_figures)
    assert errors[0].after < errors[0].before
    assert [each.depth for each in errors if each.depth is not None] == list(range(1, 7))
    assert [e.temperature for e in errors if e.temperature is not None] == [0.0, 0.5, 1.0, 1.5]
    assert comparison_table(errors).count("\n") == len(errors) + 1


def test_too_few_states_leave_the_model_as_it_is(model: OrderModel, states: Trajectories) -> None:
    assert fit_calibration(model, states.take(torch.arange(5))) == Calibration()


def test_a_fit_is_the_same_twice(model: OrderModel, states: Trajectories) -> None:
    assert fit_calibration(model, states) == fit_calibration(model, states)


def test_a_chain_is_asked_again_with_its_own_guesses_and_alive_while_they_are_right(
    model: OrderModel, states: Trajectories
) -> None:
    with torch.inference_mode():
        chains = Chains(model, states)
        first, mass, hit = chains.guesses(Calibration())
        positions, tokens = states.positions, states.tokens
        right = first == positions[:, 1]
        assert bool((hit <= right).all())
        num_ahead = states.num_ahead
        chains.advance(Calibration())
        kept = num_ahead >= 2
        assert len(chains) == int(kept.sum())
        assert torch.equal(chains.alive, hit[kept])
        assert torch.equal(chains.mass, mass[kept])
        second, _, _ = chains.guesses(Calibration())
        assert bool((second != first[kept]).all()), "a position is guessed twice"
        assert bool((second != positions[kept, 0]).all())
    assert len(tokens) == len(states)


def test_masses_along_a_chain_only_fall(model: OrderModel, states: Trajectories) -> None:
    masses = chain_masses(model, Calibration(), states)
    means = [masses.mass[masses.depth == depth].mean().item() for depth in range(1, 7)]
    assert means == sorted(means, reverse=True)
    hits = [masses.hit[masses.depth == depth].sum().item() for depth in range(1, 7)]
    assert hits == sorted(hits, reverse=True)


def test_figures_are_by_depth_by_temperature_and_by_masks_left(
    model: OrderModel, states: Trajectories
) -> None:
    found = measure(model, Calibration(), states, law=DepthLaw(), seed=0)
    assert found.num_states == len(states)
    assert [each.depth for each in found.by_depth] == list(range(1, 7))
    pairs = [(each.temperature, each.depth) for each in found.by_temperature]
    assert pairs == [(heat, depth) for heat in (0.0, 0.5, 1.0, 1.5) for depth in range(1, 7)]
    assert [each.masks_left for each in found.by_masks_left] == ["1", "2-3", "4-7"]
    for tables_of in (found.by_depth, found.by_temperature, found.by_masks_left):
        assert sum(each.num_queries for each in tables_of) == sum(
            int((states.num_ahead >= depth).sum()) for depth in range(1, 7)
        )
    last = found.by_masks_left[0]
    assert last.next_commit == last.stale_confidence == 1.0, "one mask left is no choice"
    for each in found.by_temperature:
        if each.temperature == 0.0:
            assert each.stale_confidence == each.plain_confidence
    assert all(each.hit <= each.token_agrees for each in found.by_depth)
    shown = tables(found)
    assert shown.count("| temperature |") == 1
    assert "overall" in found.tree()


def test_figures_are_the_same_twice(model: OrderModel, states: Trajectories) -> None:
    first, second = (
        measure(model, Calibration(), states, law=DepthLaw(), seed=4) for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("law", [{"mean_depth": 1.0}, {"max_depth": 0}, {"uniform_share": 2.0}])
def test_an_impossible_law_of_depths_is_refused(law: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="want mean_depth above 1"):
        DepthLaw(**law)  # type: ignore[arg-type]


def test_a_config_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_size 30 is not a multiple of num_heads 4"):
        OrderConfig(block_length=8, hidden_size=30, num_heads=4)
