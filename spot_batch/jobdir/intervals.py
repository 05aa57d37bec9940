"""Sets of sample ids as sorted disjoint ranges: memory grows with the gaps, not with the ids."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class IntervalSet:
    """A mutable set of whole numbers at least 0, kept as half-open ranges that never touch."""

    __slots__ = ("_count", "_starts", "_stops")

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        for each in ranges:
            self.add_range(each.start, each.stop)

    @classmethod
    def of(cls, ids: Iterable[int]) -> IntervalSet:
        result = cls()
        result.add_many(ids)
        return result

    @classmethod
    def parse(cls, text: str) -> IntervalSet:
        """The set that `str` wrote: `0-15,20` is 0 to 15, and 20."""
        result = cls()
        for piece in filter(None, text.split(",")):
            first, dash, last = piece.partition("-")
            result.add_range(int(first), int(last if dash else first) + 1)
        return result

    def add(self, number: int) -> None:
        self.add_range(number, number + 1)

    def add_range(self, start: int, stop: int) -> None:
        """Adds [start, stop)."""
        assert start >= 0, f"ids are at least 0, got {start}"
        if start >= stop:
            return
        left = bisect_left(self._stops, start)  # the first range that touches or follows
        right = bisect_right(self._starts, stop)  # one past the last range that touches
        if left < right:
            start = min(start, self._starts[left])
            stop = max(stop, self._stops[right - 1])
            self._count -= sum(
                end - begin
                for begin, end in zip(
                    self._starts[left:right], self._stops[left:right], strict=True
                )
            )
        self._starts[left:right] = [start]
        self._stops[left:right] = [stop]
        self._count += stop - start

    def add_many(self, ids: Iterable[int]) -> None:
        start = stop = 0
        for number in sorted(ids):
            if number == stop and start < stop:
                stop += 1
            elif number >= stop or start == stop:
                self.add_range(start, stop)
                start, stop = number, number + 1
        self.add_range(start, stop)

    def update(self, other: IntervalSet) -> None:
        for each in other.ranges():
            self.add_range(each.start, each.stop)

    def ranges(self) -> Iterator[range]:
        """The ranges in ascending order."""
        return (range(a, b) for a, b in zip(self._starts, self._stops, strict=True))

    def gaps(self, total: int) -> Iterator[range]:
        """What of [0, total) is not in the set, as ascending ranges."""
        before = 0
        for start, stop in zip(self._starts, self._stops, strict=True):
            if start >= total:
                break
            if before < start:
                yield range(before, start)
            before = stop
        if before < total:
            yield range(before, total)

    def covers(self, ids: range) -> bool:
        """Whether every number of a range of step 1 is in the set."""
        if len(ids) == 0:
            return True
        index = bisect_right(self._starts, ids.start) - 1
        return index >= 0 and ids.stop <= self._stops[index]

    def contains_all(self, other: IntervalSet) -> bool:
        return all(self.covers(each) for each in other.ranges())

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.covers(range(number, number + 1))

    def __iter__(self) -> Iterator[int]:
        for each in self.ranges():
            yield from each

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return ",".join(
            str(each.start) if len(each) == 1 else f"{each.start}-{each.stop - 1}"
            for each in self.ranges()
        )

    def __repr__(self) -> str:
        return f"IntervalSet({self})"
