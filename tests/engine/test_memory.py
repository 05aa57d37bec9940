"""Where memory ends: smaller forwards, then fewer samples in flight, and the same outputs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from spot_batch.checkpoints.shapes import LOGITS_FILTERED, LOGITS_GREEDY, LOGITS_SAMPLED
from spot_batch.drafters.distributions import StaleStore
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.memory import GIB, PrefixMemory, free_bytes, free_in_cgroup, prefix_memory
from spot_batch.engine.transition import Rule, States, decided
from spot_batch.engine.walk import logits_of_a_visit
from spot_batch.models.attention import KVCache
from spot_batch.models.slots import Hidden, PrefixCache, SlotBatch
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request, SamplingParams
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

    def resize(self, num_rows: int, num_positions: int) -> None:
        if num_positions * num_rows > self._holds:
            raise RuntimeError(MESSAGE)
        super().resize(num_rows, num_positions)


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


class SmallHead(IntegerTarget):
    """The head of so many states fits."""

    def __init__(self, *, states: int, error: BaseException) -> None:
        super().__init__(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
        self._states, self._error = states, error
        self.sizes: list[int] = []

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > self._states:
            raise self._error
        self.sizes.append(len(rows))
        return super().head(rows)


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


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(MESSAGE), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_visits_that_do_not_fit_are_made_in_halves(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    target = SmallHead(states=1, error=error)
    with caplog.at_level(logging.WARNING):
        check(
            decode_all(
                target, RankingDrafter(), EngineSettings(max_sequences=6, budget=4), requests()
            )
        )
    assert "at most 1 states a visit now" in caplog.text
    assert max(target.sizes) == 1


def test_distributions_that_do_not_fit_are_kept_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    put, refused = StaleStore.put, []

    def small(self: StaleStore, rows: torch.Tensor, *given: torch.Tensor) -> None:
        if len(rows) > 1:
            refused.append(len(rows))
            raise MemoryError
        put(self, rows, *given)

    monkeypatch.setattr(StaleStore, "put", small)
    target = SmallHead(states=100, error=MemoryError())
    settings = EngineSettings(max_sequences=6, budget=4)
    check(decode_all(target, RankingDrafter(), settings, requests()))
    assert refused


@pytest.mark.parametrize("num_states", [1, 3])
def test_visits_stay_within_their_bytes(num_states: int) -> None:
    target = SmallHead(states=100, error=MemoryError())
    state = LOGITS_FILTERED * 4 * WIDTH * target.vocab_size
    settings = EngineSettings(max_sequences=6, budget=4, visit_bytes=num_states * state)
    filtered = [
        replace(each, params=replace(each.params, temperature=1.0, top_p=0.9))
        for each in requests()
    ]
    found = decode_all(target, RankingDrafter(), settings, filtered)
    assert max(target.sizes) == min(num_states, 2), "a power of two"
    alone = decode_all(target, None, EngineSettings(max_sequences=1), filtered)
    expected = {done.sample_id: done for done in alone}
    assert all(same_sample(done, expected[done.sample_id]) for done in found)


@pytest.mark.parametrize(
    ("times", "given"),
    [
        (LOGITS_GREEDY, {}),
        (LOGITS_SAMPLED, {"temperature": 0.8}),
        (LOGITS_FILTERED, {"temperature": 0.8, "top_p": 0.95, "top_k": 20}),
    ],
)
def test_a_visit_takes_no_more_logits_than_are_counted(times: int, given: dict[str, float]) -> None:
    params = SamplingParams(max_new_tokens=4, **given)  # type: ignore[arg-type]
    num, vocab_size = 8, 50_000
    states = States.of(
        [Request(sample_id=at, prompt_ids=(), noise_key=at, params=params) for at in range(num)],
        masked=torch.ones(num, WIDTH, dtype=torch.bool),
        start=[0] * num,
        num_committed=[0] * num,
    )
    logits = torch.randn(num, WIDTH, vocab_size, generator=torch.Generator().manual_seed(0))
    with (
        torch.inference_mode(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p,
    ):
        decided(logits, states, Rule.of(params))
    assert p.profiler is not None
    events = [each for each in p.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = list(accumulate(each.nbytes() for each in sorted(events, key=lambda e: e.start_ns())))
    most = 1 + max(held) / logits.nbytes
    assert times / 2 < most <= times
    assert logits_of_a_visit([params]) == times


def test_prefixes_that_do_not_fit_let_fewer_samples_fly(caplog: pytest.LogCaptureFixture) -> None:
    target = SmallDevice(slots=1000, positions=3 * 128, error=MemoryError())
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


def uneven() -> list[Request]:
    """Every third one takes two steps of padding, the last three."""
    lengths = [130 if number % 3 == 0 else 14 for number in range(8)] + [270]
    few = mixed_requests(num=9, max_new_tokens=14, lengths=(0, 3, 4, 5, 9, 1, 2, 20, 7))
    return [
        replace(each, params=replace(each.params, max_new_tokens=length))
        for each, length in zip(few, lengths, strict=True)
    ]


class WatchedCache(IntegerCache):
    """Notes its largest size."""

    most = 0

    def resize(self, num_rows: int, num_positions: int) -> None:
        super().resize(num_rows, num_positions)
        WatchedCache.most = max(WatchedCache.most, num_rows * num_positions)


class Watched(IntegerTarget):
    def allocate(self, num_rows: int, num_positions: int) -> IntegerCache:
        return WatchedCache(num_rows, num_positions, WIDTH)


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    "most",
    [384, *(pytest.param(most, marks=pytest.mark.slow) for most in (640, 1100, None))],
)
def test_samples_join_while_memory_holds_them_to_their_ends(
    most: int | None, longest_first: bool
) -> None:
    WatchedCache.most = 0
    target = Watched(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
    alone = decode_all(target, None, EngineSettings(max_sequences=1), uneven())
    expected = {done.sample_id: done for done in alone}
    WatchedCache.most = 0
    settings = EngineSettings(
        max_sequences=6, budget=4, max_positions=most, longest_first=longest_first
    )
    engine = Engine(target, RankingDrafter(), settings)
    for request in uneven():
        engine.add(request)
    found: list[Completion] = []
    flights = []
    while engine.has_work:
        found += engine.step()
        flights.append(engine.num_active)
    assert len(found) == 9
    assert all(same_sample(done, expected[done.sample_id]) for done in found)
    if most is not None:
        assert WatchedCache.most <= most
    assert max(flights) <= (6 if most is None else min(6, most // 128))


def test_the_longest_joins_first_if_asked() -> None:
    target = Watched(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)

    def order(*, longest_first: bool) -> list[int]:
        settings = EngineSettings(max_sequences=1, longest_first=longest_first)
        return [done.sample_id for done in decode_all(target, None, settings, uneven())]

    assert order(longest_first=False) == list(range(9))
    assert order(longest_first=True) == [8, 3, 6, 0, 7, 4, 2, 1, 5]


def test_short_ones_fill_what_a_long_one_leaves() -> None:
    target = Watched(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
    settings = EngineSettings(max_sequences=6, max_positions=640, longest_first=True)
    engine = Engine(target, None, settings)
    for request in uneven():
        if request.params.max_new_tokens != 130:
            engine.add(request)
    flights = []
    while engine.has_work:
        engine.step()
        flights.append(engine.num_active)
    assert flights[0] == 1
    assert max(flights) == 5


def test_a_sample_that_can_never_fly_is_told_from_one_that_can() -> None:
    memory = PrefixMemory(num_bytes=3000, position_bytes=10)
    long, short = uneven()[8], uneven()[0]
    assert memory.num_positions == 300
    assert memory.fault(short, block_length=WIDTH) is None
    assert memory.fault(long, block_length=WIDTH) == (
        "its 7 prompt tokens and max_new_tokens 270 take 3,840 bytes of prefix memory, there are "
        "3,000 (resources.prefix_share, resources.prefix_gib)"
    )
    target = Watched(block_length=WIDTH, seed=5, vocab_size=NUM_LETTERS + 4)
    engine = Engine(target, None, EngineSettings(max_positions=memory.num_positions))
    engine.add(short)
    with pytest.raises(ValueError, match="sample 8 needs 384 positions of 300"):
        engine.add(long)


def test_memory_is_a_share_of_what_is_free_or_what_the_spec_says() -> None:
    cpu = torch.device("cpu")
    free = free_bytes(cpu)
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    half = prefix_memory(cpu, position_bytes=8, share=0.5, num_sharing=2.0)
    assert half.num_bytes == pytest.approx(free / 4, rel=0.2)
    less = prefix_memory(cpu, position_bytes=8, share=0.5, num_sharing=2.0, reserved=free // 4)
    assert less.num_bytes == pytest.approx(free / 8, rel=0.2)
    none = prefix_memory(cpu, position_bytes=8, share=0.5, reserved=2 * free)
    assert none.num_bytes == 0
    assert prefix_memory(cpu, position_bytes=8, share=0.5, gib=1.5).num_bytes == 3 * GIB // 2


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_were_read_leave_a_container_its_memory(tmp_path: Path, version: int) -> None:
    names = {
        1: ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
        2: ("memory.max", "memory.current", "memory.stat"),
    }[version]
    before = "total_" if version == 1 else ""
    stat = f"anon 1000\n{before}inactive_file 5000\n{before}active_file 700\n"
    assert free_in_cgroup(tmp_path) is None
    for name, text in zip(names, ("10000\n", "7200\n", stat), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_in_cgroup(tmp_path) == 10_000 - (7200 - 5700)
    if version == 2:
        (tmp_path / "memory.max").write_text("max\n")
        assert free_in_cgroup(tmp_path) is None


def test_a_cache_keeps_what_it_holds_at_another_size() -> None:
    cache = KVCache(
        num_layers=2,
        num_rows=3,
        num_positions=256,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    before = [layer.normal_().clone() for layer in (*cache.keys, *cache.values)]
    for rows, positions in ((5, 130), (2, 300), (4, 128)):
        cache.resize(rows, positions)
        assert cache.keys[0].shape == (rows, 2, cache.num_positions, 4)
    for layer, was in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(layer[:2, :, :128], was[:2, :, :128])
        assert not layer[2:].any()
    assert cache.num_positions == 128


def test_no_positions_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="max_positions must be at least 1, got 0"):
        EngineSettings(max_positions=0)
