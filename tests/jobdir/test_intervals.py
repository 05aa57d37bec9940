from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spot_batch.jobdir.intervals import IntervalSet

IDS = st.lists(st.integers(0, 60), max_size=60)


@given(IDS, IDS)
def test_it_is_a_set_however_it_was_filled(one_by_one: list[int], at_once: list[int]) -> None:
    ids = IntervalSet()
    for number in one_by_one:
        ids.add(number)
    ids.add_many(at_once)
    want = {*one_by_one, *at_once}
    assert list(ids) == sorted(want)
    assert len(ids) == len(want)
    assert all((number in ids) == (number in want) for number in range(70))
    assert ids == IntervalSet.of(want)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=20))
def test_ranges_are_disjoint_and_never_touch(added: list[tuple[int, int]]) -> None:
    ids = IntervalSet(range(start, start + length) for start, length in added)
    ranges = list(ids.ranges())
    assert all(before.stop < after.start for before, after in pairwise(ranges))
    assert all(len(each) > 0 for each in ranges)
    want = {n for start, length in added for n in range(start, start + length)}
    assert set(ids) == want
    assert len(ids) == len(want)


@given(IDS, st.integers(0, 70))
def test_gaps_are_what_is_missing(ids: list[int], total: int) -> None:
    gaps = list(IntervalSet.of(ids).gaps(total))
    assert {n for gap in gaps for n in gap} == set(range(total)) - set(ids)
    assert all(len(gap) > 0 for gap in gaps)


@given(IDS)
def test_its_text_reads_back(ids: list[int]) -> None:
    whole = IntervalSet.of(ids)
    assert IntervalSet.parse(str(whole)) == whole


@given(IDS, IDS)
def test_containing_all_of_another_is_being_its_superset(
    ours: list[int], theirs: list[int]
) -> None:
    contains = IntervalSet.of(ours).contains_all(IntervalSet.of(theirs))
    assert contains == (set(theirs) <= set(ours))


def test_its_text_is_short() -> None:
    assert str(IntervalSet([range(16), range(20, 21)])) == "0-15,20"


def test_memory_grows_with_the_gaps_and_not_with_the_ids() -> None:
    ids = IntervalSet()
    ids.add_range(0, 10**12)
    ids.add_range(2 * 10**12, 3 * 10**12)
    assert len(list(ids.ranges())) == 2
    assert len(ids) == 2 * 10**12
