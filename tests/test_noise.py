"""Addressed noise: known answers, no structure in any word of the address, the right law."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spot_batch import noise as noise_module
from spot_batch.engine import transition as transition_module
from spot_batch.engine.transition import perturbed_argmax
from spot_batch.noise import (
    GUMBEL_MAX,
    NO_STEP,
    Philox,
    at_once,
    gumbel,
    gumbel_from_bits,
    gumbel_rows,
    philox4x32,
    words_at,
)
from tests.exact import reference

EULER = 0.5772156649015329
TRUE_VARIANCE = math.pi**2 / 6


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected
    assert reference.philox(counter, key) == expected


def signed(key: int) -> int:
    """64 bits as an int64 holds them."""
    return key - 2**64 if key >= 2**63 else key


def addresses(num: int) -> Tensor:
    """(5, N): so many random ones, and every combination of the extremes."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**63), 2**63 - 1, (5, num), generator=generator)
    random[:4] &= 0xFFFFFFFF
    word = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
    keys = torch.tensor([0, 1, -1, -(2**63), 2**63 - 1, -(2**32), 2**32 - 1])
    return torch.cat((random, torch.cartesian_prod(word, word, word, word[:2], keys).T), dim=1)


@pytest.fixture(scope="module")
def compiled() -> Philox:
    """Noise words that are one kernel from their first call on."""
    philox = Philox(worth_compiling=1)
    philox(*(torch.arange(9) for _ in range(4)))
    if philox.kernel is words_at:
        pytest.skip("nothing can be compiled here")
    return philox


@pytest.mark.slow
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_compiled_kernel_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...], compiled: Philox
) -> None:
    address = torch.tensor([*counter, signed(key[0] + (key[1] << 32))])
    with torch.inference_mode():
        found = compiled.kernel(address[:, None].repeat(1, 3))
    assert found.tolist() == [list(expected)] * 3


@pytest.mark.slow
def test_compiled_and_eager_rounds_have_the_same_bits(compiled: Philox) -> None:
    with torch.inference_mode():
        address = addresses(1_200_000)
        assert torch.equal(compiled.kernel(address), words_at(address))


@pytest.mark.slow
def test_compiled_noise_is_the_same_in_every_shape_and_compiled_once(
    compiled: Philox, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    key = torch.randint(-(2**63), 2**63 - 1, (300,), generator=generator)
    position, step = torch.arange(300) * 7, torch.arange(300) % 33
    step[::5] = NO_STEP

    def noise() -> list[Tensor]:
        rows = [
            gumbel_rows(key[:num], position=position[:num], step=step[:num], vocab_size=size)
            for num, size in ((1, 3), (1, 50), (2, 4), (3, 513), (300, 1024), (7, 151_936))
        ]
        single = [
            gumbel(key[:num], position=position[:num], step=step[:num], token=position[:num])
            for num in (0, 1, 2, 3, 299)
        ]
        tokens = torch.arange(32)
        at = {"position": position[:, None], "step": step[:, None]}
        return [*rows, *single, gumbel(key[:, None], token=tokens, **at), gumbel(key[3], **SCALAR)]

    expected = noise()
    monkeypatch.setattr(noise_module, "philox", compiled)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for inference in (False, True):
            with torch.inference_mode(inference):
                found = noise()
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


SCALAR = {"position": torch.tensor(5), "step": torch.tensor(1), "token": torch.tensor(9)}


def no_compiler(function: object, **options: object) -> Any:
    raise RuntimeError("no compiler is there")


def late_failure(function: object, **options: object) -> Callable[[Tensor], Tensor]:
    def kernel(address: Tensor) -> Tensor:
        raise OSError("no disk is there")

    return kernel


def wrong_bits(function: object, **options: object) -> Callable[[Tensor], Tensor]:
    return lambda address: words_at(address) ^ 1


@pytest.mark.parametrize("compiler", [no_compiler, late_failure, wrong_bits])
def test_noise_is_made_op_by_op_where_compiling_fails_and_says_so_once(
    compiler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = {name: torch.arange(100) for name in ("position", "step", "token")}
    expected = gumbel(torch.arange(100), **address)
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(noise_module, "philox", Philox(worth_compiling=1))
    for _ in range(3):
        assert torch.equal(gumbel(torch.arange(100), **address), expected)
    assert len(caplog.messages) == 1
    assert "op by op" in caplog.messages[0]


def test_rounds_are_compiled_after_as_much_work_as_compiling_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def compile_(function: Callable[[Tensor], Tensor], **options: object) -> object:
        return lambda address: (sizes.append(address.shape[1]), function(address))[1]

    monkeypatch.setattr(torch, "compile", compile_)
    philox = Philox(worth_compiling=20_000)
    for num in (1, 10, 9_000, 1, 12_000, 1, 7):  # the second of these counts as 8192
        philox(*(torch.arange(num) for _ in range(4)))
    assert sizes == [12_000, 12_000, 7], "tried first, then used, but not for a single address"


@given(
    key=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    step=st.one_of(st.integers(0, 64), st.just(NO_STEP)),
    token=st.integers(0, 2**18),
)
@settings(deadline=None)
def test_noise_is_what_plain_integers_and_floats_make_of_its_address(
    key: int, position: int, step: int, token: int
) -> None:
    found = gumbel(
        torch.tensor(signed(key)),
        position=torch.tensor(position),
        step=torch.tensor(step),
        token=torch.tensor(token),
    )
    expected = reference.gumbel(key, position, step, token)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-7)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 8, 97])
def test_whole_rows_hold_the_same_values_as_single_addresses(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num = 50
    key = torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator)
    position = torch.randint(2**20, (num,), generator=generator)
    step = torch.randint(32, (num,), generator=generator)
    step[::7] = NO_STEP
    rows = gumbel_rows(key, position=position, step=step, vocab_size=vocab_size)
    single = gumbel(
        key[:, None],
        position=position[:, None],
        step=step[:, None],
        token=torch.arange(vocab_size),
    )
    assert rows.shape == (num, vocab_size)
    assert torch.equal(rows, single)


def test_a_value_does_not_depend_on_what_is_asked_for_with_it() -> None:
    tokens = torch.arange(1000)
    many = gumbel(torch.tensor(5), position=torch.tensor(6), step=torch.tensor(7), token=tokens)
    for token in (0, 1, 2, 3, 4, 501, 999):
        one = gumbel(
            torch.tensor([5]),
            position=torch.tensor([6]),
            step=torch.tensor([7]),
            token=torch.tensor([token]),
        )
        assert torch.equal(one[0], many[token])
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    again = gumbel(
        torch.tensor(5), position=torch.tensor(6), step=torch.tensor(7), token=tokens[shuffled]
    )
    assert torch.equal(again, many[shuffled])


def test_noise_stays_within_its_bounds_and_resolves_its_winning_end() -> None:
    ends = gumbel_from_bits(torch.tensor([0, 1, 2, 2**32 - 2, 2**32 - 1]))
    assert 22.87 < float(ends[0]) < GUMBEL_MAX
    assert float(ends[-1]) > -3.2
    assert bool(torch.isfinite(ends).all())
    assert bool((ends[:-1] > ends[1:]).all()), "neighbouring bits at either end are told apart"


@pytest.mark.stat
def test_noise_has_the_moments_of_a_standard_gumbel() -> None:
    """A million values: the bounds are six standard errors, a false alarm below 1e-8."""
    values = gumbel_rows(
        torch.arange(200) * 0x9E3779B97F4A7C15 % 2**63,
        position=torch.arange(200),
        step=torch.arange(200) % 32,
        vocab_size=5_000,
    ).double()
    num = values.numel()
    centred = values - EULER
    assert abs(float(centred.mean())) < 6 * math.sqrt(TRUE_VARIANCE / num)
    # The variance of the squares: kurtosis 5.4 of a Gumbel.
    assert abs(float(centred.square().mean()) - TRUE_VARIANCE) < 6 * TRUE_VARIANCE * math.sqrt(
        4.4 / num
    )
    # And the whole distribution: exp(-exp(-g)) is uniform.
    uniform = torch.exp(-torch.exp(-values)).flatten()
    counts = torch.histc(uniform, bins=200, min=0, max=1)
    assert chi_square_p(counts, torch.full((200,), num / 200)) > 1e-6


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    chi_square = ((counts - expected) ** 2 / expected).sum().double()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, chi_square / 2))


@pytest.mark.stat
@pytest.mark.parametrize(
    "word", ["token", "lane", "position", "step", "key", "key by its upper half", "key by a bit"]
)
def test_neighbouring_addresses_are_uncorrelated(word: str) -> None:
    """A correlation beyond six standard errors: a false alarm below 1e-8 a word."""
    num = 20_000
    where = {
        "key": torch.full((num,), 123456789),
        "position": torch.arange(num) // 100,
        "step": torch.arange(num) % 20,
        "token": torch.arange(num) * 4 % 4096,
    }
    shift = {
        "token": ("token", 4),
        "lane": ("token", 1),
        "position": ("position", 1),
        "step": ("step", 1),
        "key": ("key", 1),
        "key by its upper half": ("key", 1 << 32),
        "key by a bit": ("key", -(1 << 63)),
    }
    name, by = shift[word]
    if name == "key":
        where["key"] = torch.arange(num) * 7919
    beside = dict(where)
    beside[name] = where[name] + by
    one, other = (
        gumbel(a["key"], position=a["position"], step=a["step"], token=a["token"])
        for a in (where, beside)
    )
    assert not bool((one == other).all())
    correlation = float(torch.corrcoef(torch.stack((one, other)).double())[0, 1])
    assert abs(correlation) < 6 / math.sqrt(num), correlation


@pytest.mark.parametrize("bit", range(64))
def test_every_bit_of_the_key_counts(bit: int) -> None:
    flipped = 1 << bit
    keys = torch.tensor([0, signed(flipped)])
    rows = gumbel_rows(
        keys,
        position=torch.zeros(2, dtype=torch.int64),
        step=torch.zeros(2, dtype=torch.int64),
        vocab_size=64,
    )
    assert bool((rows[0] != rows[1]).float().mean() > 0.9)


def test_every_word_of_the_address_counts() -> None:
    base = {"key": 9, "position": 3, "step": 2, "token": 1}
    values = []
    for name in (None, *base):
        at = {key: torch.tensor(value + (key == name)) for key, value in base.items()}
        values.append(
            float(gumbel(at["key"], position=at["position"], step=at["step"], token=at["token"]))
        )
    no_step = gumbel(
        torch.tensor(9), position=torch.tensor(3), step=torch.tensor(NO_STEP), token=torch.tensor(1)
    )
    assert len({*values, float(no_step)}) == 6


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4, 1e8, 1e30])
def test_a_vocabulary_too_large_for_whole_rows_has_the_same_winners(scale: float) -> None:
    """Beyond 2048 tokens noise is evaluated only where it can matter; the winner is the same."""
    generator = torch.Generator().manual_seed(1)
    num, vocab_size = 40, 2500
    scores = scale * torch.randn(num, vocab_size, generator=generator)
    scores[::3] = scores[::3].round()  # ties
    scores[1::4] = -scores[1::4].abs() - scale  # nothing above zero
    scores[2::5, 1::2] = -math.inf
    scores[3, :] = -math.inf
    scores[3, 77] = -5.0
    scores[4, :] = 3.0  # flat
    address = {
        "key": torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator),
        "position": torch.arange(num),
        "step": torch.arange(num) % 7,
    }
    found = perturbed_argmax(scores, **address)
    noise = gumbel_rows(
        address["key"],
        position=address["position"],
        step=address["step"],
        vocab_size=vocab_size,
    )
    dense = scores + noise
    assert torch.equal(found, dense.argmax(dim=1))
    first = [int((row == row.max()).nonzero()[0]) for row in dense]
    assert found.tolist() == first, "the lowest id wins a tie"
    assert int(found[3]) == 77


VOCAB_SIZE = 151_936


def scores_of(kind: str, num: int) -> Tensor:
    """(num, 151,936) logits over T: as text has them, sure of a token, or behind a nucleus."""
    generator = torch.Generator().manual_seed(4)
    rank = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator) + 1.0 for _ in range(num)])
    scores = -1.1 * rank.log() + 0.3 * torch.randn(num, VOCAB_SIZE, generator=generator)
    if kind == "sure":
        scores = torch.where(rank == 1, 0.0, 2.5 * scores - 12.0)
    return scores.masked_fill(rank > 40, -math.inf) if kind == "nucleus" else scores


@pytest.mark.parametrize(
    ("kind", "most_made"), [("text", 1.0), ("sure", 0.01), ("nucleus", 0.001), ("mixed", 0.3)]
)
def test_noise_of_a_real_vocabulary_is_never_held_and_made_where_it_can_matter(
    kind: str, most_made: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where bits become floats: what is alive at once, and how much there is in all."""
    kinds = ("sure", "text", "nucleus", "sure") if kind == "mixed" else (kind,) * 4
    scores = torch.cat([scores_of(one, 4)[at : at + 1] for at, one in enumerate(kinds)])
    num = len(scores)
    address = {
        "key": torch.arange(num) * 0x9E3779B97F4A7C15 % 2**63,
        "position": torch.arange(num),
        "step": torch.arange(num),
    }
    made: list[int] = []

    def counted(bits: Tensor) -> Tensor:
        made.append(bits.numel())
        return gumbel_from_bits(bits)

    monkeypatch.setattr(noise_module, "gumbel_from_bits", counted)
    found = perturbed_argmax(scores, **address)
    monkeypatch.undo()
    assert max(made) <= 4 * at_once(scores.device) < num * VOCAB_SIZE / 2
    assert sum(made) <= most_made * num * VOCAB_SIZE + num
    dense = scores + gumbel_rows(**address, vocab_size=VOCAB_SIZE)
    assert torch.equal(found, dense.argmax(dim=1))


@pytest.mark.parametrize("tile", [64, 1000, 4096])
def test_rows_cut_into_tiles_have_the_winners_of_whole_rows(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transition_module, "_TILE", tile)
    monkeypatch.setattr(transition_module, "at_once", lambda device: 5 * tile // 4)
    generator = torch.Generator().manual_seed(6)
    for vocab_size in (1, 7, 1000, 2501):
        scores = torch.randn(13, vocab_size, generator=generator)
        scores[1], scores[2] = 1e12, -math.inf
        scores[3] = 1e9 * scores[3].round()  # ties, and nothing but them
        address = {"key": torch.arange(13), "position": torch.arange(13), "step": torch.arange(13)}
        dense = scores + gumbel_rows(**address, vocab_size=vocab_size)
        assert torch.equal(perturbed_argmax(scores, **address), dense.argmax(dim=1))


def test_exact_ties_of_perturbed_scores_go_to_the_lowest_id_on_either_path() -> None:
    for vocab_size in (64, 2100):
        scores = torch.full((3, vocab_size), 1e12)  # the noise is lost in rounding
        scores[:, :5] = 0.0
        winners = perturbed_argmax(
            scores,
            key=torch.arange(3),
            position=torch.arange(3),
            step=torch.zeros(3, dtype=torch.int64),
        )
        assert winners.tolist() == [5, 5, 5]


@pytest.mark.stat
@pytest.mark.parametrize("vocab_size", [50, 2100])
def test_perturbed_winners_are_draws_from_the_softmax(vocab_size: int) -> None:
    """Chi-square, false alarm 1e-6, for whole rows and for the sparse path."""
    generator = torch.Generator().manual_seed(2)
    # Peaked, so that the sparse path leaves most of the noise alone.
    scores = (2.0 if vocab_size < 100 else 9.0) * torch.randn(vocab_size, generator=generator)
    num, at_once = 40_000, 1000
    counts = torch.zeros(vocab_size)
    for first in range(0, num, at_once):
        index = torch.arange(first, first + at_once)
        winners = perturbed_argmax(
            scores.expand(at_once, -1), key=index * 31 + 7, position=index % 512, step=index % 32
        )
        counts += torch.bincount(winners, minlength=vocab_size)
    expected = num * scores.double().softmax(dim=0)
    often = expected > 10
    counts = torch.cat((counts[often], counts[~often].sum()[None])).double()
    expected = torch.cat((expected[often], expected[~often].sum()[None]))
    kept = expected > 0
    assert int(counts.sum()) == num
    assert chi_square_p(counts[kept], expected[kept]) > 1e-6


@pytest.mark.stat
@pytest.mark.parametrize("apart", [0.0, 0.3, 1.0, 2.0])
def test_two_distributions_under_one_noise_agree_as_often_as_the_formula_says(apart: float) -> None:
    """P(match) = sum_j 1 / sum_i max(p_i/p_j, q_i/q_j) (Daliri et al.).

    Six standard errors: a false alarm below 1e-8.
    """
    generator = torch.Generator().manual_seed(3)
    vocab_size, num = 12, 40_000
    first = torch.randn(vocab_size, generator=generator)
    second = first + apart * torch.randn(vocab_size, generator=generator)
    p, q = first.double().softmax(0), second.double().softmax(0)
    ratios = torch.maximum(p[:, None] / p[None, :], q[:, None] / q[None, :])  # (i, j)
    formula = float((1 / ratios.sum(dim=0)).sum())
    distance = 0.5 * float((p - q).abs().sum())
    assert (1 - distance) / (1 + distance) - 1e-9 <= formula <= 1 - distance + 1e-9
    index = torch.arange(num)
    noise = {"key": index * 17, "position": index % 100, "step": index % 30}
    matches = perturbed_argmax(first.expand(num, -1), **noise) == perturbed_argmax(
        second.expand(num, -1), **noise
    )
    found = float(matches.double().mean())
    spread = math.sqrt(max(formula * (1 - formula), 1e-12) / num)
    assert abs(found - formula) <= 6 * spread + 1e-9, (found, formula)
