"""Addressed noise: known answers, no structure in any word of the address, the right law."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spot_batch.decoding.transition import perturbed_argmax
from spot_batch.noise import (
    GUMBEL_MAX,
    NO_STEP,
    gumbel,
    gumbel_from_bits,
    gumbel_rows,
    philox4x32,
)
from tests.exact import reference

EULER = 0.5772156649015329
TRUE_VARIANCE = math.pi**2 / 6


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected
    assert reference.philox(counter, key) == expected


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
        torch.tensor(key - 2**64 if key >= 2**63 else key),
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
    keys = torch.tensor([0, flipped - 2**64 if flipped >= 2**63 else flipped])
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
    """P(match) = sum_j 1 / sum_i max(p_i/p_j, q_i/q_j): algorithms.md A.5 (Daliri et al.).

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
