"""Level 1: on real bodies a slot's bits depend on its own sample only.

The body that counts is four random layers of width 1024, in bfloat16 and float32, on one to four
threads; test_threads.py has sizes that nobody publishes. The first test says how much there is to
see on this machine: without tiles some row counts do give other bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.models import tiles as rows_module
from spot_batch.models.attention import KVCache, SlotAttention
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.models.slots import Hidden, SlotBatch
from spot_batch.records.sampling import Request, SamplingParams
from tests.exact.harness import (
    OracleDrafter,
    bits_equal,
    decode_all,
    mixed_requests,
    same_sample,
    trace_of,
)
from tests.exact.reference import decode
from tests.families import write_checkpoint
from tests.slots import NUM_LETTERS, canvas, chain, clean_slots, joined, letters, seeded, slots_of
from tests.tally import Tally
from tests.tiny_models import attend, plain_model, write_target

pytestmark = pytest.mark.exact

WIDE = {
    "hidden_size": 1024,
    "num_layers": 4,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
}


@pytest.fixture(scope="session")
def small_info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = write_target(tmp_path_factory.mktemp("small") / "target", scale=2.0)
    return resolve_model(str(folder))


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(
        tmp_path_factory.mktemp("wide") / "target", block_length=32, scale=1.5, **WIDE
    )


@pytest.fixture(scope="session")
def moe_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small bodies with experts; test_families.py has wide ones."""
    at = tmp_path_factory.mktemp("moe")
    return {family: write_checkpoint(at / family, family) for family in ("sdar-moe", "llada2")}


@dataclass(frozen=True, slots=True)
class Body:
    """A target, loaded on so many threads (its tiles are proven on them)."""

    target: BlockTarget
    name: str


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("small", "float32", 1), id="small-float32-1"),
        pytest.param(("small", "bfloat16", 2), id="small-bfloat16-2"),
        pytest.param(("small", "float32", 3), id="small-float32-3"),
        pytest.param(("sdar-moe", "float32", 1), id="sdar-moe-float32-1"),
        pytest.param(("llada2", "bfloat16", 1), id="llada2-bfloat16-1"),
        pytest.param(("wide", "float32", 1), id="wide-float32-1", marks=pytest.mark.slow),
        pytest.param(("wide", "float32", 2), id="wide-float32-2", marks=pytest.mark.slow),
        pytest.param(("wide", "float32", 3), id="wide-float32-3", marks=pytest.mark.slow),
        pytest.param(("wide", "bfloat16", 1), id="wide-bfloat16-1"),
        pytest.param(("wide", "bfloat16", 2), id="wide-bfloat16-2", marks=pytest.mark.slow),
        pytest.param(("wide", "bfloat16", 4), id="wide-bfloat16-4", marks=pytest.mark.slow),
    ],
)
def body(
    request: pytest.FixtureRequest,
    small_info: ModelInfo,
    wide_folder: Path,
    moe_folders: dict[str, Path],
) -> Iterator[Body]:
    size, dtype, num_threads = request.param
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    folders = {"small": small_info.path, "wide": wide_folder, **moe_folders}
    info = resolve_model(str(folders[size]))
    yield Body(load_target(info, dtype=dtype), f"{size} {dtype} {num_threads}")
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Scene:
    """Clean prefixes of three samples, stored, and states to look at behind them.

    Prefixes of none, two and so many blocks that the keys of the longest are padded to another
    length than those of the others.
    """

    cache: KVCache
    prefixes: tuple[Tensor, ...]
    states: SlotBatch


def make_scene(target: BlockTarget, *, seed: int = 0) -> Scene:
    width = target.block_length
    generator = torch.Generator().manual_seed(seed)
    num_blocks = (0, 2, 128 // width + 1)
    prefixes = tuple(letters(number, width, generator) for number in num_blocks)
    cache = target.allocate(len(prefixes), (max(num_blocks) + 2) * width)
    for row, prefix in enumerate(prefixes):
        if len(prefix):
            target.forward(clean_slots(prefix, row=row), cache)
    row = torch.tensor([0, 1, 2, 2, 1, 0, 2])
    ids = letters(len(row), width, generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.5] = target.mask_id
    ids[0] = target.mask_id
    start = torch.tensor([num_blocks[at] * width for at in row])
    return Scene(cache, prefixes, slots_of(ids, start=start, row=row))


def outcome(target: BlockTarget, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Final hidden rows and the logits that the head makes of them."""
    return hidden.rows, target.head(hidden.rows)


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(bits_equal(a, b) for a, b in zip(left, right, strict=True))


def alone(target: BlockTarget, scene: Scene) -> list[tuple[Tensor, Tensor]]:
    """Every state in a forward of its own."""
    return [
        outcome(target, target.forward(scene.states.take(torch.tensor([at])), scene.cache))
        for at in range(len(scene.states))
    ]


def differing(
    target: BlockTarget, scene: Scene, expected: list[tuple[Tensor, Tensor]], order: list[int]
) -> int:
    """How many of the states at `order` come out of one forward with other bits than alone."""
    states = joined(*(scene.states.take(torch.tensor([at])) for at in order))
    hidden, logits = outcome(target, target.forward(states, scene.cache))
    return sum(
        not same((hidden[at : at + 1], logits[at : at + 1]), expected[state])
        for at, state in enumerate(order)
    )


BATCHES = (2, 3, 5, 7)


def num_that_differ(info: ModelInfo, *, canonical: bool) -> int:
    """How many slots come out with other bits in batches of these sizes than alone."""
    target = load_target(info, dtype="float32", canonical=canonical)
    scene = make_scene(target)
    expected = alone(target, scene)
    return sum(differing(target, scene, expected, list(range(num))) for num in BATCHES)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("size", "width", "num_threads"),
    [
        ("small", 3, 1),
        ("small", 5, 2),
        pytest.param("wide", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_bits_depend_on_the_number_of_rows_but_not_where_linears_are_tiled(
    size: str,
    width: int,
    num_threads: int,
    small_info: ModelInfo,
    request: pytest.FixtureRequest,
    tally: Tally,
) -> None:
    """How much there is to see here; what this machine hides, the next test makes up for."""
    torch.set_num_threads(num_threads)
    folder = small_info.path if size == "small" else request.getfixturevalue("wide_folder")
    info = resolve_model(str(folder), block_length=width)
    untiled, tiled = (num_that_differ(info, canonical=canonical) for canonical in (False, True))
    tally.note(
        f"{size} body, W {width}, float32, {num_threads} thread(s): of {sum(BATCHES)} slots in "
        f"batches {untiled} have other bits than alone, {tiled} where linears are tiled"
    )
    assert tiled == 0


def uneven_linear(period: int):
    """A linear whose bits depend on how many rows it is given, with so many kinds of row counts."""
    plain = torch.nn.functional.linear

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = int(math.log2(len(rows))) % period if len(rows) > 1 else period
        return plain(rows, weight, bias) * (1 + 1e-6 * kind)

    return linear


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("period", "num_sizes"), [(2, 4), (3, 3), (100, 1)])
def test_tiles_hold_against_a_linear_that_depends_on_its_number_of_rows(
    period: int, num_sizes: int, small_info: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module.functional, "linear", uneven_linear(period))
    for canonical in (True, False):
        target = load_target(small_info, canonical=canonical)
        scene = make_scene(target)
        expected = alone(target, scene)
        found = [differing(target, scene, expected, list(range(num))) for num in BATCHES]
        if canonical:
            assert target.tiles.sizes is not None
            assert len(target.tiles.sizes) == num_sizes
            assert sum(found) == 0
        else:
            assert sum(found) >= 3, "the linear was to depend on its number of rows"


def test_a_slot_has_the_same_bits_alone_and_in_any_batch(body: Body) -> None:
    scene = make_scene(body.target)
    expected = alone(body.target, scene)
    num = len(expected)
    backwards = list(reversed(range(num)))
    for order in (list(range(num)), backwards, [3, 0, 5], [6, 1, 2, 4, 3], [2, 2, 2, 2]):
        assert differing(body.target, scene, expected, order) == 0, (body.name, order)


def test_junk_in_other_slots_and_other_rows_leaves_a_slot_alone(body: Body) -> None:
    scene = make_scene(body.target)
    expected = alone(body.target, scene)
    width = body.target.block_length
    generator = torch.Generator().manual_seed(9)
    junk = replace(scene.states, ids=letters(len(scene.states), width, generator))
    for at in (0, 2, 4):
        ids = junk.ids.clone()
        ids[at] = scene.states.ids[at]
        hidden, logits = outcome(
            body.target, body.target.forward(replace(junk, ids=ids), scene.cache)
        )
        assert same((hidden[at : at + 1], logits[at : at + 1]), expected[at]), (body.name, at)
    # Nor do other samples' rows of the cache, or what stands behind a slot in its own.
    at = 4
    row, start = int(scene.states.row[at]), int(scene.states.start[at])
    for layer in (*scene.cache.keys, *scene.cache.values):
        kept = layer[row, :, :start].clone()
        layer.copy_(1e3 * torch.randn(layer.shape, generator=generator))
        layer[row, :, :start] = kept
    hidden = body.target.forward(scene.states.take(torch.tensor([at])), scene.cache)
    assert same(outcome(body.target, hidden), expected[at]), body.name


def test_a_prefix_stored_at_once_and_block_by_block_has_the_same_bits(body: Body) -> None:
    scene = make_scene(body.target)
    target, row = body.target, 2
    blocks, width = scene.prefixes[row], body.target.block_length
    behind = scene.states.take(torch.tensor([2]))
    expected = outcome(target, target.forward(behind, scene.cache))
    slowly = target.allocate(row + 1, scene.cache.num_positions)
    for first in range(len(blocks)):
        target.forward(clean_slots(blocks[first : first + 1], row=row, first=first), slowly)
    assert kv_equal(scene.cache, slowly, row=row, end=len(blocks) * width), body.name
    assert same(outcome(target, target.forward(behind, slowly)), expected), body.name
    # And with the state behind them, and another sample's blocks between, in one forward.
    fused = target.allocate(row + 1, scene.cache.num_positions)
    batch = joined(clean_slots(blocks, row=row), clean_slots(blocks[:3], row=0), behind)
    hidden = target.forward(batch.take(torch.randperm(len(batch), generator=seeded(3))), fused)
    at = int((torch.randperm(len(batch), generator=seeded(3)) == len(batch) - 1).nonzero())
    found = hidden.rows[at : at + 1]
    assert kv_equal(scene.cache, fused, row=row, end=len(blocks) * width), body.name
    assert same((found, target.head(found)), expected), body.name


def test_a_clean_pass_fused_a_crossing_and_a_pass_alone_have_the_same_bits(body: Body) -> None:
    target, width = body.target, body.target.block_length
    scene = make_scene(target)
    for row in (1, 2):
        start = len(scene.prefixes[row]) * width
        finished = letters(1, width, seeded(row))
        clean = clean_slots(finished, row=row, first=start // width)
        blank = slots_of(
            torch.full((1, width), target.mask_id),
            start=torch.tensor([start + width]),
            row=torch.tensor([row]),
        )
        apart = copy_of(scene.cache)
        target.forward(clean, apart)
        expected = outcome(target, target.forward(blank, apart))
        fused = copy_of(scene.cache)
        hidden = target.forward(joined(scene.states, clean, blank), fused)
        assert same(outcome(target, Hidden(hidden.rows[-1:], hidden.kept)), expected), body.name
        assert kv_equal(apart, fused, row=row, end=start + width), body.name
        crossed = copy_of(scene.cache)
        drafted = torch.tensor([True, False])
        pair = chain(torch.cat((finished, blank.ids)), start=start, row=row)
        hidden = target.forward(joined(scene.states, replace(pair, keep=drafted)), crossed)
        assert kv_equal(scene.cache, crossed, row=row, end=start + width), "a draft was stored"
        assert same(outcome(target, Hidden(hidden.rows[-1:], hidden.kept)), expected), body.name
        crossed.adopt(hidden.kept, 0, row=row, start=start)
        assert kv_equal(apart, crossed, row=row, end=start + width), body.name
        again = target.forward(blank, crossed)
        assert same(outcome(target, again), expected), body.name


def test_the_slots_of_a_canvas_have_the_same_bits_alone_and_in_company(body: Body) -> None:
    """Canvases of so many slots, one long enough for keys of another padded length."""
    target, width = body.target, body.target.block_length
    scene = make_scene(target)
    scene.cache.resize(len(scene.cache.keys[0]), 512)
    canvases = [
        canvas(
            letters(num_slots, width, seeded(row)), start=len(scene.prefixes[row]) * width, row=row
        )
        for row, num_slots in ((0, 3), (1, 128 // width + 1), (2, 2))
    ]
    apart = [outcome(target, target.forward(piece, scene.cache)) for piece in canvases]
    expected = tuple(torch.cat(parts) for parts in zip(*apart, strict=True))
    together = joined(*canvases, scene.states)
    for seed in range(3):
        order = torch.randperm(len(together), generator=seeded(seed))
        hidden = target.forward(together.take(order), scene.cache)
        found = hidden.rows[order.argsort()][: len(expected[0])]
        assert same(outcome(target, Hidden(found, hidden.kept)), expected), (body.name, seed)


def test_a_chain_of_slots_has_the_bits_of_blocks_that_were_stored(body: Body) -> None:
    target, width = body.target, body.target.block_length
    scene = make_scene(target)
    scene.cache.resize(len(scene.cache.keys[0]), 512)
    for row in (0, 2):
        start = len(scene.prefixes[row]) * width
        blocks = letters(4, width, seeded(row))
        company = canvas(blocks[:2], start=start, row=row)
        pieces = joined(company, chain(blocks, start=start, row=row))
        hidden = target.forward(pieces, scene.cache)
        found = outcome(target, Hidden(hidden.rows[len(company) :], hidden.kept))
        clean = clean_slots(blocks, row=row, first=start // width)
        stored = outcome(target, target.forward(clean, scene.cache))
        assert same(found, stored), body.name


def copy_of(cache: KVCache) -> KVCache:
    twin = object.__new__(KVCache)
    twin.keys = [layer.clone() for layer in cache.keys]
    twin.values = [layer.clone() for layer in cache.values]
    return twin


def kv_equal(left: KVCache, right: KVCache, *, row: int, end: int) -> bool:
    return all(
        bits_equal(a[row, :, :end], b[row, :, :end])
        for a, b in zip(left.keys + left.values, right.keys + right.values, strict=True)
    )


def test_keys_are_padded_by_a_slots_own_place_alone(small_info: ModelInfo) -> None:
    target = load_target(small_info)
    width = target.block_length
    start = torch.tensor([0, 15, 16, 40, 3]) * width
    slots = slots_of(torch.zeros(5, width, dtype=torch.int64), start=start, row=start * 0)
    cache = target.allocate(1, 512)

    def lengths(batch: SlotBatch) -> dict[int, int]:
        groups = SlotAttention.of(batch, cache).groups
        return {
            int(batch.start[at]): group.length for group in groups for at in group.index.tolist()
        }

    together = lengths(slots)
    assert len(set(together.values())) > 1
    for at in range(len(slots)):
        own = lengths(slots.take(torch.tensor([at])))
        assert own == {int(start[at]): together[int(start[at])]}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("width", [4, 8])
@torch.inference_mode()
def test_cached_logits_are_those_of_a_full_forward_under_the_training_mask(
    width: int, small_info: ModelInfo
) -> None:
    info = resolve_model(str(small_info.path), block_length=width)
    target, model = load_target(info), plain_model(info, torch.float32)
    num_blocks = 160 // width
    clean = letters(num_blocks, width, seeded(1))
    noised = clean.clone()
    noised[torch.rand(noised.shape, generator=seeded(2)) < 0.6] = target.mask_id
    # [noised copy; clean copy] at the same positions.
    block = torch.arange(num_blocks).repeat_interleave(width)
    earlier, own = block[:, None] > block, block[:, None] == block
    mask = torch.cat((torch.cat((own, earlier), 1), torch.cat((own & False, earlier | own), 1)))
    position = torch.arange(num_blocks * width).repeat(2)[None]
    full = model(
        input_ids=torch.cat((noised, clean)).view(1, -1),
        position_ids=position,
        attention_mask={"full_attention": attend(mask, torch.float32)},
    ).logits[0, : num_blocks * width]
    cache = target.allocate(1, num_blocks * width)
    target.forward(clean_slots(clean, row=0), cache)
    states = slots_of(
        noised,
        start=torch.arange(num_blocks) * width,
        row=torch.zeros(num_blocks, dtype=torch.int64),
    )
    ours = target.head(target.forward(states, cache).rows).view(num_blocks * width, -1)
    allowed = [token for token in range(info.vocab_size) if token not in info.forbidden_ids]
    assert bool((ours[:, list(info.forbidden_ids)] == -math.inf).all())
    torch.testing.assert_close(ours[:, allowed], full[:, allowed], rtol=1e-4, atol=1e-4)
    spread = full[:, allowed].std()
    assert spread > 0.5, f"logits spread by {spread}: the comparison would see nothing"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("dtype", "num_threads", "num"),
    [("float32", 1, 8), pytest.param("bfloat16", 2, 4, marks=pytest.mark.slow)],
)
def test_drafted_samples_of_the_small_body_are_the_draft_free_ones(
    dtype: str, num_threads: int, num: int, small_info: ModelInfo, tally: Tally
) -> None:
    torch.set_num_threads(num_threads)
    target = load_target(small_info, dtype=dtype)
    lengths = [0, 3, 140, 13, 21, 6, 8, 1]
    requests = mixed_requests(num=num, max_new_tokens=19, lengths=lengths)
    variants = [
        (budget, crossing, max_sequences, max_slots)
        for budget, crossing in ((0, True), (4, True), (8, False), (20, True))
        for max_sequences, max_slots in ((1, 64), (8, 1024), (5, 6))
    ]
    compare_engines(target, requests, variants[:: 8 // num], tally)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [("wide", "float32", 1), ("wide", "bfloat16", 2)], indirect=True, scope="module"
)
def test_drafted_samples_of_the_wide_body_are_the_draft_free_ones(body: Body, tally: Tally) -> None:
    """Prompts that end inside a block, so that the walk crosses into the next one."""
    num = 2 if torch.get_num_threads() == 1 else 1
    requests = mixed_requests(num=num, max_new_tokens=36, lengths=[28, 60])
    compare_engines(body.target, requests, [(6, True, 2, 1024)], tally)


def compare_engines(
    target: BlockTarget,
    requests: list[Request],
    variants: list[tuple[int, bool, int, int]],
    tally: Tally,
) -> None:
    """Each sample alone and draft-free, against every variant with two drafters."""
    width = target.block_length
    alone_first = decode_all(target, None, EngineSettings(max_sequences=1), requests)
    truth = {done.sample_id: done for done in alone_first}
    traces = {
        request.noise_key: trace_of(truth[request.sample_id], width=width) for request in requests
    }
    num_saved, wrong = 0, []
    for number, (budget, crossing, max_sequences, max_slots) in enumerate(variants):
        drafter = OracleDrafter(traces) if number % 2 == 0 else RankingDrafter()
        settings = EngineSettings(
            max_sequences=max_sequences, budget=budget, crossing=crossing, max_slots=max_slots
        )
        for done in decode_all(target, drafter, settings, requests, at_once=1 + number % 4):
            expected = truth[done.sample_id]
            tally.add(same=same_sample(done, expected), what=(settings, done, expected))
            num_saved += expected.stats.num_forwards - done.stats.num_forwards
            if not same_sample(done, expected):
                wrong.append((settings, done, expected))
    assert wrong == []
    assert num_saved > 5, "nothing was accepted: the walk was not tested"


@pytest.mark.usefixtures("one_thread")
@torch.inference_mode()
def test_an_independent_decoder_in_double_precision_writes_the_same(
    small_info: ModelInfo, tally: Tally
) -> None:
    """Greedy, the body in float64 through transformers' own attention and no cache at all."""
    target, model = load_target(small_info), plain_model(small_info, torch.float64)
    width, forbidden = target.block_length, list(small_info.forbidden_ids)

    def score(prefix: list[int], block: list[int]) -> np.ndarray:
        ids = torch.tensor([*prefix, *block])
        at = torch.arange(len(ids)) // width
        logits = model(
            input_ids=ids[None],
            attention_mask={"full_attention": attend(at[:, None] >= at, torch.float64)},
        ).logits[0, len(prefix) :]
        logits[:, forbidden] = -math.inf
        return logits.numpy()

    greedy = SamplingParams(max_new_tokens=20, stop_ids=small_info.stop_ids)
    rng = Random(2)
    requests = [
        Request(
            sample_id=index,
            prompt_ids=tuple(rng.randrange(NUM_LETTERS) for _ in range(5 * index)),
            noise_key=index,
            params=replace(
                greedy, unmasking="threshold" if index % 3 == 2 else "single", threshold=0.4
            ),
        )
        for index in range(10)
    ]
    num_close, wrong = 0, []
    for done in decode_all(
        target, RankingDrafter(), EngineSettings(max_sequences=4, budget=4), requests
    ):
        request = requests[done.sample_id]
        expected = decode(
            score,
            prompt=request.prompt_ids,
            params=request.params,
            noise_key=request.noise_key,
            block_length=width,
            mask_id=small_info.mask_id,
            near=1e-4,
        )
        if expected.near_tie:
            num_close += 1
            continue
        agrees = (done.token_ids, done.commit_step, done.finish_reason) == (
            expected.token_ids,
            expected.commit_step,
            expected.finish_reason,
        )
        tally.add(same=agrees, what=("float64", done, expected))
        if not agrees:
            wrong.append((done, expected))
    assert wrong == []
    assert num_close < len(requests) // 2
