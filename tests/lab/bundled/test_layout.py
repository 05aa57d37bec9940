"""Who sees whom, what is masked and what it weighs."""

import numpy as np
import pytest
import torch
from transformers import Qwen3Model

from spot_batch.lab.bundled.layout import (
    Rows,
    Sample,
    block_causal,
    causal_piece,
    diffusion_piece,
    diffusion_pieces,
    filled,
    pack,
    visibility,
)
from spot_batch.lab.bundled.model import ModelSize, hidden_rows, make_model

FILL, MASK_ID = 0, 3


@pytest.fixture(scope="module")
def model() -> Qwen3Model:
    size = ModelSize(
        vocab_size=64,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=24,
    )
    return make_model(size, seed=1).double()


def some_samples(num_samples: int, *, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            tuple(rng.integers(4, 64, rng.integers(1, 9)).tolist()),
            tuple(rng.integers(4, 64, rng.integers(1, 12)).tolist()),
        )
        for _ in range(num_samples)
    ]


def diffusion_rows(samples: list[Sample], *, seed: int = 0) -> Rows:
    pieces = diffusion_pieces(
        samples,
        block_length=4,
        fill_id=FILL,
        mask_id=MASK_ID,
        extra_block_share=0.3,
        rng=np.random.default_rng(seed),
    )
    return pack(pieces, row_length=96, fill_id=FILL)


def test_the_mask_of_a_small_case_is_the_one_written_by_hand() -> None:
    # Two blocks of two, a prompt of one: clean block 0, then noised copies of blocks 0 and 1.
    piece = diffusion_piece(
        np.array([10, 11, 12, 13]),
        prompt_length=1,
        block_length=2,
        mask_id=MASK_ID,
        levels=np.array([0.0, 0.9]),
        rng=np.random.default_rng(0),
    )
    rows = pack([piece], row_length=8, fill_id=FILL)
    assert rows.tokens[0].tolist() == [10, 11, 10, 3, 3, 3, 0, 0]
    assert rows.copies[0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert rows.positions[0].tolist() == [0, 1, 0, 1, 2, 3, 0, 0]
    assert rows.weights[0].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    by_hand = [
        "11000000",  # clean block 0 sees itself
        "11000000",
        "00110000",  # noised block 0 sees itself: nothing is earlier
        "00110000",
        "11001100",  # noised block 1 sees itself and clean block 0, never noised block 0
        "11001100",
        "00000011",  # padding sees padding
        "00000011",
    ]
    want = torch.tensor([[c == "1" for c in line] for line in by_hand])
    assert torch.equal(visibility(rows)[0, 0], want)


def test_causal_rows_see_the_past_of_their_own_sample() -> None:
    samples = [Sample((5, 6), (7,)), Sample((8,), (9,))]
    pieces = [causal_piece(sample, fill_id=FILL, prompt_weight=0.5) for sample in samples]
    rows = pack(pieces, row_length=5, fill_id=FILL)
    assert rows.tokens[0].tolist() == [5, 6, 7, 8, 9]
    assert rows.targets[0].tolist() == [6, 7, FILL, 9, FILL]
    assert rows.weights[0].tolist() == [0.5, 1, 1, 1, 1]
    want = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(2, 2).tril()).bool()
    assert torch.equal(visibility(rows)[0, 0], want)


def test_a_prompt_is_never_noised_and_every_response_token_is_learnt_once() -> None:
    for sample in some_samples(40):
        tokens = filled(sample, block_length=4, fill_id=FILL, extra_blocks=1)
        num_blocks = len(tokens) // 4 - len(sample.prompt) // 4
        piece = diffusion_piece(
            tokens,
            prompt_length=len(sample.prompt),
            block_length=4,
            mask_id=MASK_ID,
            levels=np.random.default_rng(0).random(num_blocks),
            rng=np.random.default_rng(1),
        )
        learnt = piece.weights > 0
        assert (piece.tokens[learnt] == MASK_ID).all()
        assert sorted(piece.positions[learnt]) == list(range(len(sample.prompt), len(tokens)))
        assert (piece.targets == tokens[piece.positions]).all()
        hidden = piece.tokens == MASK_ID
        assert (hidden == learnt).all()
        assert (piece.tokens[~hidden] == piece.targets[~hidden]).all()


def test_the_number_of_masks_is_uniform_over_a_batch() -> None:
    samples = [Sample((5, 6, 7, 8), (9,) * 8) for _ in range(200)]
    pieces = diffusion_pieces(
        samples,
        block_length=4,
        fill_id=FILL,
        mask_id=MASK_ID,
        extra_block_share=0.0,
        rng=np.random.default_rng(0),
    )
    counts = np.zeros(5, dtype=int)
    for piece in pieces:
        for block in (1, 2):
            first = (piece.copies == 1) & (piece.blocks == block)
            num_masked = int((piece.tokens[first] == MASK_ID).sum())
            counts[num_masked] += 1
            assert piece.weights[first].sum() == pytest.approx(4)
    assert counts.tolist() == [0, 100, 100, 100, 100]  # 400 blocks, stratified


def test_packed_training_rows_score_as_full_forwards_of_each_block_do(model: Qwen3Model) -> None:
    samples = some_samples(12)
    rows = diffusion_rows(samples)
    assert len(rows.tokens) < len(samples), "nothing was packed"
    with torch.no_grad():
        packed = hidden_rows(model, rows.tokens, rows.positions, visibility(rows))
        compared = 0
        for index, sample in enumerate(samples):
            mine = rows.samples == index
            for copy in (1, 2):
                for block in range(len(sample.prompt) // 4, int(rows.blocks[mine].max()) + 1):
                    here = mine & (rows.copies == copy) & (rows.blocks == block)
                    if not here.any():
                        continue
                    past = mine & (rows.copies == 0) & (rows.blocks < block)
                    tokens = torch.cat([rows.tokens[past], rows.tokens[here]])[None]
                    size = tokens.shape[1]
                    assert size == (block + 1) * 4
                    allowed = block_causal(size, block_length=4)[None, None]
                    alone = hidden_rows(model, tokens, torch.arange(size)[None], allowed)
                    torch.testing.assert_close(packed[here], alone[0, -4:], rtol=1e-10, atol=1e-10)
                    compared += 1
    assert compared > 30


def test_a_piece_longer_than_a_row_is_refused() -> None:
    piece = causal_piece(Sample((5, 6), (7, 8)), fill_id=FILL, prompt_weight=0.1)
    with pytest.raises(AssertionError, match="does not fit"):
        pack([piece], row_length=3, fill_id=FILL)
