"""What a round costs on a device: seconds of a forward, of a drafting wave and of a visited state.

The curve of a device is a staircase whose steps no formula knows, so it is
measured (measure.py) on the device that decodes. It decides speed alone, never an output.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The numbers of slots at which a forward is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyTable:
    """Seconds on one device, as measured or as a formula has them.

    forward_s[k][s]: a forward of `slots[s]` slots over `num_keys[k]` keys each. draft_s[q]: one
    wave of `queries[q]` questions to the drafter, the trees' bookkeeping included; empty where
    there is no drafter. visit_s[n]: head and transition at `states[n]` visited states, greedy;
    noisy_visit_s[n] the same with noise. Between entries a line, beyond the last one the last line.
    """

    slots: tuple[int, ...]
    num_keys: tuple[int, ...]
    forward_s: tuple[tuple[float, ...], ...]
    queries: tuple[int, ...] = ()
    draft_s: tuple[float, ...] = ()
    states: tuple[int, ...] = (1,)
    visit_s: tuple[float, ...] = (0.0,)
    noisy_visit_s: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        self._check_axis("slots", self.slots)
        self._check_axis("num_keys", self.num_keys)
        for row in self.forward_s:
            self._check_seconds("forward_s", row, self.slots)
            if min(row) <= 0.0:
                raise ValueError("forward_s: a forward takes more than no time")
        if len(self.forward_s) != len(self.num_keys):
            raise ValueError(
                f"forward_s wants {len(self.num_keys)} rows, got {len(self.forward_s)}"
            )
        if self.queries:
            self._check_axis("queries", self.queries)
        self._check_seconds("draft_s", self.draft_s, self.queries)
        self._check_axis("states", self.states)
        self._check_seconds("visit_s", self.visit_s, self.states)
        self._check_seconds("noisy_visit_s", self.noisy_visit_s, self.states)

    def forwards(self, num_slots: NDArray[np.float64], num_keys: float) -> NDArray[np.float64]:
        """Seconds of forwards of (n,) slots, each of which reads so many keys."""
        rows = [_along(num_slots, self.slots, row) for row in self.forward_s]
        if len(rows) == 1:
            return rows[0]
        at = int(np.clip(np.searchsorted(self.num_keys, num_keys) - 1, 0, len(rows) - 2))
        low, high = self.num_keys[at], self.num_keys[at + 1]
        share = (num_keys - low) / (high - low)
        return np.maximum(rows[at] + share * (rows[at + 1] - rows[at]), 0.5 * rows[at])

    def forward(self, num_slots: float, num_keys: float) -> float:
        """Seconds of one forward."""
        return float(self.forwards(np.array([float(num_slots)]), num_keys)[0])

    def draft(self, num_queries: int) -> float:
        """Seconds of one wave."""
        if not self.queries:
            return 0.0
        return float(_along(np.array([float(num_queries)]), self.queries, self.draft_s)[0])

    def visit(self, num_states: float, noisy: float) -> float:
        """Seconds of visiting so many states at once, a share `noisy` of them with noise."""
        at = np.array([float(num_states)])
        greedy = float(_along(at, self.states, self.visit_s)[0])
        return greedy + noisy * (float(_along(at, self.states, self.noisy_visit_s)[0]) - greedy)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "a latency table") -> LatencyTable:
        """Raises ValueError that begins with `where`."""
        try:
            tree = json.loads(text)
            if not isinstance(tree, dict):
                raise ValueError("want an object")
            known = {each.name for each in dataclasses.fields(cls)}
            unknown = sorted(tree.keys() - known)
            if unknown:
                raise ValueError(f"unknown key {unknown[0]!r}")
            return cls(**{name: _tuples(value) for name, value in tree.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: not a latency table ({error})") from error

    @staticmethod
    def _check_axis(name: str, values: Sequence[int]) -> None:
        if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
            raise ValueError(f"{name} must ascend from at least 1, got {list(values)}")

    @staticmethod
    def _check_seconds(name: str, values: Sequence[float], axis: Sequence[int]) -> None:
        if len(values) != len(axis):
            raise ValueError(f"{name} wants {len(axis)} entries, got {len(values)}")
        if not all(math.isfinite(value) and value >= 0.0 for value in values):
            raise ValueError(f"{name} holds what is no time")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _along(
    x: NDArray[np.float64], axis: Sequence[int], values: Sequence[float]
) -> NDArray[np.float64]:
    """Linear between entries; beyond the last one as steep as from the middle of the axis on."""
    found: NDArray[np.float64] = np.interp(x, axis, values)
    if len(axis) == 1:
        return found * np.maximum(x / axis[0], 1.0)
    middle = len(axis) // 2 if len(axis) > 2 else 0
    # A disturbed last entry must not make all that lies beyond look free.
    slope = max(
        (values[-1] - values[middle]) / (axis[-1] - axis[middle]), 0.5 * values[-1] / axis[-1]
    )
    return np.where(x > axis[-1], values[-1] + slope * (x - axis[-1]), found)
