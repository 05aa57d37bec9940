"""What a slot sees: canvases, chains and slots off the grid, against transformers' own forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.models.attention import KVCache
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.models.slots import SlotBatch
from tests.slots import canvas, chain, clean_slots, joined, letters, seeded, slots_of
from tests.tiny_models import attend, plain_model, write_target

WIDTH = 8


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    folder = tmp_path_factory.mktemp("target")
    return resolve_model(str(write_target(folder, block_length=WIDTH, scale=2.0)))


@pytest.fixture(scope="module")
def target(info: ModelInfo) -> BlockTarget:
    return load_target(info)


@pytest.fixture(scope="module")
def model(info: ModelInfo) -> Qwen3ForCausalLM:
    return plain_model(info, torch.float32)


@torch.inference_mode()
def full_forward(
    model: Qwen3ForCausalLM, ids: Tensor, mask: Tensor, *, position: Tensor | None = None
) -> Tensor:
    """(n,) ids and (n, n) bool, who sees whom -> (n, d) final hidden rows; from position 0 on."""
    position = torch.arange(len(ids)) if position is None else position
    rows: Tensor = model.model(
        input_ids=ids[None],
        position_ids=position[None],
        attention_mask={"full_attention": attend(mask, torch.float32)},
    ).last_hidden_state[0]
    return rows


def block_causal(num_positions: int) -> Tensor:
    block = torch.arange(num_positions) // WIDTH
    return block[:, None] >= block


def stored(target: BlockTarget, *prefixes: Tensor) -> KVCache:
    """A cache whose rows hold these finished blocks, and room behind them."""
    cache = target.allocate(len(prefixes), 512)
    for row, prefix in enumerate(prefixes):
        if len(prefix):
            target.forward(clean_slots(prefix, row=row), cache)
    return cache


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_prefix", [0, 1, 5, 16])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 9, 17])
def test_a_canvas_is_a_full_forward_over_prefix_and_canvas(
    num_slots: int, num_prefix: int, target: BlockTarget, model: Qwen3ForCausalLM
) -> None:
    prefix, ids = letters(num_prefix, WIDTH, seeded(1)), letters(num_slots, WIDTH, seeded(2))
    ids[torch.rand(ids.shape, generator=seeded(3)) < 0.5] = target.mask_id
    whole = torch.cat((prefix, ids)).flatten()
    start = num_prefix * WIDTH
    mask = block_causal(len(whole))  # as the prefix was stored
    causal = full_forward(model, whole, mask)[start:]
    mask[start:] = True
    expected = full_forward(model, whole, mask)[start:]
    piece = canvas(ids, start=start, row=0)
    close(target.forward(piece, stored(target, prefix)).rows.flatten(0, 1), expected)
    if num_slots > 1:
        assert (causal - expected).abs().max() > 0.1, "the comparison would see nothing"


def test_a_stored_canvas_is_a_prefix_that_sees_all_of_itself(
    target: BlockTarget, model: Qwen3ForCausalLM
) -> None:
    """A prompt that is encoded as a whole, and a slot behind it in the same forward."""
    ids = letters(4, WIDTH, seeded(1))
    prompt = canvas(ids[:3], start=0, row=0)
    prompt = replace(prompt, store=torch.ones(3, dtype=torch.bool))
    behind = slots_of(ids[3:], start=torch.tensor([3 * WIDTH]), row=torch.tensor([0]))
    cache = target.allocate(1, 512)
    mask = torch.ones(4 * WIDTH, 4 * WIDTH, dtype=torch.bool)
    mask[: 3 * WIDTH, 3 * WIDTH :] = False
    expected = full_forward(model, ids.flatten(), mask)
    close(target.forward(joined(prompt, behind), cache).rows.flatten(0, 1), expected)
    close(target.forward(behind, cache).rows.flatten(0, 1), expected[3 * WIDTH :])


def test_canvases_side_by_side_do_not_see_one_another(
    target: BlockTarget, model: Qwen3ForCausalLM
) -> None:
    """Three of two samples; each as transformers has it, and with the same bits in any company."""
    prefixes = letters(2, WIDTH, seeded(1)), letters(15, WIDTH, seeded(2))
    cache = stored(target, *prefixes)
    canvases = [
        canvas(letters(num_slots, WIDTH, seeded(seed)), start=len(prefixes[row]) * WIDTH, row=row)
        for seed, (num_slots, row) in enumerate([(3, 0), (5, 0), (4, 1)])
    ]
    alone = [target.forward(piece, cache).rows for piece in canvases]
    for piece, rows in zip(canvases, alone, strict=True):
        ids = torch.cat((prefixes[int(piece.row[0])], piece.ids)).flatten()
        start = int(piece.start[0])
        mask = block_causal(len(ids))
        mask[start:] = True
        close(rows.flatten(0, 1), full_forward(model, ids, mask)[start:])
    expected = torch.cat(alone)
    together = joined(*canvases)
    assert torch.equal(target.forward(together, cache).rows, expected)
    for seed in range(3):
        order = torch.randperm(len(together), generator=seeded(seed))
        assert torch.equal(target.forward(together.take(order), cache).rows, expected[order])
    for at, (first, last) in enumerate([(0, 3), (3, 8), (8, 12)]):
        ids = letters(len(together), WIDTH, seeded(9))
        ids[first:last] = together.ids[first:last]
        rows = target.forward(replace(together, ids=ids), cache).rows
        assert torch.equal(rows[first:last], alone[at]), "junk in another canvas was seen"


@pytest.mark.parametrize("num_prefix", [0, 3, 14])
@pytest.mark.parametrize("num_slots", [2, 3, 6])
def test_a_chain_is_a_block_causal_forward(
    num_slots: int, num_prefix: int, target: BlockTarget, model: Qwen3ForCausalLM
) -> None:
    blocks = letters(num_prefix + num_slots, WIDTH, seeded(1))
    prefix, ids = blocks[:num_prefix], blocks[num_prefix:]
    start = num_prefix * WIDTH
    expected = full_forward(model, blocks.flatten(), block_causal(blocks.numel()))[start:]
    cache = stored(target, prefix)
    rows = target.forward(chain(ids, start=start, row=0), cache).rows
    close(rows.flatten(0, 1), expected)
    again = target.forward(clean_slots(ids, row=0, first=num_prefix), cache).rows
    assert torch.equal(rows, again), "a chain and stored blocks have the same bits"


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("start", [2 * WIDTH - 1, 5 * WIDTH - 1, 16 * WIDTH - 1, 16 * WIDTH + 3])
def test_a_slot_may_start_at_the_row_before_the_block(
    start: int, num_slots: int, target: BlockTarget, model: Qwen3ForCausalLM
) -> None:
    """Where row i scores position i + 1, a block wants the row before it once more."""
    prefix, ids = (
        letters(-(-start // WIDTH), WIDTH, seeded(1)),
        letters(num_slots, WIDTH, seeded(2)),
    )
    again = prefix.numel() - start  # positions that are stored and stand in the slot too
    ids[0, :again] = prefix[-1, WIDTH - again :]
    stands = torch.cat((torch.arange(prefix.numel()), start + torch.arange(ids.numel())))
    mask = block_causal(len(stands))
    mask[: prefix.numel(), prefix.numel() :] = False
    mask[prefix.numel() :] = True
    mask[prefix.numel() :, start : prefix.numel()] = False
    whole = torch.cat((prefix, ids)).flatten()
    expected = full_forward(model, whole, mask, position=stands)[prefix.numel() :]
    cache = stored(target, prefix)
    off_grid = canvas(ids, start=start, row=0)
    rows = target.forward(off_grid, cache).rows
    close(rows.flatten(0, 1), expected)
    company = joined(canvas(prefix[:2], start=0, row=0), off_grid)
    assert torch.equal(target.forward(company, cache).rows[2:], rows)


def three() -> SlotBatch:
    """A slot alone in row 0, and two side by side in row 1 that see each other."""
    ids = letters(3, WIDTH, seeded(1))
    return joined(canvas(ids[:1], start=0, row=0), canvas(ids[1:], start=0, row=1))


@pytest.mark.parametrize(
    ("sees", "message"),
    [
        ([0, 1, 2], r"sees: want \(3, K\), got \(3,\)"),
        ([[0], [1]], r"sees: want \(3, K\), got \(2, 1\)"),
        ([[0], [1], [3]], "does not see itself"),
        ([[0], [2], [1]], "does not see itself"),
        ([[0, -1], [1, 2], [1, -1]], "does not see itself"),
        ([[0, -1], [1, 3], [1, 2]], "indices are -1 or of the 3 slots"),
        ([[0, -2], [1, 2], [1, 2]], "indices are -1 or of the 3 slots"),
        ([[-1, 0], [1, 2], [1, 2]], "-1 stands behind the seen slots"),
        ([[0, -1], [2, 1], [1, 2]], "in the order of their positions"),
        ([[0, -1], [1, 1], [1, 2]], "in the order of their positions and do not overlap"),
        ([[0, 2], [1, 2], [1, 2]], "sees one of another row"),
    ],
)
def test_what_a_slot_cannot_see_is_refused(sees: list[list[int]], message: str) -> None:
    slots = three()
    with pytest.raises(AssertionError, match=message):
        replace(slots, sees=torch.tensor(sees))


def test_slots_that_overlap_do_not_see_one_another() -> None:
    slots = three()
    with pytest.raises(AssertionError, match="do not overlap"):
        replace(slots, start=torch.tensor([0, 0, WIDTH - 1]))
    replace(slots, start=torch.tensor([0, 0, WIDTH + 3]))  # what lies between is not read


def test_more_keys_than_a_row_of_the_cache_holds_are_refused(target: BlockTarget) -> None:
    piece = canvas(letters(17, WIDTH, seeded(1)), start=0, row=0)
    with pytest.raises(AssertionError, match="256 keys, 128 in a row"):
        target.forward(piece, target.allocate(1, WIDTH))


def test_slots_are_parted_between_pieces_alone() -> None:
    width = WIDTH
    ids = letters(4, width, seeded(1))
    pieces = [
        chain(ids[:2], start=0, row=0),
        canvas(ids[:1], start=0, row=1),
        canvas(ids, start=0, row=2),
        canvas(ids[:1], start=0, row=3),
        chain(ids[:3], start=0, row=4),
    ]
    slots = joined(*pieces)
    assert slots.parts(11) == [slots]
    for most, lengths in {10: [8, 3], 7: [7, 4], 5: [3, 5, 3], 4: [3, 4, 4]}.items():
        parts = slots.parts(most)
        assert [len(part) for part in parts] == lengths
        assert torch.equal(torch.cat([part.ids for part in parts]), slots.ids)
        assert torch.equal(joined(*parts).sees, slots.sees)
    with pytest.raises(AssertionError, match="more than 3 slots see one another"):
        slots.parts(3)


def test_a_slot_is_not_taken_without_those_it_sees() -> None:
    slots = three()
    assert slots.take(torch.tensor([2, 0, 1])).sees.tolist() == [[2, 0], [1, -1], [2, 0]]
    with pytest.raises(AssertionError, match="without one that it sees"):
        slots.take(torch.tensor([0, 1]))
