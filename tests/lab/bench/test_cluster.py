"""Groups of cells on a Ray of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from spot_batch.lab.bench.cells import MeasuredCells, run_cells
from spot_batch.lab.bench.cluster import spread_over


@dataclass(frozen=True)
class Row:
    number: int
    pid: int
    opened: int

    @property
    def cell(self) -> int:
        return self.number


@dataclass(frozen=True)
class Squares:
    """Refuses the number 13; a worker that is told to die does so once."""

    note: Path

    def open(self) -> Callable[[Sequence[int]], Iterator[Row]]:
        opened = id(self)

        def measure(numbers: Sequence[int]) -> Iterator[Row]:
            for number in numbers:
                if number == 13:
                    raise ValueError("13 is refused")
                if number == 7 and not self.note.exists():
                    self.note.write_text("gone")
                    os._exit(1)
                yield Row(number, os.getpid(), opened)

        return measure


@pytest.mark.ray
@pytest.mark.slow  # two Rays
def test_groups_are_measured_by_few_workers_and_a_lost_one_comes_back(tmp_path: Path) -> None:
    kept: MeasuredCells[Row] = MeasuredCells(tmp_path / "cells", Row, {"command": "squares"})
    groups = [[1, 2], [3], [7, 8], [9], [10]]
    spread = spread_over("local", num_threads=1)
    found = list(run_cells(Squares(tmp_path / "note"), groups, kept, spread=spread))
    assert sorted(row.number for row in found) == [1, 2, 3, 7, 8, 9, 10]
    assert (tmp_path / "note").exists()
    by_number = {row.number: row.pid for row in found}
    assert by_number[1] == by_number[2]
    assert by_number[7] == by_number[8]
    assert os.getpid() not in by_number.values()
    assert not list(run_cells(Squares(tmp_path / "note"), groups, kept, spread=spread))
    with pytest.raises(ValueError, match=r"^13 is refused$"):
        list(run_cells(Squares(tmp_path / "note"), [[13]], kept, spread=spread))
