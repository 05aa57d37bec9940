"""The draft tree: which hypothetical states are worth a slot of the next forward.

Best-first growth by mass (algorithms.md section C; the tree form of DDTree, here over block
states): a node's mass is the probability that the target's own trajectory passes through it and
through drafted states only. Two orders that reach one state share its node, and their masses add.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Commit = tuple[int, int]
"""Position in the block, token."""
Key = tuple[Commit, ...]
"""What a state has that the root has not, sorted: its identity."""

ROOT: Key = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """One guess of what is committed next from a state, and how probable it is."""

    commits: Key
    weight: float


@dataclass(slots=True)
class Node:
    """A hypothetical state. `edges` is None until the drafter has been asked about it."""

    key: Key
    complete: bool
    edges: list[tuple[Key, float]] | None = None


@dataclass(slots=True)
class DraftTree:
    """Grown in waves: `frontier` names the states to ask the drafter about, `expand` its answers.

    `num_masked` of the root; `budget` in slots; `gamma` is the least mass worth a slot; a state
    that completes the block costs two slots with `crossing` and is of no use without.
    """

    num_masked: int
    budget: int
    gamma: float
    crossing: bool
    nodes: dict[Key, Node] = field(init=False)
    selected: dict[Key, float] = field(init=False)
    num_waves: int = 0

    def __post_init__(self) -> None:
        self.nodes = {ROOT: Node(ROOT, complete=False)}
        self.selected = {ROOT: 1.0}

    def frontier(self, *, max_waves: int) -> list[Key]:
        """States whose expansion could still change the tree; empty when it is grown."""
        if self.budget <= 0 or self.num_waves >= max_waves:
            return []
        self.num_waves += 1
        spent = sum(self.cost(key) for key in self.selected if key != ROOT)
        full = spent >= self.budget
        least = min(self.selected.values()) if full else self.gamma
        return [
            key
            for key, mass in self.selected.items()
            if self.nodes[key].edges is None and not self.nodes[key].complete and mass > least
        ]

    def expand(self, key: Key, edges: Iterable[Edge]) -> None:
        """Add the guesses from `key`, then choose the states anew."""
        children: list[tuple[Key, float]] = []
        for edge in edges:
            child = tuple(sorted(key + edge.commits))
            complete = len(child) >= self.num_masked
            if complete and not self.crossing:
                continue
            self.nodes.setdefault(child, Node(child, complete))
            children.append((child, edge.weight))
        self.nodes[key].edges = children

    def cost(self, key: Key) -> int:
        """Slots that a state takes: a complete one is followed by the next block's first slot."""
        return 2 if self.nodes[key].complete else 1

    def select(self) -> None:
        """Choose the states of greatest mass that the budget pays for, best first."""
        selected: dict[Key, float] = {}
        mass: dict[Key, float] = {ROOT: 1.0}
        queue: list[tuple[float, int, Key]] = [(-1.0, 0, ROOT)]
        left = self.budget
        while queue:
            negative, depth, key = heapq.heappop(queue)
            if key in selected or -negative < mass[key]:
                continue  # taken already, or queued again with more mass
            if key != ROOT:
                if mass[key] < self.gamma:
                    break
                if self.cost(key) > left:
                    continue
                left -= self.cost(key)
            selected[key] = mass[key]
            for child, weight in self.nodes[key].edges or ():
                mass[child] = mass.get(child, 0.0) + mass[key] * weight
                if child not in selected and mass[child] > 0.0:
                    heapq.heappush(queue, (-mass[child], depth + 1, child))
            if not left:
                break
        self.selected = self._exact_masses(selected)

    def _exact_masses(self, selected: Iterable[Key]) -> dict[Key, float]:
        """Masses over the selected states alone, in order of selection: a parent that was selected
        after its child still adds to it."""
        order = list(selected)
        mass = dict.fromkeys(order, 0.0)
        mass[ROOT] = 1.0
        for key in sorted(order, key=len):
            for child, weight in self.nodes[key].edges or ():
                if child in mass:
                    mass[child] += mass[key] * weight
        return mass

    def drafted(self) -> Sequence[Key]:
        """The chosen states without the root, in the order in which they were chosen."""
        return [key for key in self.selected if key != ROOT]
