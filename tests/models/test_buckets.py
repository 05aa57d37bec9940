"""Forwards in buckets: filling them up changes no bit, and nothing in them waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.models import buckets as buckets_module
from spot_batch.models.attention import KeptKV, KVCache
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.models.buckets import (
    PROVEN,
    Bucket,
    BucketRunner,
    Captured,
    Graphs,
    Packed,
    lengths_agree,
)
from spot_batch.models.slots import Hidden, SlotBatch
from tests.engine.test_transfers import OnDevice
from tests.exact.harness import bits_equal, decode_all, mixed_requests, same_sample
from tests.families import write_checkpoint
from tests.slots import chain, clean_slots, joined, letters, seeded, slots_of

ROWS = 4
FAR = 160
"""Positions stored in the last row, so that its keys are of another padded length."""

Make = Callable[..., BlockTarget]


@pytest.fixture(scope="module", params=["sdar", "sdar-moe", "llada2"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", request.param)
    return partial(load_target, resolve_model(str(folder)))


def buckets_of(target: BlockTarget) -> BucketRunner:
    """As a GPU has them: on a CPU they only cost time."""
    any_length = target.tiles.sizes is None or lengths_agree(
        target.body.sizes, width=target.block_length, dtype=target.dtype, device=target.device
    )
    return BucketRunner(
        target.body.network.model,
        target.tiles,
        width=target.block_length,
        mask_id=target.mask_id,
        device=target.device,
        any_length=any_length,
    )


def prefixes(target: BlockTarget) -> tuple[int, ...]:
    """Blocks stored in each row."""
    return (1, 0, 2, FAR // target.block_length)


def company(target: BlockTarget, *, long: bool, drafted: bool, store: bool) -> SlotBatch:
    """States of every row, a finished block, and a drafted one with what is behind it."""
    width = target.block_length
    num = ROWS if long else ROWS - 1
    start = torch.tensor(prefixes(target)[:num]) * width
    ids = letters(num, width, seeded(num))
    ids[:, ::2] = target.mask_id
    parts = [slots_of(ids, start=start, row=torch.arange(num))]
    if store:
        fresh = clean_slots(letters(2, width, seeded(9)), row=1)
        parts.append(fresh)
    if drafted:
        pair = chain(letters(2, width, seeded(3)), start=prefixes(target)[2] * width, row=2)
        pair.keep[0] = True
        parts.append(pair)
    return joined(*parts)


def cache_of(target: BlockTarget) -> KVCache:
    cache = target.allocate(ROWS, 1024)
    for row, num in enumerate(prefixes(target)):
        if num:
            target.forward(
                clean_slots(letters(num, target.block_length, seeded(row)), row=row), cache
            )
    return cache


def outcome(target: BlockTarget, slots: SlotBatch) -> tuple[Hidden, KVCache]:
    cache = cache_of(target)
    return target.forward(slots, cache), cache


def kept_of(hidden: Hidden) -> Tensor:
    assert isinstance(hidden.kept, KeptKV)
    return torch.stack((hidden.kept.keys, hidden.kept.values))


def assert_same(plain: BlockTarget, filled: BlockTarget, slots: SlotBatch) -> None:
    """Rows, kept KV and all of the cache come out the same."""
    expected, before = outcome(plain, slots)
    found, after = outcome(filled, slots)
    assert bits_equal(found.rows, expected.rows)
    assert bits_equal(kept_of(found), kept_of(expected))
    for ours, theirs in zip(
        (*after.keys, *after.values), (*before.keys, *before.values), strict=True
    ):
        assert bits_equal(ours, theirs)


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_a_bucket_leaves_the_same_bits(make: Make, long: bool, drafted: bool, store: bool) -> None:
    plain, filled = make(), make()
    filled.buckets = buckets_of(filled)
    assert filled.buckets is not None
    slots = company(plain, long=long, drafted=drafted, store=store)
    bucket = filled.buckets.bucket(slots, cache_of(filled))
    assert bucket is not None or long, "keys of one length always fit one"
    assert_same(plain, filled, slots)


def test_lengths_that_agree_stand_in_one_bucket_with_the_same_bits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two short lengths agree on most CPUs; all that occur do not."""
    for name in ("KEYS", "PROVEN"):
        monkeypatch.setattr(buckets_module, name, (128, 256))
    monkeypatch.setattr(buckets_module, "_PROBE_KEYS", (8, 100, 128))
    plain, filled = make(), make()
    filled.buckets = buckets_of(filled)
    if not lengths_agree(
        plain.body.sizes, width=plain.block_length, dtype=plain.dtype, device=plain.device
    ):
        pytest.skip("even 128 and 256 keys give other bits on this CPU")
    slots = company(plain, long=True, drafted=True, store=True)
    assert filled.buckets is not None
    bucket = filled.buckets.bucket(slots, cache_of(filled))
    assert bucket is not None
    assert bucket.num_keys == 256
    assert_same(plain, filled, slots)


def test_an_engine_over_buckets_writes_the_same_samples(make: Make) -> None:
    plain, filled = make(), make()
    filled.buckets = buckets_of(filled)
    wanted = mixed_requests(num=6, max_new_tokens=20, lengths=(0, 3, 150, 5, 9, 20))
    expected = decode_all(plain, None, EngineSettings(max_sequences=1), wanted)
    by_id = {done.sample_id: done for done in expected}
    for budget in (0, 4):
        settings = EngineSettings(max_sequences=5, budget=budget)
        found = decode_all(filled, RankingDrafter(), settings, wanted)
        assert all(same_sample(done, by_id[done.sample_id]) for done in found), budget


def test_fast_numerics_agree_but_for_the_last_bits(make: Make) -> None:
    plain, filled = make(), make()
    for target in (plain, filled):
        target.tiles.sizes = target.expert_tiles.sizes = None
    filled.buckets = buckets_of(filled)
    slots = company(plain, long=True, drafted=True, store=True)
    expected, _ = outcome(plain, slots)
    found, after = outcome(filled, slots)
    assert filled.buckets is not None
    assert filled.buckets.bucket(slots, after) is not None, "any lengths stand together"
    torch.testing.assert_close(found.rows, expected.rows, rtol=1e-4, atol=1e-4)


def test_the_smallest_bucket_is_taken_and_none_where_none_fits(make: Make) -> None:
    target = make()
    target.buckets = buckets_of(target)
    runner, cache = target.buckets, cache_of(target)
    assert runner is not None
    tile = (target.tiles.sizes or (1,))[0]
    slots = company(target, long=False, drafted=True, store=True)
    size = -(-8 // tile) * tile
    assert runner.bucket(slots, cache) == Bucket(size, 128, 2, size, max(1, size // 4))
    alone = company(target, long=False, drafted=False, store=False)
    found = runner.bucket(alone, cache)
    assert found is not None
    assert (found.num_stored, found.num_kept, found.num_seen) == (0, 0, 1)
    width = target.block_length
    many = slots_of(
        letters(257, width, seeded(0)), start=torch.zeros(257).long(), row=torch.zeros(257).long()
    )
    assert runner.bucket(many, cache) is None, "too many slots"
    far = slots_of(
        letters(1, width, seeded(0)),
        start=torch.tensor([9000 // width * width]),
        row=torch.zeros(1).long(),
    )
    assert runner.bucket(far, cache) is None, "too long for the cache"
    kept = clean_slots(letters(8, width, seeded(0)), row=0)
    kept.store[:] = False
    kept.keep[:] = True
    assert runner.bucket(kept, cache) is None, "too many drafted blocks"


def test_a_bucket_ends_where_the_cache_does_if_that_length_was_tried(make: Make) -> None:
    target = make()
    target.tiles.sizes = target.expert_tiles.sizes = None
    target.buckets = buckets_of(target)
    runner = target.buckets
    assert runner is not None
    slots = company(target, long=True, drafted=False, store=False)
    for num_positions, num_keys in ((1024, 256), (256, 256), (200, 256)):
        bucket = runner.bucket(slots, target.allocate(ROWS, num_positions))
        assert bucket is not None
        assert bucket.num_keys == num_keys
    width = target.block_length
    far = slots_of(
        letters(1, width, seeded(0)), start=torch.tensor([512]), row=torch.zeros(1).long()
    )
    bucket = runner.bucket(far, target.allocate(1, 700))
    assert bucket is not None
    assert bucket.num_keys == 768
    deep = slots_of(
        letters(1, width, seeded(0)), start=torch.tensor([2048]), row=torch.zeros(1).long()
    )
    assert runner.bucket(deep, target.allocate(1, 2100)) is None, "2176 keys were not tried"


def test_graphs_hold_no_more_than_their_bytes_and_the_oldest_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(num: int) -> Captured:
        nothing = torch.empty(0, 0)
        packed = Packed.of(torch.zeros(num // 2, dtype=torch.uint8))
        rows = torch.zeros(num - num // 2, dtype=torch.uint8)
        return Captured(None, packed, rows, KeptKV(nothing, nothing))  # type: ignore[arg-type]

    monkeypatch.setattr(buckets_module, "GRAPH_BYTES", 100)
    graphs = Graphs(generation=0, pool=None)
    one, two, three, large = (Bucket(size, 128, 1, 0, 0) for size in (1, 2, 3, 4))
    graphs.keep(one, captured(40))
    graphs.keep(two, captured(40))
    assert graphs.find(one) is not None
    graphs.keep(three, captured(41))
    assert list(graphs.by_bucket) == [one, three], "the one that was used last stays"
    assert graphs.find(two) is None
    graphs.keep(large, captured(1000))
    assert list(graphs.by_bucket) == [large], "the one that runs now is kept whatever it holds"


def test_a_cache_says_when_its_memory_moved(make: Make) -> None:
    cache = make().allocate(2, 128)
    before = cache.generation
    cache.resize(2, 100)
    cache.resize(2, 128)
    assert cache.generation == before, "nothing moved"
    cache.resize(3, 128)
    grown = cache.generation
    assert grown > before
    cache.resize(3, 129)
    assert cache.generation > grown


@pytest.mark.parametrize("length", [256, 384, 8192])
def test_lengths_are_tried_on_this_device(
    make: Make, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Those that only forwards op by op have, too."""
    target = make()

    asked: list[int] = []

    def agree() -> bool:
        return lengths_agree(
            target.body.sizes, width=8, dtype=torch.float32, device=torch.device("cpu")
        )

    def same_but_for(_: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor) -> Tensor:
        asked.append(keys.shape[2])
        return torch.full((1,), float(is_other and keys.shape[2] == length))

    monkeypatch.setattr(buckets_module.functional, "scaled_dot_product_attention", same_but_for)
    is_other = False
    assert agree()
    assert set(asked) == set(PROVEN)
    is_other = True
    assert not agree()


def test_a_captured_forward_would_wait_for_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make()
    if target.expert_tiles.sizes is not None:
        pytest.skip("experts are looped over on a CPU: the host asks how many rows each has")
    target.buckets = buckets_of(target)
    slots = company(target, long=False, drafted=True, store=True)
    cache = cache_of(target)
    monkeypatch.setattr(
        buckets_module, "onto", lambda tensor, device: tensor.clone().as_subclass(OnDevice)
    )
    OnDevice.waits.clear()
    rows = target.forward(slots, cache).rows
    assert isinstance(rows, OnDevice)
    assert not OnDevice.waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_leave_the_same_bits_at_every_replay_over_every_cache(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    plain, captured = make(device="cuda", dtype="bfloat16"), make(device="cuda", dtype="bfloat16")
    plain.buckets = None
    assert captured.buckets is not None
    caches = [cache_of(captured) for _ in range(2)]
    for number in range(4):
        slots = company(plain, long=number % 2 == 1, drafted=True, store=True)
        for cache in caches:
            assert_same(plain, captured, slots)
            expected = plain.forward(slots, cache).rows.clone()
            assert bits_equal(captured.forward(slots, cache).rows, expected)
        if number == 1:
            caches[0].resize(ROWS + 1, 1280)
    assert "cannot be captured" not in caplog.text
