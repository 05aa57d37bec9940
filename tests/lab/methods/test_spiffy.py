"""Spiffy's draft graph: chosen connected, within its budget, and drafted as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spot_batch.drafters.distributions import MASKED, SINCE, Queries, StaleStore
from spot_batch.lab.methods.spiffy import (
    Formula,
    SpiffyDrafter,
    SpiffyGraph,
    load_graphs,
    parents,
    save_graphs,
)

COUNTS: dict[Formula, int] = {
    ((0, 0),): 60,
    ((1, 0),): 25,
    ((0, 1),): 5,
    ((0, 0), (1, 0)): 50,
    ((0, 0), (2, 0)): 12,
    ((0, 0), (1, 0), (2, 0)): 40,
    ((1, 0), (2, 0)): 3,
}


def graph(**given: object) -> SpiffyGraph:
    values = {
        "block_length": 4,
        "temperature": 0.0,
        "budget": 3,
        "num_states": 100,
        "counts": COUNTS,
        **given,
    }
    return SpiffyGraph(**values)  # type: ignore[arg-type]


STALE = [[0.9, 0.1], [0.8, 0.1], [0.3, 0.3], [0.2, 0.1]]


def test_by_count_the_most_frequent_formulas_are_drafted() -> None:
    chosen = graph(selection="count").chosen(num_masked=4, stale=STALE)
    assert chosen == {((0, 0),), ((0, 0), (1, 0)), ((0, 0), (1, 0), (2, 0))}


def test_the_published_score_adds_the_parents_counts() -> None:
    order = graph(selection="accumulated").order
    # First formulas have the root alone as parent: 100 more each.
    assert order[0] == ((0, 0),)
    assert set(order[:3]) == {((0, 0),), ((0, 0), (1, 0)), ((1, 0),)}


def test_a_rank_that_is_not_there_is_not_drafted() -> None:
    chosen = graph(selection="count").chosen(num_masked=2, stale=STALE)
    assert ((0, 0), (1, 0), (2, 0)) not in chosen
    assert all(at < 2 for formula in chosen for at, _ in formula)


@pytest.mark.parametrize("selection", ["count", "accumulated"])
@pytest.mark.parametrize("widening", [1, 2])
def test_what_is_drafted_is_connected(selection: str, widening: int) -> None:
    for budget in range(1, 7):
        chosen = graph(selection=selection, widening=widening, budget=budget).chosen(
            num_masked=4, stale=STALE
        )
        assert len(chosen) == min(budget, len(COUNTS))
        for formula in chosen:
            assert len(formula) == 1 or any(parent in chosen for parent in parents(formula))


def test_pruning_leaves_the_doubtful_token_out() -> None:
    wide = graph(selection="count", widening=2, budget=3)
    doubtful = [[0.9, 0.1], [0.01, 0.005], [0.8, 0.1], [0.2, 0.1]]
    assert ((0, 0), (2, 0)) in wide.chosen(num_masked=4, stale=doubtful)
    assert ((1, 0),) not in wide.chosen(num_masked=4, stale=doubtful)


def test_formulas_become_positions_and_tokens_by_rank() -> None:
    logits = torch.zeros(1, 4, 9)
    # Position 2 is surest, then 0, then 3; position 1 is committed already.
    for position, token, height in ((0, 5, 4.0), (2, 7, 9.0), (3, 1, 2.0), (1, 2, 20.0)):
        logits[0, position, token] = height
    logits[0, 2, 8] = 6.0
    stale = StaleStore(1, 4, 9, torch.device("cpu"))
    zero = torch.tensor([0])
    stale.put(zero, logits, torch.ones(1, 4, dtype=torch.bool), zero)

    def ask(status: list[int], guessed: list[int]) -> set[tuple[int, int]]:
        found = drafter.propose(
            stale,
            Queries(
                row=zero,
                status=torch.tensor([status]),
                guessed=torch.tensor([guessed]),
                start=zero,
                num_committed=torch.tensor([sum(one == SINCE for one in status)]),
                noise_key=zero,
                temperature=torch.tensor([0.0]),
                top_p=torch.tensor([1.0]),
                top_k=zero,
            ),
            "position_step",
        )
        return {
            (at, token)
            for at, token, weight in zip(
                found.position[0].tolist(),
                found.token[0].tolist(),
                found.weight[0].tolist(),
                strict=True,
            )
            if weight > 0
        }

    drafter = SpiffyDrafter(graph(selection="count", budget=7))
    root = [MASKED, SINCE, MASKED, MASKED]
    assert ask(root, [-1] * 4) == {(2, 7), (0, 5), (2, 8)}
    assert ask([MASKED, SINCE, SINCE, MASKED], [-1, -1, 7, -1]) == {(0, 5), (3, 1)}
    assert ask([SINCE, SINCE, SINCE, MASKED], [5, -1, 7, -1]) == {(3, 1)}
    assert ask([MASKED, SINCE, SINCE, MASKED], [-1, -1, 8, -1]) == set()


def test_a_file_of_graphs_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    save_graphs(path, [graph(), graph(temperature=1.0, budget=5)], {"target": "t"})
    found = load_graphs(path, block_length=4)
    assert found == {(0.0, 3): graph(), (1.0, 5): graph(temperature=1.0, budget=5)}
    with pytest.raises(ValueError, match="calibrated at block length 4, the target's is 8"):
        load_graphs(path, block_length=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a file of spiffy graphs"),
        ('{"kind": "spiffy"}', "not a file of spiffy graphs"),
        ('{"kind": "spiffy", "graphs": []}', "holds no graph"),
        ('{"kind": "spiffy", "graphs": [{"counts": [[1, 2]]}]}', "not a file of spiffy graphs"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "graphs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"graphs.json: {message}"):
        load_graphs(path, block_length=4)


def test_an_unknown_choice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graphs.json"
    save_graphs(path, [graph()], {})
    document = json.loads(path.read_text())
    document["graphs"][0]["ranks"] = "odd"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="unknown ranks"):
        load_graphs(path, block_length=4)
