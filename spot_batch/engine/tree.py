"""The draft tree: which hypothetical states are worth a slot of the next forward.

Best-first growth by mass (the tree form of DDTree, here over block states): a node's mass is the
probability that the target's own trajectory passes through it and through drafted states only. Two
orders that reach one state share its node, and their masses add.
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

    def __post_init__(self) -> None:
        self.nodes = {ROOT: Node(ROOT, complete=False)}
        self.selected = {ROOT: 1.0}

    def frontier(self) -> list[Key]:
        """States whose expansion could still change the tree; empty when it is grown."""
        if self.budget <= 0:
            return []
        chosen = list(self.selected)
        if sum(self.cost(key) for key in self.drafted()) >= self.budget:
            chosen.pop()  # no room is left behind the last one
        return [
            key for key in chosen if self.nodes[key].edges is None and not self.nodes[key].complete
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
        chosen: dict[Key, None] = {}
        mass: dict[Key, float] = {ROOT: 1.0}
        queue: list[tuple[float, int, Key]] = [(-1.0, 0, ROOT)]

        def pass_on(key: Key, amount: float) -> None:
            """Mass that reaches a chosen state goes on to its children, however late it comes."""
            for child, weight in self.nodes[key].edges or ():
                mass[child] = mass.get(child, 0.0) + amount * weight
                if child in chosen:
                    pass_on(child, amount * weight)
                elif mass[child] > 0.0:
                    heapq.heappush(queue, (-mass[child], len(child), child))

        left = self.budget
        while queue and (left or not chosen):
            negative, _, key = heapq.heappop(queue)
            if key in chosen or -negative < mass[key]:
                continue  # taken already, or queued again with more mass
            if key != ROOT:
                if mass[key] < self.gamma:
                    break
                if self.cost(key) > left:
                    continue
                left -= self.cost(key)
            chosen[key] = None
            pass_on(key, mass[key])
        self.selected = {key: mass[key] for key in chosen}

    def drafted(self) -> Sequence[Key]:
        """The chosen states without the root, in the order in which they were chosen."""
        return [key for key in self.selected if key != ROOT]
