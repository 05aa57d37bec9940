"""The budget controller on tables and trees made by hand, and at work in the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_batch.engine.budget import Budget, Prices, Workload, best_spending, pool
from spot_batch.engine.engine import EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.measure import measure_latency
from spot_batch.engine.tree import ROOT, DraftTree, Edge
from spot_batch.records.sampling import Unmasking
from tests.exact.harness import decode_all, make_drafter, mixed_requests, same_sample, trace_of
from tests.exact.mock_target import IntegerTarget
from tests.slots import NUM_LETTERS

SLOTS = (1, 2, 4, 8, 16, 32, 64)


def linear(fixed: float, each: float, *, draft: float = 0.0) -> LatencyTable:
    """A forward takes `fixed` and `each` for every slot; a wave takes `draft`."""
    return LatencyTable(
        slots=SLOTS,
        num_keys=(128,),
        forward_s=(tuple(fixed + each * size for size in SLOTS),),
        queries=(1, 2),
        draft_s=(draft, draft),
    )


def chain(*weights: float, num_masked: int = 8) -> DraftTree:
    """One guess after the other, each as probable from the last as given."""
    tree = DraftTree(num_masked=num_masked, budget=20, gamma=0.0, crossing=True)
    key = ROOT
    for position, weight in enumerate(weights):
        tree.expand(key, [Edge(((position, 7),), weight)])
        key = (*key, (position, 7))
    tree.select()
    return tree


def load(num_roots: int) -> Workload:
    return Workload(num_roots=num_roots, num_slots=num_roots, num_keys=128.0)


def test_an_idle_device_drafts_and_a_busy_one_does_not() -> None:
    trees = [chain(0.8, 0.8, 0.8)]
    for table, num_states in ((linear(1.0, 1e-6), 3), (linear(1e-6, 1.0), 0)):
        found = pool(trees)
        assert (
            best_spending(Prices.of(table, load(1)), found.mass, found.cost).num_states
            == num_states
        )


def test_the_curve_is_scanned_beyond_a_step() -> None:
    """The first slot beyond 2 costs as much as all up to 6: one more is no gain, four are."""
    table = LatencyTable(slots=(2, 3, 6), num_keys=(1,), forward_s=((1.0, 1.8, 1.8),))
    masses, costs = np.full(4, 0.9), np.ones(4, dtype=np.int64)
    prices = Prices.of(table, load(2))
    choice = best_spending(prices, masses, costs)
    assert choice.num_states == 4
    assert best_spending(prices, masses[:1], costs[:1]).num_states == 0


def test_the_pool_takes_the_best_of_all_samples_and_no_child_before_its_parent() -> None:
    found = pool([chain(0.5, 0.9), chain(0.9, 0.9, 0.9)])
    assert found.tree == [1, 1, 1, 0, 0]
    assert list(found.mass) == sorted(found.mass, reverse=True)
    for number in (0, 1):
        depths = [len(key) for at, key in zip(found.tree, found.key, strict=True) if at == number]
        assert depths == sorted(depths)


def test_a_crossing_costs_two_slots_and_stands_behind_what_is_as_probable() -> None:
    found = pool([chain(0.9, 0.9, num_masked=2), chain(0.9, 0.6)])
    crossing = [
        len(key) == 2 and tree == 0 for tree, key in zip(found.tree, found.key, strict=True)
    ]
    assert found.cost.tolist() == [2.0 if is_crossing else 1.0 for is_crossing in crossing]
    assert crossing == [False, False, False, True]  # 0.81 over two slots, behind 0.54


@given(
    weights=st.lists(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), max_size=5),
    fixed=st.floats(1e-3, 10.0),
    each=st.floats(1e-3, 10.0),
)
@settings(deadline=None, max_examples=60)
def test_no_other_prefix_of_the_pool_is_better(
    weights: list[list[float]], fixed: float, each: float
) -> None:
    found = pool([chain(*of_one) for of_one in weights])
    now, table = load(max(1, len(weights))), linear(fixed, each)
    best = best_spending(Prices.of(table, now), found.mass, found.cost)
    for number in range(len(found.mass) + 1):
        slots = now.num_slots + found.cost[:number].sum()
        rate = (now.num_roots + found.mass[:number].sum()) / table.forward(slots, 128.0)
        assert rate <= best.rate * (1 + 1e-9)


def rounds(budget: Budget, num: int, trees: Sequence[DraftTree]) -> int:
    """In how many of so many rounds the drafter is asked."""
    num_asked = 0
    for _ in range(num):
        if budget.begin(load(len(trees))):
            num_asked += 1
            assert budget.another_wave(trees, [1.0] * len(trees))
            budget.choose(trees)
    return num_asked


def test_a_drafter_that_does_not_pay_is_asked_every_64_rounds() -> None:
    budget = Budget(linear(1e-3, 1.0, draft=0.1))
    trees = [chain(0.9)] * 8
    assert rounds(budget, 1 + 3 * 64, trees) == 4
    assert not budget.is_on


def test_one_that_pays_again_is_asked_in_every_round() -> None:
    budget = Budget(linear(10.0, 1e-3, draft=1.0))
    assert rounds(budget, 10, [chain(0.01)] * 8) == 1
    assert rounds(budget, 64, [chain(0.9)] * 8) < 64
    assert rounds(budget, 20, [chain(0.9)] * 8) == 20


def test_a_batch_that_drains_is_probed_at_once() -> None:
    budget = Budget(linear(8.0, 1.0, draft=0.01))
    assert rounds(budget, 10, [chain(0.7)] * 64) < 10
    assert rounds(budget, 20, [chain(0.7)] * 8) == 20
    assert budget.is_on


def test_a_drafters_own_time_counts() -> None:
    trees = [chain(0.7)] * 8
    cheap, dear = Budget(linear(8.0, 0.1)), Budget(linear(8.0, 0.1, draft=9.0))
    assert rounds(cheap, 10, trees) == 10
    assert rounds(dear, 10, trees) == 1


def test_promises_that_do_not_come_true_are_worth_less() -> None:
    budget, tree = Budget(linear(1.0, 0.1)), chain(0.8)
    for _ in range(400):
        budget.learn(0, tree, ROOT, ((3, 3),), 1.0)
    assert budget.correction(0) < 0.1
    assert budget.correction(1) > budget.correction(0)  # the sample's own record stands on top
    budget.joined(0)
    assert budget.correction(0) == budget.correction(1)
    for _ in range(2000):
        budget.learn(1, tree, ROOT, ((0, 7),), 1.0)
    assert 1.0 < budget.correction(1) < 1.5


def test_forwards_that_take_longer_than_the_table_says_cost_more() -> None:
    budget, trees = Budget(linear(8.0, 0.1)), [chain(0.6)]
    budget.begin(load(1))
    assert len(budget.choose(trees)[0]) == 1
    for _ in range(50):
        budget.observe(1, 128.0, 8.1)
        budget.observe(2, 128.0, 16.4)
    budget.begin(load(1))
    assert budget.choose(trees) == [[]]


@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("table", [linear(1.0, 1e-3), linear(1e-3, 1.0), linear(4.0, 1.0)])
@pytest.mark.parametrize("name", ["random", "adversarial", "oracle", "ranking", "order"])
def test_auto_changes_no_output(name: str, table: LatencyTable, unmasking: Unmasking) -> None:
    width = 4
    target = IntegerTarget(block_length=width, seed=3, vocab_size=NUM_LETTERS + 4)
    requests = [
        replace(request, params=replace(request.params, unmasking=unmasking))
        for request in mixed_requests(num=7, max_new_tokens=14, lengths=(0, 3, 4, 5, 9, 1, 2))
    ]
    alone = {
        done.sample_id: done
        for done in decode_all(target, None, EngineSettings(max_sequences=1), requests)
    }
    traces = {r.noise_key: trace_of(alone[r.sample_id], width=width) for r in requests}
    drafter = make_drafter(name, target, traces, seed=1)
    auto = EngineSettings(max_sequences=3, budget="auto")
    found = decode_all(target, drafter, auto, requests, latency=table)
    assert all(same_sample(done, alone[done.sample_id]) for done in found)
    num_drafted = sum(done.stats.num_drafted for done in found)
    if table.forward_s[0][-1] < 2.0:
        assert num_drafted > 0
    if name == "oracle" and unmasking == "single" and num_drafted:
        assert sum(d.stats.num_forwards for d in found) < sum(
            d.num_draft_free_forwards for d in found
        )


def test_auto_needs_a_table_and_says_so() -> None:
    target = IntegerTarget(block_length=4, seed=3)
    drafter = make_drafter("ranking", target, {}, seed=1)
    with pytest.raises(ValueError, match="latency table"):
        decode_all(target, drafter, EngineSettings(budget="auto"), [])


def test_a_table_survives_its_file() -> None:
    table = linear(1.0, 0.5, draft=0.25)
    assert LatencyTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [2, 1]}, "slots must ascend"),
        ({"slots": []}, "slots must ascend"),
        ({"forward_s": [[1.0]]}, "forward_s wants 7 entries, got 1"),
        ({"forward_s": []}, "forward_s wants 1 rows"),
        ({"forward_s": [[0.0] * 7]}, "more than no time"),
        ({"draft_s": [1.0, -1.0]}, "draft_s holds what is no time"),
        ({"slot": [1]}, "unknown key 'slot'"),
        ({"slots": 3}, "not a latency table"),
    ],
)
def test_a_table_that_is_none_is_named(change: dict[str, object], message: str) -> None:
    tree = {**json.loads(linear(1.0, 0.5).to_json()), **change}
    with pytest.raises(ValueError, match=r"table\.json: not a latency table") as caught:
        LatencyTable.from_json(json.dumps(tree), "table.json")
    assert message in str(caught.value)


def test_between_entries_there_is_a_line_and_beyond_them_the_last_one() -> None:
    table = LatencyTable(
        slots=(1, 4), num_keys=(100, 300), forward_s=((1.0, 4.0), (2.0, 8.0)), states=(1,)
    )
    assert table.forward(2, 100) == pytest.approx(2.0)
    assert table.forward(2, 200) == pytest.approx(3.0)
    assert table.forward(8, 100) == pytest.approx(8.0)


def test_a_device_is_measured() -> None:
    target = IntegerTarget(block_length=4, seed=3)
    drafter = make_drafter("ranking", target, {}, seed=1)
    table = measure_latency(target, drafter, max_slots=6, at_most_s=0.05, num_keys=(4, 8))
    assert table.num_keys == (4, 8)
    assert set(table.slots) <= {1, 2, 3, 4, 6}
    assert table.draft(1) > 0.0
    assert table.visit(2, 1.0) > 0.0
    rising = np.diff(table.forwards(np.array(table.slots, dtype=float), 4.0))
    assert bool((rising >= 0.0).all())
    assert not measure_latency(target, None, max_slots=2, at_most_s=0.05, num_keys=(4,)).queries
    assert torch.get_num_threads() == 1
