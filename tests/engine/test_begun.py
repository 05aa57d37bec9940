"""A sample goes on from its whole blocks, in another engine, to the same end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.records.results import Begun, Completion
from tests.exact.harness import decode_all, mixed_requests, same_sample
from tests.tiny_models import write_target

pytestmark = pytest.mark.exact


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> BlockTarget:
    folder: Path = write_target(tmp_path_factory.mktemp("small") / "target", scale=2.0)
    return load_target(resolve_model(str(folder)))


@pytest.mark.parametrize("budget", [0, 4])
def test_a_sample_goes_on_from_its_blocks_to_the_same_end(target: BlockTarget, budget: int) -> None:
    """Every snapshot of every sample, with and without drafts before and after it."""
    requests = mixed_requests(num=6, max_new_tokens=40, lengths=[3, 8, 21, 1, 16, 9])
    settings = EngineSettings(max_sequences=4, budget=budget)
    want = {done.sample_id: done for done in decode_all(target, None, settings, requests)}
    engine = Engine(target, RankingDrafter(), settings)
    for request in requests:
        engine.add(request)
    snapshots: set[tuple[int, Begun]] = set()
    while engine.has_work:
        engine.step()
        snapshots |= set(engine.begun().items())
    lengths = {(number, len(begun.token_ids)): begun for number, begun in snapshots}
    assert len(lengths) > len(requests)
    by_id = {request.sample_id: request for request in requests}
    resumed = Engine(target, RankingDrafter(), settings)
    for (number, _), begun in lengths.items():
        resumed.add(replace(by_id[number], begun=begun))
    done: list[Completion] = []
    while resumed.has_work:
        done += resumed.step()
    assert len(done) == len(lengths)
    for completion in done:
        assert same_sample(completion, want[completion.sample_id])
