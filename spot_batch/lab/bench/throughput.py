"""Rows a second with drafts and without, in one run, against the fastest build without any.

Engines that differ in their budget alone take turns of a second or so, many times over, each kept
at its number of samples in flight; who shares the machine disturbs neighbouring turns alike, and a
ratio is the mean over passes of a turn against the baseline's turn of the same pass. Progress is
counted in steps of draft-free decoding, of which a sample takes a fixed number: so steps a second
are samples a second, and tokens a second follow from the tokens that a step of these samples makes.

Beside them goes a plain loop over transformers (`bench.plain`), a batch of the same prompts a turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Literal

from torch import Tensor

from spot_batch.drafters.base import Drafter, Proposals
from spot_batch.drafters.distributions import Queries, StaleStore
from spot_batch.engine.clock import device_clock
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.measure import measure_latency
from spot_batch.lab.bench.cells import cell_of
from spot_batch.lab.bench.grids import ThroughputGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.plain import FAMILY, PlainLoop
from spot_batch.lab.bench.questions import make_requests, params_of_grid
from spot_batch.models.block import BlockTarget
from spot_batch.models.slots import Hidden, PrefixCache, SlotBatch, Target
from spot_batch.records.results import NotFinite
from spot_batch.records.sampling import NoiseRule, Request

BASELINE = "none, fast"
CANONICAL = "none, canonical"
PLAIN = "plain loop"

_LATENCY_S = 12.0  # that measuring a latency table may take

# Of a mean over so many passes less one: 97.5 % points of Student's t.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft."""

    budget: int | Literal["auto"]
    gamma: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.budget}, gamma {self.gamma:g}" if self.gamma else f"{self.budget}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputRow:
    """One way to decode at one number of samples in flight.

    `ratio_to_draft_free`: rows a second against the fastest draft-free build; `low` and `high` are
    the ends of its 95 % interval over passes. `ratio_to_canonical`: against draft-free decoding
    under the same numerics. `slots_per_s`: that forwards ran over, drafted ones and clean passes
    included; `host_share`: of the round, neither forward nor head nor drafter; neither is known of
    the plain loop.
    """

    sequences: int
    seed: int
    budget: str
    tokens_per_s: float
    ratio_to_draft_free: float
    low: float
    high: float
    ratio_to_canonical: float
    slots_per_s: float | None
    host_share: float | None
    drafted_per_forward: float
    steps_per_forward: float
    num_passes: int

    @property
    def cell(self) -> ThroughputCell:
        return cell_of(ThroughputCell, self)


@dataclass(frozen=True, slots=True)
class ThroughputCell:
    """One way to decode, by the budget's name."""

    sequences: int
    seed: int
    budget: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputBenchmark:
    """What all cells share. All budgets of a number in flight and a seed take turns, so they are
    measured together, whichever of them are asked for."""

    models: Models
    questions: Sequence[str]
    grid: ThroughputGrid
    latency: LatencyTable | None

    @property
    def num_plain_passes(self) -> int:
        """0 where transformers has not the model's body under its own name."""
        return self.grid.plain_passes if self.models.info.family.name == FAMILY else 0

    def cells(self) -> list[list[ThroughputCell]]:
        """The cells of the grid, those that take turns together."""
        names = [BASELINE, CANONICAL, *(way.name for way in ways_of(self.grid))]
        names += [PLAIN] if self.num_plain_passes else []
        return [
            [ThroughputCell(number, seed, name) for name in names]
            for number, seed in product(self.grid.sequences, self.grid.seeds)
        ]

    def open(self) -> Callable[[Sequence[ThroughputCell]], Iterator[ThroughputRow]]:
        grid, info, drafter = self.grid, self.models.info, self.models.some_drafter()
        target, fast = self.models.target(), self.models.target(canonical=False)
        latency = self.latency or measure_latency(
            target, drafter, max_slots=4 * max(grid.sequences), at_most_s=_LATENCY_S
        )
        plain = None
        if self.num_plain_passes:
            plain = PlainLoop(info, dtype=target.dtype, device=target.device)

        def measured(cells: Sequence[ThroughputCell]) -> Iterator[ThroughputRow]:
            first, params = cells[0], params_of_grid(info, grid)
            requests = make_requests(info, self.questions, params, seed=first.seed)
            for row in measure_throughput(
                target,
                fast,
                drafter,
                latency,
                requests,
                sequences=first.sequences,
                ways=ways_of(grid),
                num_passes=grid.passes,
                turn_s=grid.turn_seconds,
                plain=plain,
                num_plain_passes=self.num_plain_passes,
            ):
                yield replace(row, seed=first.seed)

        return measured


def ways_of(grid: ThroughputGrid) -> list[Way]:
    """The ways to draft of a grid: its budgets, and its mass floors at the largest."""
    floors = (Way(grid.largest_budget, floor) for floor in grid.gammas if floor)
    return [*map(Way, grid.budgets), *floors]


class _Timed:
    """A target or a drafter whose own time is known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds = 0.0


class _TimedTarget(_Timed):
    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._target = target
        self.block_length, self.mask_id = target.block_length, target.mask_id
        self.vocab_size, self.device = target.vocab_size, target.device
        self.num_slots = 0

    def allocate(self, num_rows: int, num_positions: int) -> PrefixCache:
        return self._target.allocate(num_rows, num_positions)

    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        self.num_slots += len(slots)
        begin_s = self.clock()
        hidden = self._target.forward(slots, cache)
        self.seconds += self.clock() - begin_s
        return hidden

    def head(self, rows: Tensor) -> Tensor:
        begin_s = self.clock()
        logits = self._target.head(rows)
        self.seconds += self.clock() - begin_s
        return logits


class _TimedDrafter(_Timed):
    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._drafter, self.name = drafter, drafter.name

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        begin_s = self.clock()
        proposals = self._drafter.propose(stale, queries, noise_rule)
        self.seconds += self.clock() - begin_s
        return proposals


@dataclass(slots=True)
class _Contender:
    """One engine, always full, and the speed of each of its turns."""

    name: str
    engine: Engine
    target: _TimedTarget
    drafter: _TimedDrafter | None
    requests: Sequence[Request]
    number: Iterator[int] = field(default_factory=count)
    speeds: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_sample_rounds: int = 0
    num_drafted: int = 0
    num_forwards: int = 0
    num_tokens: int = 0
    num_finished_steps: int = 0

    def fill(self, sequences: int) -> None:
        """Two in waiting for each that flies, so that none waits for us."""
        while self.engine.num_waiting < sequences:
            self.engine.add(self.requests[next(self.number) % len(self.requests)])

    def turn(self, sequences: int, turn_s: float) -> None:
        """Decode for so long, or for eight rounds if these take longer."""
        clock, steps = self.target.clock, self.engine.num_steps
        begin_s, num_rounds = clock(), 0
        while num_rounds < _LEAST_ROUNDS or clock() - begin_s < turn_s:
            self.fill(sequences)
            for done in self.engine.step():
                if isinstance(done, NotFinite):
                    raise ValueError(f"sample {done.sample_id}: {done.error().message}")
                self.num_tokens += len(done.token_ids)
                self.num_finished_steps += done.num_draft_free_forwards
                self.num_drafted += done.stats.num_drafted
                self.num_forwards += done.stats.num_forwards
            num_rounds += 1
            self.num_sample_rounds += sequences
        taken_s = clock() - begin_s
        self.seconds += taken_s
        self.speeds.append((self.engine.num_steps - steps) / taken_s)


_LEAST_ROUNDS = 8


@dataclass(slots=True)
class _Plain:
    """The plain loop, and the tokens a second of each of its turns: a whole batch each."""

    loop: PlainLoop
    clock: Callable[[], float]
    requests: Sequence[Request]
    number: Iterator[int] = field(default_factory=count)
    speeds: list[float] = field(default_factory=list)

    def turn(self, sequences: int) -> None:
        batch = [self.requests[next(self.number) % len(self.requests)] for _ in range(sequences)]
        begin_s = self.clock()
        num_tokens = sum(map(len, self.loop.decode(batch)))
        # An answer of no tokens takes its time as well.
        self.speeds.append(max(1, num_tokens) / (self.clock() - begin_s))


def measure_throughput(
    canonical: BlockTarget,
    fast: BlockTarget,
    drafter: Drafter,
    latency: LatencyTable,
    requests: Sequence[Request],
    *,
    sequences: int,
    ways: Sequence[Way],
    num_passes: int,
    turn_s: float = 1.0,
    plain: PlainLoop | None = None,
    num_plain_passes: int = 2,
) -> list[ThroughputRow]:
    """A row for the baseline, one for canonical draft-free decoding, one for each budget; and one
    for the plain loop, which takes its turns in the first `num_plain_passes` passes."""
    clock = device_clock(canonical.device)

    def contender(name: str, target: BlockTarget, proposer: Drafter | None, way: Way) -> _Contender:
        timed = _TimedTarget(target, clock)
        asked = _TimedDrafter(proposer, clock) if proposer is not None else None
        settings = EngineSettings(max_sequences=sequences, budget=way.budget, gamma=way.gamma)
        engine = Engine(timed, asked, settings, latency=latency)
        return _Contender(name, engine, timed, asked, requests)

    contenders = [
        contender(BASELINE, fast, None, Way(0)),
        contender(CANONICAL, canonical, None, Way(0)),
        *(contender(way.name, canonical, drafter, way) for way in ways),
    ]
    for each in contenders:  # out of step with one another, as samples of a job are
        each.turn(sequences, turn_s)
        each.speeds.clear()
        each.seconds = each.target.seconds = 0.0
        each.target.num_slots = 0
        if each.drafter is not None:
            each.drafter.seconds = 0.0
    beside = None if plain is None else _Plain(plain, clock, requests)
    for number in range(num_passes):
        at = number % len(contenders)
        for each in contenders[at:] + contenders[:at]:
            each.turn(sequences, turn_s)
        if beside is not None and number < num_plain_passes:
            beside.turn(sequences)
    rows = [_row(each, contenders[0], contenders[1], sequences) for each in contenders]
    if beside is not None:
        rows.append(_plain_row(beside, contenders[0], contenders[1], sequences))
    return rows


def _row(
    one: _Contender, baseline: _Contender, canonical: _Contender, sequences: int
) -> ThroughputRow:
    ratio, low, high = mean_ratio(one.speeds, baseline.speeds)
    per_step = _tokens_per_step(one, baseline)
    device_s = one.target.seconds + (one.drafter.seconds if one.drafter is not None else 0.0)
    return ThroughputRow(
        sequences=sequences,
        seed=0,
        budget=one.name,
        tokens_per_s=statistics.fmean(one.speeds) * per_step,
        ratio_to_draft_free=ratio,
        low=low,
        high=high,
        ratio_to_canonical=mean_ratio(one.speeds, canonical.speeds)[0],
        slots_per_s=one.target.num_slots / one.seconds,
        host_share=1.0 - device_s / one.seconds,
        drafted_per_forward=one.num_drafted / max(1, one.num_forwards),
        steps_per_forward=one.engine.num_steps / one.num_sample_rounds,
        num_passes=len(one.speeds),
    )


def _tokens_per_step(*contenders: _Contender) -> float:
    """Tokens that a step makes, by the first of them that has finished a sample."""
    finished = [each for each in contenders if each.num_finished_steps]
    assert finished, "no sample ended: more passes are needed"
    return finished[0].num_tokens / finished[0].num_finished_steps


def _plain_row(
    plain: _Plain, baseline: _Contender, canonical: _Contender, sequences: int
) -> ThroughputRow:
    def ratio_to(other: _Contender) -> tuple[float, float, float]:
        per_step = _tokens_per_step(other, baseline)
        return mean_ratio(plain.speeds, [x * per_step for x in other.speeds[: len(plain.speeds)]])

    ratio, low, high = ratio_to(baseline)
    return ThroughputRow(
        sequences=sequences,
        seed=0,
        budget=PLAIN,
        tokens_per_s=statistics.fmean(plain.speeds),
        ratio_to_draft_free=ratio,
        low=low,
        high=high,
        ratio_to_canonical=ratio_to(canonical)[0],
        slots_per_s=None,
        host_share=None,
        drafted_per_forward=0.0,
        steps_per_forward=1.0,
        num_passes=len(plain.speeds),
    )


def mean_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of two or more paired ratios and the ends of its 95 % interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    student = _STUDENT[min(len(logs) - 2, len(_STUDENT) - 1)]
    spread = student * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - spread), math.exp(mean + spread)
