"""What an engine says of its rounds."""

from __future__ import annotations

import pytest

from spot_batch.drafters.distributions import StaleStore
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from tests.exact.harness import mixed_requests
from tests.exact.mock_target import IntegerTarget
from tests.slots import NUM_LETTERS


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_rounds_count_samples_and_the_slots_of_drafts(budget: int) -> None:
    target = IntegerTarget(block_length=4, seed=5, vocab_size=NUM_LETTERS + 4)
    engine = Engine(target, RankingDrafter(), EngineSettings(max_sequences=3, budget=budget))
    for request in mixed_requests(num=5, max_new_tokens=14, lengths=(0, 3, 4, 5, 9)):
        engine.add(request)
    num_rounds = num_forwards = 0
    while engine.has_work:
        num_forwards += sum(done.stats.num_forwards for done in engine.step())
        num_rounds += 1
    rounds = engine.rounds
    assert rounds.num_rounds == num_rounds
    assert rounds.num_samples == num_forwards
    if budget:
        assert 0 < rounds.budget <= budget
        assert 0 < rounds.drafting_share <= 1
    else:
        assert rounds.budget == rounds.drafting_share == 0


def test_without_a_budget_nothing_is_kept_for_a_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    put = []
    monkeypatch.setattr(StaleStore, "put", lambda *given: put.append(given))
    for drafter, budget in ((RankingDrafter(), 0), (None, 4), (RankingDrafter(), 4)):
        target = IntegerTarget(block_length=4, seed=5, vocab_size=NUM_LETTERS + 4)
        engine = Engine(target, drafter, EngineSettings(max_sequences=3, budget=budget))
        engine.add(mixed_requests(num=1, max_new_tokens=6, lengths=(0,))[0])
        engine.step()
        assert bool(put) == (drafter is not None and budget > 0)
