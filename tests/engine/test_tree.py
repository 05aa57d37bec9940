"""The draft tree: masses, budget, floor and crossing; and that no tree changes what is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_batch.drafters.base import Proposals
from spot_batch.drafters.distributions import Queries, StaleStore
from spot_batch.engine.engine import EngineSettings
from spot_batch.engine.tree import ROOT, DraftTree, Edge, Key
from spot_batch.records.sampling import NoiseRule, Request, SamplingParams
from tests.exact.harness import decode_all
from tests.exact.mock_target import IntegerTarget
from tests.exact.reference import decode

Known = Callable[[Key], Mapping[Key, float]]
"""A drafter written down: the commits that may follow a state, and how probable they are."""


def grown(known: Known, tree: DraftTree) -> DraftTree:
    """Grow a tree to its end, wave by wave, as the engine does."""
    while asked := tree.frontier():
        for key in asked:
            tree.expand(key, [Edge(commits, weight) for commits, weight in known(key).items()])
        tree.select()
    return tree


def written_down(edges: Mapping[Key, Mapping[Key, float]]) -> Known:
    return lambda key: edges.get(key, {})


def independent(weights: Mapping[int, float], *, token: int = 7) -> Known:
    """Positions are committed in any order, each in proportion to its weight: states merge."""

    def known(key: Key) -> Mapping[Key, float]:
        left = {at: weight for at, weight in weights.items() if at not in dict(key)}
        total = sum(left.values())
        return {((at, token),): weight / total for at, weight in left.items()}

    return known


def true_masses(known: Known, chosen: set[Key]) -> dict[Key, float]:
    """P(the trajectory passes through a state and through chosen states only before it)."""
    masses = {ROOT: 1.0}
    for key in sorted(chosen - {ROOT}, key=len):
        masses[key] = sum(
            masses[parent] * weight
            for parent in masses
            for commits, weight in known(parent).items()
            if tuple(sorted(parent + commits)) == key
        )
    return masses


A, B, C, D = (0, 7), (1, 7), (2, 7), (3, 7)


def test_states_that_two_orders_reach_add_their_masses() -> None:
    known = written_down(
        {
            ROOT: {(A,): 0.5, (B,): 0.4},
            (A,): {(B,): 0.6},
            (B,): {(A,): 0.5, (C,): 0.3},
        }
    )
    tree = grown(known, DraftTree(num_masked=4, budget=4, gamma=0.0, crossing=False))
    assert tree.selected == pytest.approx(
        {ROOT: 1.0, (A,): 0.5, (B,): 0.4, (A, B): 0.5 * 0.6 + 0.4 * 0.5, (B, C): 0.12}
    )
    # With room for three, the merged state is worth more than either of its ways.
    tree = grown(known, DraftTree(num_masked=4, budget=3, gamma=0.0, crossing=False))
    assert list(tree.drafted()) == [(A,), (B,), (A, B)]


def test_one_guess_given_twice_counts_twice_and_two_tokens_of_one_position_are_two_states() -> None:
    other = (0, 8)
    tree = DraftTree(num_masked=3, budget=5, gamma=0.0, crossing=False)
    (root,) = tree.frontier()
    tree.expand(root, [Edge((A,), 0.3), Edge((other,), 0.25), Edge((A,), 0.2)])
    tree.select()
    assert tree.selected == pytest.approx({ROOT: 1.0, (A,): 0.5, (other,): 0.25})


@pytest.mark.parametrize("gamma", [0.0, 0.05, 0.1, 0.3, 0.9])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 40])
def test_budget_and_floor_are_kept(budget: int, gamma: float) -> None:
    known = independent({0: 8.0, 1: 4.0, 2: 2.0, 3: 1.0})
    tree = grown(known, DraftTree(num_masked=4, budget=budget, gamma=gamma, crossing=True))
    drafted = tree.drafted()
    assert sum(tree.cost(key) for key in drafted) <= budget
    masses = true_masses(known, set(tree.selected))
    assert tree.selected == pytest.approx(masses)
    assert all(mass >= gamma for mass in tree.selected.values())
    if budget == 40:
        everything = [
            tuple((at, 7) for at in subset)
            for size in range(1, 5)
            for subset in itertools.combinations(range(4), size)
        ]
        worth = true_masses(known, {ROOT, *everything})
        # All states whose own mass, without the dropped ones, still reaches the floor.
        assert {key for key in everything if masses.get(key, 0.0) >= gamma} == set(drafted)
        assert gamma > 0 or set(drafted) == set(everything)
        assert all(masses[key] <= worth[key] + 1e-12 for key in drafted)


def test_a_state_that_completes_the_block_costs_two_slots_and_is_nothing_without_crossing() -> None:
    chain = written_down({ROOT: {(A,): 0.9}, (A,): {(B,): 0.9}, (A, B): {(C,): 0.9}})
    keys = [(A,), (A, B), (A, B, C)]
    for budget, expected in ((1, 1), (2, 2), (3, 2), (4, 3), (9, 3)):
        tree = grown(chain, DraftTree(num_masked=3, budget=budget, gamma=0.0, crossing=True))
        assert list(tree.drafted()) == keys[:expected]
    for budget in (2, 3, 4, 9):
        tree = grown(chain, DraftTree(num_masked=3, budget=budget, gamma=0.0, crossing=False))
        assert list(tree.drafted()) == keys[:2]
    last = DraftTree(num_masked=1, budget=5, gamma=0.0, crossing=True)
    assert list(grown(written_down({ROOT: {(A,): 0.9}}), last).drafted()) == [(A,)]


def test_a_crossing_too_dear_makes_room_for_the_next_best() -> None:
    known = written_down({ROOT: {(A,): 0.5, (B,): 0.4}, (A,): {(B,): 0.9}})
    tree = grown(known, DraftTree(num_masked=2, budget=2, gamma=0.0, crossing=True))
    assert list(tree.drafted()) == [(A,), (B,)]  # (A, B) has 0.45 and needs two of one left


def test_growth_ends_with_the_budget_and_asks_about_no_state_twice() -> None:
    asked: list[Key] = []

    def known(key: Key) -> Mapping[Key, float]:
        asked.append(key)
        return {((len(key), 7),): 1.0}

    tree = grown(known, DraftTree(num_masked=30, budget=20, gamma=0.0, crossing=True))
    assert len(tree.drafted()) == 20
    assert asked == [tuple((at, 7) for at in range(depth)) for depth in range(20)]


random_trees = st.recursive(
    st.just({}),
    lambda below: st.dictionaries(
        st.integers(0, 5), st.tuples(st.floats(0.01, 1.0), below), min_size=1, max_size=3
    ),
    max_leaves=7,
)


def as_known(tree: Mapping) -> Known:
    """Nested guesses as a drafter; a token tells by which way a state was reached: none merge."""
    edges: dict[Key, dict[Key, float]] = {}

    def walk(below: Mapping, key: Key, name: int) -> None:
        total = sum(weight for weight, _ in below.values()) * 1.05
        for number, (label, (weight, children)) in enumerate(sorted(below.items())):
            own = name * 4 + number + 1
            commit = (len(key), own * 8 + label)
            edges.setdefault(key, {})[(commit,)] = weight / total
            walk(children, (*key, commit), own)

    walk(tree, ROOT, 0)
    return written_down(edges)


@given(tree=random_trees, budget=st.integers(0, 6))
@settings(deadline=None, max_examples=150)
def test_best_first_is_the_best_choice_of_so_many_states(tree: Mapping, budget: int) -> None:
    """Against all subsets that hang together: their masses add up to the commits expected."""
    known = as_known(tree)
    everything, waiting = [], [ROOT]
    while waiting:
        key = waiting.pop()
        children = [tuple(sorted(key + commits)) for commits in known(key)]
        everything += children
        waiting += children
    masses = true_masses(known, set(everything))
    best = max(
        sum(masses[key] for key in subset)
        for size in range(min(budget, len(everything)) + 1)
        for subset in itertools.combinations(everything, size)
        if all(key[:-1] == ROOT or key[:-1] in subset for key in subset)
    )
    ours = grown(known, DraftTree(num_masked=99, budget=budget, gamma=0.0, crossing=False))
    assert sum(ours.selected.values()) - 1.0 == pytest.approx(best)
    assert len(ours.drafted()) == min(budget, len(everything))


def greedy_by_the_book(known: Known, *, budget: int, num_masked: int) -> list[Key]:
    """Best-first growth: take the candidate of largest mass, recompute all masses, again."""
    chosen: set[Key] = {ROOT}
    order: list[Key] = []
    while len(order) < budget:
        children = {
            tuple(sorted(key + commits))
            for key in chosen
            for commits in known(key)
            if len(key) + 1 < num_masked
        } - chosen
        masses = {key: true_masses(known, {*chosen, key})[key] for key in children}
        if not masses:
            break
        best = max(masses.items(), key=lambda item: (item[1], -len(item[0]), item[0]))[0]
        chosen.add(best)
        order.append(best)
    return order


@given(
    weights=st.lists(st.floats(0.05, 1.0), min_size=3, max_size=5),
    budget=st.integers(1, 9),
    tilt=st.floats(0.0, 3.0),
)
@settings(deadline=None, max_examples=60)
def test_where_states_merge_growth_is_worth_as_much_as_by_the_book(
    weights: list[float], budget: int, tilt: float
) -> None:
    """But for ties, which the two may break apart."""
    num_masked = len(weights)

    def known(key: Key) -> Mapping[Key, float]:
        left = [at for at in range(num_masked) if at not in dict(key)]
        raw = {at: weights[at] ** (1 + tilt * ((at + len(key)) % 2)) for at in left}
        return {((at, 7),): 0.98 * weight / sum(raw.values()) for at, weight in raw.items()}

    ours = grown(known, DraftTree(num_masked=num_masked, budget=budget, gamma=0.0, crossing=False))
    book = greedy_by_the_book(known, budget=budget, num_masked=num_masked)
    assert ours.selected == pytest.approx(true_masses(known, set(ours.selected)))
    by_the_book = sum(true_masses(known, {ROOT, *book}).values())
    assert sum(ours.selected.values()) >= 0.97 * by_the_book
    assert len(ours.drafted()) == len(book)


class DrawnDrafter:
    """Guesses that hypothesis has drawn: any positions, any tokens, any weights."""

    name = "drawn"

    def __init__(self, edges: list[tuple[int, int, float]], num_edges: int) -> None:
        self._edges, self._num_edges = itertools.cycle(edges), num_edges

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        drawn = [
            [next(self._edges) for _ in range(self._num_edges)] for _ in range(len(queries.row))
        ]
        width = queries.status.shape[1]
        position = torch.tensor([[edge[0] % width for edge in row] for row in drawn])
        token = torch.tensor([[edge[1] for edge in row] for row in drawn])
        return Proposals(
            position, token, torch.tensor([[edge[2] for edge in row] for row in drawn])
        )


VOCAB = 4  # so few that guesses hit


@given(
    data=st.data(),
    edges=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, VOCAB - 1),
            st.floats(allow_nan=True, allow_infinity=True, width=32),
        ),
        min_size=1,
        max_size=40,
    ),
    real=st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_no_tree_and_no_logits_change_what_the_plain_decoder_writes(
    data: st.DataObject, edges: list[tuple[int, int, float]], real: bool
) -> None:
    width = data.draw(st.integers(1, 5))
    target = IntegerTarget(
        block_length=width,
        vocab_size=VOCAB + 1,
        seed=data.draw(st.integers(0, 2**32)),
        ties=not real,
        scale=3.0 if real else None,
    )
    params = SamplingParams(
        max_new_tokens=data.draw(st.integers(1, 9)),
        temperature=data.draw(st.sampled_from((0.0, 1.0))),
        unmasking=data.draw(st.sampled_from(("single", "threshold"))),
        threshold=0.6,
        confidence=data.draw(st.sampled_from(("max", "sampled_filtered"))),
        top_p=data.draw(st.sampled_from((1.0, 0.8))),
        stop_ids=(0,),
    )
    requests = [
        Request(
            sample_id=index,
            prompt_ids=tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=7))),
            noise_key=data.draw(st.integers(0, 2**64 - 1)),
            params=params,
        )
        for index in range(2)
    ]
    drafter = DrawnDrafter(edges, num_edges=data.draw(st.integers(1, 7)))
    engine_settings = EngineSettings(
        max_sequences=data.draw(st.integers(1, 2)),
        budget=data.draw(st.integers(1, 12)),
        gamma=data.draw(st.sampled_from((0.0, 0.2))),
        crossing=data.draw(st.booleans()),
        max_slots=data.draw(st.sampled_from((2, 1024))),
    )
    alone = {
        done.sample_id: done
        for done in decode_all(target, None, EngineSettings(max_sequences=1), requests)
    }
    for done in decode_all(target, drafter, engine_settings, requests):
        request = requests[done.sample_id]
        expected = decode(
            target.logits_of,
            prompt=request.prompt_ids,
            params=params,
            noise_key=request.noise_key,
            block_length=width,
            mask_id=target.mask_id,
        )
        plain = alone[done.sample_id]
        assert (done.token_ids, done.commit_step) == (plain.token_ids, plain.commit_step)
        assert done.finish_reason == plain.finish_reason
        if not expected.near_tie:
            assert (done.token_ids, done.commit_step) == (
                expected.token_ids,
                expected.commit_step,
            )
            assert done.finish_reason == expected.finish_reason
            assert done.num_draft_free_forwards == expected.num_forwards
