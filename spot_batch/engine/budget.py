"""How many drafted slots a round is worth. It decides the speed of a job, never its output.

Every sample has its own slot in any case. Drafted states of all samples stand in one pool, the most
probable a slot first, and the whole curve of the device's latency is scanned for the rate of
progress that is best. Progress is counted in steps of draft-free decoding: a
sample takes a fixed number of these, with `single` and with `threshold` unmasking, so steps a
second are samples a second. A root is worth one step, a drafted state its mass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.tree import ROOT, DraftTree, Key

MOST_SLOTS = 20
"""A tree is grown for so many drafted slots a sample; beyond them masses are too small to pay."""

_HYSTERESIS = 0.03
_TRIAL_ROUNDS = 8
_PROBE_EVERY = 64
_FORGET = 0.1
_FORGET_ALL = 0.004
_FEWER = 0.75

_WEIGHT_OF_PRIOR = 16.0
_WEIGHT_OF_SAMPLE_PRIOR = 4.0
_LEAST_KAPPA, _MOST_KAPPA = 0.5, 1.5
_LEAST_SHARE = 0.02
_KEY_STEP, _MOST_LOOKED_UP = 32, 1024
_SLACK = 0.7
"""States are grown down to this share of the marginal price."""

_MOST_CALLS = 3.0
"""A round's accepted states need so many calls of head and transition at most, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A round before drafting: `num_roots` samples each move a step, in `num_slots` slots (theirs,
    prompts' and finished blocks') of `num_keys` keys on average; `noisy` is the share of samples
    with a temperature."""

    num_roots: int
    num_slots: int
    num_keys: float
    noisy: float = 0.0


@dataclass(frozen=True, slots=True)
class Spending:
    """How many states of the pool, best first, and the steps a second that are expected of it."""

    num_states: int
    rate: float


@dataclass(frozen=True, slots=True)
class Pool:
    """Drafted states of all trees, the most mass a slot first, none before its parents.

    tree, key: whose; mass, cost (n,): steps expected of it, slots.
    """

    tree: Sequence[int]
    key: Sequence[Key]
    mass: NDArray[np.float64]
    cost: NDArray[np.int64]


def pool(trees: Sequence[DraftTree]) -> Pool:
    """The states that the trees have selected."""
    entries: list[tuple[float, int, int, Key, float, int]] = []
    for number, tree in enumerate(trees):
        least = float("inf")
        for index, (key, mass) in enumerate(tree.selected.items()):
            if key == ROOT:
                continue
            cost = tree.cost(key)
            # Merged orders can make a child outweigh a parent; it stands behind it all the same.
            # A complete state has no children, so its price bounds nobody else's.
            price = min(least, mass / cost)
            if cost == 1:
                least = price
            entries.append((-price, number, index, key, mass, cost))
    entries.sort()
    return Pool(
        [entry[1] for entry in entries],
        [entry[3] for entry in entries],
        np.array([entry[4] for entry in entries], dtype=np.float64),
        np.array([entry[5] for entry in entries], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """What a round costs on a device, looked up once.

    forward_s (n,): with 0, 1, 2, ... drafted slots; visits_s: of all roots; more_s: of one state
    more in the same call; call_s: of one in a call of its own.
    """

    load: Workload
    forward_s: NDArray[np.float64]
    visits_s: float
    more_s: float
    call_s: float

    @classmethod
    def of(cls, latency: LatencyTable, load: Workload) -> Prices:
        slots = load.num_slots + np.arange(load.num_roots * (MOST_SLOTS + 2) + 1, dtype=np.float64)
        once_s = latency.visit(load.num_roots, load.noisy)
        more_s = max(0.0, latency.visit(load.num_roots + 1, load.noisy) - once_s)
        forward_s = latency.forwards(slots, load.num_keys)
        return cls(load, forward_s, once_s, more_s, latency.visit(1, load.noisy))

    def times(self, seen: Mapping[int, float]) -> Prices:
        """The same prices, where forwards take `seen` times as long as in the table, by size."""
        if not seen:
            return self
        sizes = sorted(seen)
        slots = self.load.num_slots + np.arange(len(self.forward_s))
        ratio = np.interp(slots, sizes, [seen[size] for size in sizes])
        return replace(self, forward_s=self.forward_s * ratio)

    @property
    def rate(self) -> float:
        """Steps a second with nothing drafted."""
        return self.load.num_roots / float(self.forward_s[0] + self.visits_s)

    @property
    def floor(self) -> float:
        """The mass at which one more slot for every fourth sample would just not pay, less slack:
        the curve is a staircase."""
        more = max(1, self.load.num_roots // 4)
        slope_s = float(self.forward_s[more] - self.forward_s[0]) / more
        return min(0.95, _SLACK * slope_s * self.rate)


def best_spending(
    prices: Prices,
    masses: NDArray[np.float64],
    costs: NDArray[np.int64],
    *,
    drafting_s: float = 0.0,
) -> Spending:
    """argmax over n of (roots + mass of the first n) / seconds: every n is tried."""
    mass = np.zeros(len(masses) + 1)
    slots = np.zeros(len(costs) + 1, dtype=np.int64)
    masses.cumsum(out=mass[1:])
    costs.cumsum(out=slots[1:])
    # Hoped-for states may be more than trees have room for.
    num = int(slots.searchsorted(len(prices.forward_s)))
    mass, slots = mass[:num], slots[:num]
    calls = np.minimum(mass, _MOST_CALLS)
    seconds = (
        prices.forward_s[slots]
        + prices.more_s * mass
        + (prices.call_s - prices.more_s) * calls
        + (prices.visits_s + drafting_s)
    )
    rates = (prices.load.num_roots + mass) / seconds
    at = int(rates.argmax())
    return Spending(at, float(rates[at]))


@dataclass(slots=True)
class _Evidence:
    """How many guesses came true and how many were promised to; older ones count less."""

    promised: float
    true: float

    def add(self, promised: float, true: float, forget: float) -> None:
        self.promised += promised - forget * self.promised
        self.true += true - forget * self.true


@dataclass(slots=True)
class Budget:
    """The controller of one engine. Round by round: `begin`, waves of drafting while
    `another_wave`, then `choose`; `learn` from the walk."""

    latency: LatencyTable
    is_on: bool = True
    _prices: Prices | None = None
    _floor: float = 0.0
    _spent_s: float = 0.0
    _num_waves: int = 0
    _gain: float = 0.0
    _num_tried: int = 0
    _until_probe: int = 0
    _probed_roots: int = 0
    _child: float = 0.6
    _all: _Evidence = field(default_factory=lambda: _Evidence(_WEIGHT_OF_PRIOR, _WEIGHT_OF_PRIOR))
    _of_row: dict[int, _Evidence] = field(default_factory=dict)
    _seen: dict[int, float] = field(default_factory=dict)
    _looked_up: dict[Workload, Prices] = field(default_factory=dict)

    def begin(self, load: Workload) -> bool:
        """Whether to ask the drafter at all in this round."""
        if not self.is_on:
            self._until_probe -= 1
            if load.num_roots < _FEWER * self._probed_roots:
                self._until_probe = min(self._until_probe, 0)
            if self._until_probe > 0:
                return False
        # A few keys more or less change little, and looking up takes longer than deciding.
        alike = replace(load, num_keys=round(load.num_keys / _KEY_STEP) * _KEY_STEP)
        if alike not in self._looked_up:
            if len(self._looked_up) >= _MOST_LOOKED_UP:
                self._looked_up.clear()
            self._looked_up[alike] = Prices.of(self.latency, alike)
        self._prices = self._looked_up[alike].times(self._seen)
        self._floor = self._prices.floor
        self._spent_s, self._num_waves = 0.0, 0
        return True

    @property
    def wants_stale(self) -> bool:
        """Whether the next round may draft, so that this one must remember what the target said."""
        return self.is_on or self._until_probe <= 1

    def observe(self, num_slots: int, num_keys: float, seconds: float) -> None:
        """Learn that a forward took so long: the measuring at the start may have been disturbed."""
        ratio = seconds / self.latency.forward(num_slots, num_keys)
        near = min(self.latency.slots, key=lambda size: abs(size - num_slots))
        before = self._seen.get(near, ratio)
        # One disturbed forward among a few says nothing.
        self._seen[near] = before + _FORGET * (min(ratio, 2.0 * before) - before)

    def joined(self, row: int) -> None:
        """Forget what was learned of a row: another sample has it now."""
        self._of_row.pop(row, None)

    def correction(self, row: int) -> float:
        """By how much to scale the drafter's probabilities for the sample in this row: what they
        were worth over all samples, and for this one."""
        overall = min(_MOST_KAPPA, max(_LEAST_SHARE, self._all.true / self._all.promised))
        of_row = self._of_row.get(row)
        if of_row is None:
            return overall
        kappa = (of_row.true + _WEIGHT_OF_SAMPLE_PRIOR) / (
            of_row.promised * overall + _WEIGHT_OF_SAMPLE_PRIOR
        )
        return overall * min(_MOST_KAPPA, max(_LEAST_KAPPA, kappa))

    @property
    def floor(self) -> float:
        """The least mass that may be worth a slot."""
        return self._floor

    @property
    def ask_above(self) -> float:
        """States of less mass are hardly followed by one worth a slot."""
        return self._floor / max(0.1, self._child)

    def another_wave(self, trees: Sequence[DraftTree], asked: Sequence[float]) -> bool:
        """Whether asking about states of these masses is expected to pay for itself."""
        prices = self._prices
        assert prices is not None, "begin comes first"
        self._num_waves += 1
        if self._num_waves == 1:  # `begin` has decided
            self._spent_s = self.latency.draft(len(asked))
            return True
        found = pool(trees)
        now = best_spending(prices, found.mass, found.cost, drafting_s=self._spent_s)
        wave_s = self.latency.draft(len(asked))
        hoped = self._child * np.array(asked)
        mass = np.concatenate((found.mass, hoped))
        cost = np.concatenate((found.cost, np.ones(len(hoped), dtype=np.int64)))
        order = np.argsort(-mass / cost, kind="stable")
        then = best_spending(prices, mass[order], cost[order], drafting_s=self._spent_s + wave_s)
        if then.rate <= now.rate:
            return False
        self._spent_s += wave_s
        return True

    def choose(self, trees: Sequence[DraftTree]) -> list[list[Key]]:
        """The states of each tree that are worth a slot, in the order of growth."""
        prices = self._prices
        assert prices is not None, "begin comes first"
        found = pool(trees)
        choice = best_spending(prices, found.mass, found.cost, drafting_s=self._spent_s)
        chosen: list[list[Key]] = [[] for _ in trees]
        for index in range(choice.num_states):
            chosen[found.tree[index]].append(found.key[index])
        if trees:
            self._decide(prices.load, choice.rate / prices.rate - 1.0)
        return chosen

    def learn(self, row: int, tree: DraftTree, key: Key, child: Key, correction: float) -> None:
        """Learn that the target went from the state `key` of a row's tree to `child`."""
        edges = tree.nodes[key].edges
        if not edges:
            return
        promised = min(1.0, sum(weight for _, weight in edges) / correction)
        true = float(any(guess == child for guess, _ in edges))
        self._all.add(promised, true, _FORGET_ALL)
        self._of_row.setdefault(row, _Evidence(0.0, 0.0)).add(promised, true, _FORGET)
        if key != ROOT:
            best = max(weight for _, weight in edges)
            self._child += _FORGET_ALL * 5 * (min(1.0, best) - self._child)

    def _decide(self, load: Workload, gain: float) -> None:
        """Learn that drafting, its own time included, gained so much over not drafting; go on with
        it or leave it."""
        self._num_tried += 1
        # The mean at first, then of about the last eight rounds.
        self._gain += (gain - self._gain) / min(self._num_tried, _TRIAL_ROUNDS)
        if self._num_tried * load.num_roots < _TRIAL_ROUNDS:
            return  # one sample's round says little: some more of them
        if self.is_on:
            if self._gain <= 0.0:
                self._rest(load)
        elif self._gain >= _HYSTERESIS:
            self.is_on = True
        else:
            self._rest(load)

    def _rest(self, load: Workload) -> None:
        """Leave the drafter alone for a while; where a probe takes several rounds it comes less
        often."""
        self.is_on = False
        self._until_probe = _PROBE_EVERY * max(1, -(-_TRIAL_ROUNDS // load.num_roots))
        self._probed_roots = load.num_roots
        self._num_tried, self._gain = 0, 0.0
