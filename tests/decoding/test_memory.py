"""Where memory ends: smaller forwards, then fewer samples in flight, and the same outputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch

from spot_batch.decoding import EngineSettings
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.records import Completion, Request
from spot_batch.targets.slots import Hidden, PrefixCache, SlotBatch
from tests.exact.harness import decode_all, mixed_requests, same_sample
from tests.exact.mock_target import IntegerCache, IntegerTarget
from tests.slots import NUM_LETTERS

WIDTH = 4
MESSAGE = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried"


class SmallCache(IntegerCache):
    """Holds so many positions over all rows, and says what a device says beyond."""

    def __init__(self, num_rows: int, num_positions: int, holds: int) -> None:
        super().__init__(num_rows, num_positions, WIDTH)
        self._holds = holds

    def ensure(self, num_positions: int) -> None:
        if num_positions * len(self.stored) > self._holds:
            raise RuntimeError(MESSAGE)
        super().ensure(num_positions)


class SmallDevice(IntegerTarget):
    """Forwards of so many slots fit, and a cache of so many positions."""

    def __init__(self, *, slots: int, positions: int, error: BaseException) -> None:
        super().__init__(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
        self._slots, self._positions, self._error = slots, positions, error
        self.num_refused = 0

    def allocate(self, num_rows: int, num_positions: int) -> IntegerCache:
        return SmallCache(num_rows, num_positions, self._positions)

    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        if len(slots) > self._slots:
            self.num_refused += 1
            raise self._error
        return super().forward(slots, cache)


def requests() -> list[Request]:
    return mixed_requests(num=8, max_new_tokens=14, lengths=(0, 3, 4, 5, 9, 1, 2, 20))


def plain() -> dict[int, Completion]:
    target = IntegerTarget(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
    alone = decode_all(target, None, EngineSettings(max_sequences=1), requests())
    return {done.sample_id: done for done in alone}


def check(found: Sequence[Completion]) -> None:
    expected = plain()
    assert all(same_sample(done, expected[done.sample_id]) for done in found)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(MESSAGE), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_forward_that_does_not_fit_is_run_in_halves(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    target = SmallDevice(slots=5, positions=10_000, error=error)
    settings = EngineSettings(max_sequences=6, budget=4)
    with caplog.at_level(logging.WARNING):
        check(decode_all(target, RankingDrafter(), settings, requests()))
    assert 1 <= target.num_refused <= 4
    assert "slots a forward now" in caplog.text


def test_prefixes_that_do_not_fit_let_fewer_samples_fly(caplog: pytest.LogCaptureFixture) -> None:
    target = SmallDevice(slots=1000, positions=80, error=MemoryError())
    with caplog.at_level(logging.WARNING):
        check(decode_all(target, None, EngineSettings(max_sequences=6), requests()))
    assert "at most 3 samples in flight now" in caplog.text


def test_what_no_ladder_helps_is_raised() -> None:
    tiny = SmallDevice(slots=1, positions=10_000, error=MemoryError())
    with pytest.raises(MemoryError):
        decode_all(tiny, None, EngineSettings(max_sequences=6), requests())
    tight = SmallDevice(slots=1000, positions=8, error=MemoryError())
    with pytest.raises(RuntimeError, match="not enough memory"):
        decode_all(tight, None, EngineSettings(max_sequences=6), requests())


def test_another_error_is_not_taken_for_it() -> None:
    broken = SmallDevice(slots=3, positions=10_000, error=RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        decode_all(broken, None, EngineSettings(max_sequences=6), requests())
    assert broken.num_refused == 1
