"""What drafters propose from stale distributions: positions, tokens, weights."""

from __future__ import annotations

import pytest
import torch

from spot_batch.drafters.base import best_edges
from spot_batch.drafters.distributions import (
    COMMITTED,
    MASKED,
    SINCE,
    Queries,
    StaleStore,
    candidates,
)
from spot_batch.drafters.order import OrderConfig, OrderDrafter, OrderModel
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.noise import gumbel

WIDTH, VOCAB = 4, 50


def stale_of(logits: torch.Tensor) -> StaleStore:
    """One sample's store, all positions masked when it was taken."""
    store = StaleStore(1, WIDTH, VOCAB, torch.device("cpu"))
    zero = torch.tensor([0])
    store.put(zero, logits[None], torch.ones(1, WIDTH, dtype=torch.bool), zero)
    return store


def query(status: list[int], *, temperature: float = 0.0, **given: float) -> Queries:
    return Queries(
        row=torch.tensor([0]),
        status=torch.tensor([status]),
        guessed=torch.full((1, len(status)), -1),
        start=torch.tensor([8]),
        num_committed=torch.tensor([sum(one == SINCE for one in status)]),
        noise_key=torch.tensor([77]),
        temperature=torch.tensor([temperature]),
        top_p=torch.tensor([given.get("top_p", 1.0)]),
        top_k=torch.tensor([int(given.get("top_k", 0))]),
    )


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(3))


def test_cold_candidates_are_the_stale_argmax_and_its_runner_up(logits: torch.Tensor) -> None:
    found = candidates(stale_of(logits), query([MASKED] * WIDTH), "position_step")
    two = logits.topk(2, dim=1).indices
    assert torch.equal(found.token[0], two[:, 0])
    assert torch.equal(found.second[0], two[:, 1])


def test_the_log_odds_of_a_cold_candidate_are_those_of_its_probability(
    logits: torch.Tensor,
) -> None:
    found = candidates(stale_of(logits), query([MASKED] * WIDTH), "position_step")
    top = logits.softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(found.log_odds[0], torch.logit(top), rtol=1e-3, atol=1e-3)


def test_hot_candidates_share_the_targets_noise_at_the_step_of_the_query(
    logits: torch.Tensor,
) -> None:
    asked = query([SINCE, MASKED, MASKED, MASKED], temperature=1.0)
    found = candidates(stale_of(logits), asked, "position_step")
    for position in range(1, WIDTH):
        noise = gumbel(
            torch.tensor(77),
            position=torch.tensor(8 + position),
            step=torch.tensor(1),
            token=torch.arange(VOCAB),
        )
        likely = logits[position].topk(32).indices
        best = likely[(logits[position] + noise)[likely].argmax()]
        assert found.token[0, position] == best


def test_a_filter_keeps_hot_candidates_within_it(logits: torch.Tensor) -> None:
    asked = query([MASKED] * WIDTH, temperature=2.0, top_k=1)
    found = candidates(stale_of(logits), asked, "position_step")
    assert torch.equal(found.token[0], logits.argmax(dim=1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafter",
    [
        RankingDrafter(),
        OrderDrafter(
            OrderModel(OrderConfig(block_length=WIDTH, num_layers=1, hidden_size=16, num_heads=2))
        ),
    ],
    ids=["ranking", "order"],
)
def test_weights_are_a_sub_distribution_over_masked_positions(
    drafter: RankingDrafter | OrderDrafter, temperature: float, logits: torch.Tensor
) -> None:
    asked = query([COMMITTED, SINCE, MASKED, MASKED], temperature=temperature)
    found = drafter.propose(stale_of(logits), asked, "position_step")
    offered = found.position[0][found.weight[0] > 0].tolist()
    assert set(offered) == {2, 3}
    assert 0.0 < float(found.weight.sum()) <= 1.0 + 1e-6
    assert bool((found.weight[0].diff() <= 0).all()), "not the most probable first"


def test_ranking_prefers_the_more_confident_position() -> None:
    logits = torch.zeros(WIDTH, VOCAB)
    logits[2, 5], logits[1, 6] = 9.0, 4.0
    found = RankingDrafter().propose(stale_of(logits), query([MASKED] * WIDTH), "position_step")
    assert (int(found.position[0, 0]), int(found.token[0, 0])) == (2, 5)
    assert int(found.position[0, 1]) == 1


def offered(second: torch.Tensor | None) -> list[tuple[int, int, float]]:
    """Edges of two positions of equal weight, the tokens 7 and 8, then 9 at the second."""
    logits = torch.full((WIDTH, VOCAB), -30.0)
    logits[0, 7] = 30.0
    logits[1, 8] = logits[1, 9] = 30.0
    logits[1, 8] += 1e-3
    found = candidates(stale_of(logits), query([MASKED] * WIDTH), "position_step")
    edges = best_edges(torch.tensor([[0.4, 0.3, 0.0, 0.0]]), found, second=second, num_edges=3)
    return [
        (int(position), int(token), round(float(weight), 2))
        for position, token, weight in zip(
            edges.position[0], edges.token[0], edges.weight[0], strict=True
        )
        if weight > 0
    ]


def test_the_most_probable_guesses_come_first() -> None:
    assert offered(None) == [(0, 7, 0.4), (1, 8, 0.3)]


def test_a_runner_up_is_offered_by_its_own_weight() -> None:
    second = torch.tensor([[0.0, 0.2, 0.0, 0.0]])
    assert offered(second) == [(0, 7, 0.4), (1, 8, 0.3), (1, 9, 0.2)]
    assert offered(3 * second) == [(1, 9, 0.6), (0, 7, 0.4), (1, 8, 0.3)]
