"""The transition: what is committed, which ties go where, and what may not matter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spot_batch.engine.transition import (
    Choice,
    Rule,
    States,
    log_odds_of,
    select,
    threshold_log_odds,
    transition,
)
from spot_batch.records.sampling import SamplingParams
from tests.exact import reference

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = ("max", "sampled", "sampled_tempered", "sampled_filtered")
GREEDY = Rule("single", 0.9, "max", "position_step")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def states_of(masked: Tensor, **given: Any) -> States:
    """States of (n, W) masks; whatever is not given is greedy, unfiltered and at the start."""
    num = len(masked)
    usual = {
        "start": torch.zeros(num, dtype=torch.int64),
        "num_committed": (~masked).sum(dim=1),
        "noise_key": torch.arange(num) * 1_000_003,
        "temperature": torch.zeros(num),
        "top_p": torch.ones(num),
        "top_k": torch.zeros(num, dtype=torch.int64),
    }
    return States(masked=masked, **(usual | given))


def open_block(*rows: list[float]) -> tuple[Tensor, States]:
    """One state, all masked, with these logits."""
    logits = torch.tensor([rows])
    return logits, states_of(torch.ones(1, len(rows), dtype=torch.bool))


def committed(choice: Choice, index: int = 0) -> dict[int, int]:
    """What one state commits: position -> token."""
    positions = choice.commit[index].nonzero().squeeze(1).tolist()
    return {position: int(choice.token[index, position]) for position in positions}


def by_reference(logits: Tensor, states: States, rule: Rule, index: int) -> tuple[dict, bool]:
    """The same by the plain decoder's own step, and whether it was close."""
    params = SamplingParams(
        max_new_tokens=1,
        temperature=float(states.temperature[index]),
        top_p=float(states.top_p[index]),
        top_k=int(states.top_k[index]),
        unmasking=rule.unmasking,
        threshold=rule.threshold,
        confidence=rule.confidence,
        noise_rule=rule.noise_rule,
    )
    commits, near_tie = reference.next_commits(
        logits[index].numpy(),
        masked=states.masked[index].tolist(),
        start=int(states.start[index]),
        num_committed=int(states.num_committed[index]),
        params=params,
        noise_key=int(states.noise_key[index]) % 2**64,
        near=1e-5,
    )
    return dict(commits), near_tie


@given(data=st.data(), integers=st.booleans())
@settings(deadline=None, max_examples=120)
def test_any_logits_commit_what_the_plain_step_commits(data: st.DataObject, integers: bool) -> None:
    width, vocab_size = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    num = 4
    logits = data.draw(st.sampled_from((1.0, 4.0, 20.0))) * torch.randn(
        num, width, vocab_size, generator=generator
    )
    logits = logits.round() if integers else logits
    logits[:, :, data.draw(st.integers(0, vocab_size - 1))] = -math.inf
    masked = torch.rand(num, width, generator=generator) < 0.6
    masked[torch.arange(num), torch.randint(width, (num,), generator=generator)] = True
    states = states_of(
        masked,
        start=torch.randint(100, (num,), generator=generator) * width,
        num_committed=torch.randint(width, (num,), generator=generator),
        noise_key=torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator),
        temperature=torch.tensor(data.draw(st.sampled_from([(0.0, 0.7, 1.0, 1.5), (1.0,) * num]))),
        top_p=torch.tensor(data.draw(st.sampled_from([(1.0, 0.83, 0.5, 0.97), (1.0,) * num]))),
        top_k=torch.tensor(data.draw(st.sampled_from([(0, 1, 3, 1000), (0,) * num]))),
    )
    rule = Rule(
        data.draw(st.sampled_from(("single", "threshold"))),
        data.draw(st.sampled_from((0.2, 0.5, 0.9, 1.0))),
        data.draw(st.sampled_from(RULES)),
        data.draw(st.sampled_from(("position_step", "position"))),
    )
    choice = transition(logits, states, rule)
    for index in range(num):
        expected, near_tie = by_reference(logits, states, rule, index)
        assert near_tie or committed(choice, index) == expected


def test_ties_go_to_the_lowest_id_and_the_lowest_position() -> None:
    logits, states = open_block([0.0, 1.0, 1.0], [0.0, 2.0, 2.0], [2.0, 0.0, 2.0])
    assert committed(transition(logits, states, GREEDY)) == {1: 1}
    logits, states = open_block([0.0, 1.0], [5.0, 5.0], [1.0, 0.0], [0.0, 1.0])
    assert committed(transition(logits, states, GREEDY)) == {0: 1}
    masked = states.masked.clone()
    masked[0, 0] = False
    assert committed(transition(logits, replace(states, masked=masked), GREEDY)) == {2: 0}


@pytest.mark.parametrize("width", [1, 2, 31, 64])
@pytest.mark.parametrize("vocab_size", [2, 17, 64, 5000])
def test_rows_that_are_all_alike_commit_their_first_position_and_id(
    width: int, vocab_size: int
) -> None:
    """Wide enough for an argmax that works in lanes to prefer another maximum."""
    logits = torch.zeros(2, width, vocab_size)
    logits[1, :, 0] = -math.inf
    masked = torch.ones(2, width, dtype=torch.bool)
    masked[1, : width // 2] = False
    choice = transition(logits, states_of(masked), GREEDY)
    assert committed(choice, 0) == {0: 0}
    assert committed(choice, 1) == {width // 2: 1}


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 100.0])
@pytest.mark.parametrize("confidence", RULES)
@pytest.mark.parametrize("mask_id", [0, 6])
def test_the_mask_id_is_never_written(temperature: float, confidence: Any, mask_id: int) -> None:
    num = 300
    logits = torch.randn(num, 3, 7, generator=torch.Generator().manual_seed(1))
    logits[:, :, mask_id] = -math.inf
    states = states_of(
        torch.ones(num, 3, dtype=torch.bool), temperature=torch.full((num,), temperature)
    )
    choice = transition(logits, states, Rule("single", 0.9, confidence, "position_step"))
    assert bool((choice.token != mask_id).all())
    seen = {token for index in range(num) for token in committed(choice, index).values()}
    assert len(seen) == 6 or temperature < 1


@pytest.mark.parametrize("confidence", RULES)
@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_one_possible_token_writes_it(
    temperature: float, unmasking: Any, confidence: Any
) -> None:
    """Its confidence is infinite: it goes first, and it passes every threshold below one."""
    rows = torch.full((1, 3, 5), -math.inf)
    rows[0, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0, -math.inf])
    rows[0, 1, 3] = -7.0
    rows[0, 2, 1] = 2.0
    states = states_of(
        torch.ones(1, 3, dtype=torch.bool),
        temperature=torch.tensor([temperature]),
        top_p=torch.tensor([0.9]),
    )
    choice = transition(rows, states, Rule(unmasking, 0.99, confidence, "position_step"))
    assert committed(choice) == ({1: 3} if unmasking == "single" else {1: 3, 2: 1})
    assert not bool(choice.log_odds.isnan().any())
    certain = transition(rows, states, Rule(unmasking, 1.0, confidence, "position_step"))
    assert committed(certain) == {1: 3}, "nothing is above a threshold of one"


def test_log_odds_tell_saturated_probabilities_apart() -> None:
    """1 - 1e-9 and 1 - 2e-9 are both 1.0 in float32; their log-odds are not the same."""
    doubts = (2e-9, 1e-9, 1e-12, 1e-15)
    rows = torch.tensor([[0.0, math.log(doubt)] for doubt in doubts])
    assert bool((rows.softmax(dim=1)[:, 0] == 1.0).all()), "the probabilities do saturate"
    odds = log_odds_of(rows, torch.zeros(len(doubts), dtype=torch.int64))
    assert bool((odds[1:] > odds[:-1]).all())
    for found, doubt in zip(odds.tolist(), doubts, strict=True):
        assert found == pytest.approx(-math.log(doubt), rel=1e-6)
    logits, states = open_block(*rows.tolist())
    assert committed(transition(logits, states, GREEDY)) == {3: 0}
    assert committed(transition(logits[:, :2], states_of(states.masked[:, :2]), GREEDY)) == {1: 0}


@given(
    row=st.lists(st.floats(-50, 50), min_size=2, max_size=30),
    data=st.data(),
)
@settings(deadline=None)
def test_log_odds_are_those_of_the_softmax(row: list[float], data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    logits = torch.tensor(row)
    exact = reference.log_odds(logits.tolist(), token)
    found = float(log_odds_of(logits, torch.tensor(token)))
    assert found == pytest.approx(exact, rel=2e-6, abs=2e-5)


def test_a_threshold_is_strict() -> None:
    threshold = 0.5  # log-odds 0: two tokens of one logit, and nothing else
    tied, above = [3.0, 3.0, -math.inf], [3.0, 2.999, -math.inf]
    rule = Rule("threshold", threshold, "max", "position_step")
    assert threshold_log_odds(threshold) == 0.0
    logits, states = open_block(tied, above, tied)
    assert committed(transition(logits, states, rule)) == {1: 0}
    logits, states = open_block(tied, tied)
    assert committed(transition(logits, states, rule)) == {0: 0}, "none passes: the best one, alone"
    logits, states = open_block(above, tied, above)
    assert committed(transition(logits, states, rule)) == {0: 0, 2: 0}


def test_below_the_threshold_the_most_confident_position_goes_alone() -> None:
    rule = Rule("threshold", 0.9, "max", "position_step")
    logits, states = open_block([1.0, 0.0], [0.0, 1.5], [1.4, 0.0])
    assert committed(transition(logits, states, rule)) == {1: 1}
    logits, states = open_block([9.0, 0.0], [0.0, 1.5], [0.0, 4.0])
    assert committed(transition(logits, states, rule)) == {0: 0, 2: 1}
    with pytest.raises(ValueError, match="threshold"):
        threshold_log_odds(0.0)


def test_confidences_below_everything_still_beat_positions_that_are_not_masked() -> None:
    masked = torch.tensor([[False, True, True]])
    log_odds = torch.tensor([[-math.inf, -math.inf, -math.inf]])
    for unmasking in ("single", "threshold"):
        chosen = select(log_odds, masked, Rule(unmasking, 0.9, "max", "position_step"))  # type: ignore[arg-type]
        assert chosen.tolist() == [[False, True, False]]
    nothing = select(log_odds, torch.zeros_like(masked), GREEDY)
    assert not bool(nothing.any()), "a state without masks commits nothing"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("unmasking", ["single", "threshold"])
@pytest.mark.parametrize("confidence", RULES)
def test_what_stands_at_unmasked_positions_does_not_matter(
    confidence: Any, unmasking: Any, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(4)
    num, width, vocab_size = 64, 5, 9
    logits = 3 * torch.randn(num, width, vocab_size, generator=generator)
    masked = torch.rand(num, width, generator=generator) < 0.5
    masked[:, 2] = True
    states = states_of(
        masked,
        temperature=torch.full((num,), temperature),
        top_p=torch.full((num,), 0.9),
    )
    rule = Rule(unmasking, 0.6, confidence, "position_step")
    expected = transition(logits, states, rule)
    for junk in (100.0, -100.0, math.inf, math.nan):
        spoilt = torch.where(masked[:, :, None], logits, torch.tensor(junk))
        found = transition(spoilt, states, rule)
        assert torch.equal(found.commit, expected.commit)
        assert torch.equal(found.token[masked], expected.token[masked])
        assert torch.equal(found.log_odds, expected.log_odds)
    assert not bool((expected.commit & ~masked).any())
    assert bool(expected.commit.any(dim=1).all())


@pytest.mark.parametrize("noise_rule", ["position_step", "position"])
@pytest.mark.parametrize("confidence", RULES)
def test_a_state_is_left_alike_alone_and_in_any_batch(confidence: Any, noise_rule: Any) -> None:
    generator = torch.Generator().manual_seed(6)
    num, width, vocab_size = 24, 4, 300
    logits = 2 * torch.randn(num, width, vocab_size, generator=generator)
    masked = torch.rand(num, width, generator=generator) < 0.5
    masked[:, 1] = True
    states = states_of(
        masked,
        start=torch.arange(num) * width,
        temperature=torch.tensor([0.0, 0.7, 1.5]).repeat(num // 3),
        top_p=torch.tensor([1.0, 0.9]).repeat(num // 2),
        top_k=torch.tensor([0, 0, 0, 5]).repeat(num // 4),
    )
    rule = Rule("threshold", 0.3, confidence, noise_rule)
    whole = transition(logits, states, rule)
    order = torch.randperm(num, generator=generator)
    parts = [torch.tensor([at]) for at in range(num)] + [order, order[:7], order[7:]]
    for index in parts:
        part = transition(logits[index].clone(), states.take(index), rule)
        assert torch.equal(part.commit, whole.commit[index])
        assert torch.equal(part.token, whole.token[index])
        assert torch.equal(part.log_odds, whole.log_odds[index])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_decisions_over_a_real_vocabulary_do_not_depend_on_the_batch(num_threads: int) -> None:
    """Sums over so many entries are cut among threads where there is one row alone."""
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(7)
    num, width, vocab_size = 3, 3, 40_001
    logits = 3 * torch.randn(num, width, vocab_size, generator=generator)
    masked = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    states = states_of(masked, temperature=torch.tensor([0.7, 0.7, 0.0]))
    for unmasking in ("single", "threshold"):
        rule = Rule(unmasking, 0.01, "sampled_tempered", "position_step")  # type: ignore[arg-type]
        whole = transition(logits, states, rule)
        for index in (torch.tensor([0]), torch.tensor([1]), torch.tensor([2, 0])):
            part = transition(logits[index].clone(), states.take(index), rule)
            assert torch.equal(part.commit, whole.commit[index])
            assert torch.equal(part.token[part.commit], whole.token[index][part.commit])
            several = states.masked[index].sum(dim=1) > 1  # one open position is the choice anyhow
            assert torch.equal(part.log_odds[several], whole.log_odds[index][several])


def drawn_tokens(row: list[float], num: int, **given: Any) -> set[int]:
    """Which tokens are ever drawn from one row of logits."""
    logits = torch.tensor(row).expand(num, 1, -1)
    states = states_of(
        torch.ones(num, 1, dtype=torch.bool),
        temperature=torch.full((num,), given.get("temperature", 1.0)),
        top_p=torch.full((num,), given.get("top_p", 1.0)),
        top_k=torch.full((num,), given.get("top_k", 0)),
    )
    rule = Rule("single", 0.9, "sampled_filtered", "position_step")
    return set(transition(logits, states, rule).token.flatten().tolist())


def logs(*probabilities: float) -> list[float]:
    return [math.log(one) if one else -math.inf for one in probabilities]


@pytest.mark.parametrize(
    ("row", "given", "expected"),
    [
        # top-k counts tokens; ties by id.
        (logs(0.1, 0.2, 0.3, 0.4), {"top_k": 2}, {2, 3}),
        (logs(0.25, 0.25, 0.25, 0.25), {"top_k": 2}, {0, 1}),
        (logs(0.3, 0.2, 0.2, 0.3), {"top_k": 3}, {0, 1, 3}),
        (logs(0.25, 0.25, 0.25, 0.25), {"top_k": 9}, {0, 1, 2, 3}),
        # The token that crosses top_p is kept, the next is not.
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.3}, {0}),
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.45}, {0, 1}),
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.75}, {0, 1, 2}),
        (logs(0.1, 0.2, 0.3, 0.4), {"top_p": 0.75}, {1, 2, 3}),
        # A mass above of exactly top_p is enough; dyadic, so that it is exact.
        (logs(0.5, 0.25, 0.125, 0.125), {"top_p": 0.5}, {0}),
        (logs(0.5, 0.25, 0.125, 0.125), {"top_p": 0.75}, {0, 1}),
        (logs(0.25, 0.25, 0.25, 0.25), {"top_p": 0.5}, {0, 1}),
        # Ties at the edge of the nucleus go by id.
        (logs(0.2, 0.4, 0.2, 0.2), {"top_p": 0.5}, {0, 1}),
        # top-k first, then the nucleus of what is left: 0.4 / 0.7 is above 0.5, 0.4 is not.
        (logs(0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.5}, {0}),
        (logs(0.4, 0.3, 0.2, 0.1), {"top_k": 3, "top_p": 0.5}, {0, 1}),
        # The filters see the tempered distribution: 0.4^2 : 0.3^2 : 0.2^2 : 0.1^2.
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.5, "temperature": 0.5}, {0}),
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.9, "temperature": 0.5}, {0, 1, 2}),
        # What may not be written is not written, however wide the filter.
        (logs(0.5, 0.0, 0.5), {"top_k": 3, "top_p": 0.999}, {0, 2}),
    ],
)
def test_filters_keep_what_they_say(
    row: list[float], given: dict[str, Any], expected: set[int]
) -> None:
    assert drawn_tokens(row, 400, **given) == expected


def test_each_rule_reads_the_distribution_it_is_named_after() -> None:
    """A filter of one token: certain where filtered, doubtful in the other two, and so on."""
    probabilities = (0.6, 0.3, 0.1)
    logits = torch.tensor([[logs(*probabilities)]])
    states = states_of(
        torch.ones(1, 1, dtype=torch.bool),
        temperature=torch.tensor([0.5]),
        top_k=torch.tensor([1]),
    )
    tempered = 0.36 / (0.36 + 0.09 + 0.01)
    expected = {
        "max": math.log(0.6 / 0.4),
        "sampled": math.log(0.6 / 0.4),
        "sampled_tempered": math.log(tempered / (1 - tempered)),
        "sampled_filtered": math.inf,
    }
    for confidence, value in expected.items():
        rule = Rule("single", 0.9, confidence, "position_step")  # type: ignore[arg-type]
        assert float(transition(logits, states, rule).log_odds) == pytest.approx(value, rel=1e-5)
    # Where the draw is not the most probable token, `max` and `sampled` part.
    num = 200
    many = states_of(torch.ones(num, 1, dtype=torch.bool), temperature=torch.full((num,), 1.0))
    by_rule = {
        confidence: transition(
            logits.expand(num, 1, 3), many, Rule("single", 0.9, confidence, "position_step")
        )
        for confidence in ("max", "sampled")
    }
    assert bool((by_rule["max"].log_odds == by_rule["max"].log_odds[0]).all())
    odds = by_rule["sampled"].log_odds.flatten().sigmoid()
    wanted = torch.tensor(probabilities)[by_rule["sampled"].token.flatten()]
    torch.testing.assert_close(odds, wanted)
    assert len(set(by_rule["sampled"].token.flatten().tolist())) == 3


def test_greedy_states_ignore_noise_filters_and_rule() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(16, 4, 11, generator=generator)
    masked = torch.ones(16, 4, dtype=torch.bool)
    plain = transition(logits, states_of(masked), GREEDY)
    for confidence in RULES:
        states = states_of(
            masked,
            noise_key=torch.arange(16) - 8,
            top_p=torch.full((16,), 0.1),
            top_k=torch.full((16,), 1),
        )
        found = transition(logits, states, Rule("single", 0.9, confidence, "position"))
        for name in ("token", "log_odds", "commit"):
            assert torch.equal(getattr(found, name), getattr(plain, name))


def test_noise_by_position_stays_while_noise_by_step_does_not() -> None:
    num, width, vocab_size = 50, 4, 20
    logits = torch.zeros(num, width, vocab_size)
    masked = torch.ones(num, width, dtype=torch.bool)
    early = states_of(masked, temperature=torch.ones(num))
    late = replace(early, num_committed=torch.full((num,), 3))
    same = {
        noise_rule: (
            transition(logits, early, Rule("single", 0.9, "max", noise_rule)).token  # type: ignore[arg-type]
            == transition(logits, late, Rule("single", 0.9, "max", noise_rule)).token  # type: ignore[arg-type]
        )
        .double()
        .mean()
        for noise_rule in ("position", "position_step")
    }
    assert same["position"] == 1.0
    assert same["position_step"] < 0.3
    # Noise belongs to the absolute position: a block further on draws anew.
    further = replace(early, start=early.start + width)
    rule = Rule("single", 0.9, "max", "position")
    moved = transition(logits, early, rule).token == transition(logits, further, rule).token
    assert moved.double().mean() < 0.3
