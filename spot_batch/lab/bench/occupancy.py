"""How full a job keeps its slots, and what drafts do with those that fall idle at its end.

A job of many rows of mixed lengths runs through the driver's pool of leases and the engines of its
actors: everything between a lease and a published sample but files, rendering and processes. The
actors take turns, whose clock is behind goes next, so that any number of them fits one process.
The clock is the device's, or a latency table's over recorded states (`bench.simulate`).

The tail begins where nothing is left to lend or to let join and a slot falls idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from spot_batch.engine.clock import device_clock
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.measure import measure_latency
from spot_batch.lab.bench.cells import cell_of
from spot_batch.lab.bench.grids import OccupancyGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of_grid
from spot_batch.lab.bench.simulate import Recording, simulated_engine
from spot_batch.records.results import Rounds
from spot_batch.records.sampling import Request
from spot_batch.service.actor import runs_short
from spot_batch.service.leases import LeasePool, room_for

LEASE_S, PUBLISH_S, EXCHANGE_S = 30.0, 10.0, 0.5
"""As a job has them: seconds of work lent, between publications, between talks to the driver."""

_LATENCY_S = 6.0  # that measuring a latency table may take


@dataclass(frozen=True, kw_only=True, slots=True)
class TailRow:
    """Rounds of the tail with so many samples in flight: steps of draft-free decoding a second for
    each of them, and drafted slots a sample a round."""

    in_flight: int
    num_rounds: int
    seconds: float
    steps_per_s_per_sample: float
    drafted_slots: float


@dataclass(frozen=True, slots=True)
class OccupancyCell:
    """A job, by the budget's name."""

    budget: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """A job under one budget. `busy_share`: of the slots of all actors, weighted by time, until
    each one's tail; `tail_share`: of the time that the actors took together."""

    budget: str
    seed: int = 0
    num_samples: int
    num_actors: int
    max_sequences: int
    seconds: float
    busy_share: float
    tail_share: float
    tail: tuple[TailRow, ...]

    @property
    def cell(self) -> OccupancyCell:
        return cell_of(OccupancyCell, self)

    @classmethod
    def read(cls, *, tail: Sequence[Mapping[str, Any]], **values: Any) -> Occupancy:
        """Makes a row of what JSON holds of it."""
        return cls(tail=tuple(TailRow(**row) for row in tail), **values)


def cells_of(grid: OccupancyGrid) -> list[list[OccupancyCell]]:
    """A job a budget and seed."""
    return [[OccupancyCell(f"{budget}", seed)] for budget in grid.budgets for seed in grid.seeds]


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancyBenchmark:
    """What all jobs share. `table`: the clock; the device's own where None."""

    models: Models
    questions: Sequence[str]
    grid: OccupancyGrid
    table: LatencyTable | None

    def open(self) -> Callable[[Sequence[OccupancyCell]], Iterator[Occupancy]]:
        grid, info = self.grid, self.models.info
        drafter, target = self.models.some_drafter(), self.models.target()
        params = params_of_grid(info, grid)
        recording = Recording(target)
        if self.table is not None:
            latency = self.table
        else:
            latency = measure_latency(
                target, drafter, max_slots=4 * grid.sequences, at_most_s=_LATENCY_S
            )

        def measured(cells: Sequence[OccupancyCell]) -> Iterator[Occupancy]:
            for cell in cells:
                requests = make_requests(info, self.questions, params, seed=cell.seed)
                if self.table is not None:
                    recording.record(requests)
                settings = EngineSettings(
                    max_sequences=grid.sequences,
                    budget="auto" if cell.budget == "auto" else int(cell.budget),
                    longest_first=grid.order == "longest_first",
                )

                def make(
                    settings: EngineSettings = settings,
                ) -> tuple[Engine, Callable[[], float]]:
                    if self.table is not None:
                        engine = simulated_engine(recording, drafter, latency, settings)
                        return engine, lambda: recording.clock_s
                    engine = Engine(target, drafter, settings, latency=latency)
                    return engine, device_clock(target.device)

                run = run_job(
                    mixed_lengths(
                        requests,
                        num_samples=grid.samples,
                        least=grid.min_new_tokens,
                        most=grid.max_new_tokens,
                    ),
                    make,
                    budget=settings.budget,
                    num_actors=grid.actors,
                    max_sequences=grid.sequences,
                )
                yield replace(run, seed=cell.seed)

        return measured


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    num_steps: int = 0
    rounds: Rounds = field(default_factory=Rounds)


@dataclass(slots=True)
class _Actor:
    """An engine, its clock, and what it has not published yet."""

    index: int
    engine: Engine
    clock: Callable[[], float]
    now_s: float = 0.0
    next_exchange_s: float = 0.0
    last_publish_s: float = 0.0
    num_published: int = 0
    has_asked: bool = False
    finished: list[int] = field(default_factory=list)
    full_s: float = 0.0
    busy_s: float = 0.0
    tail: dict[int, _Sum] = field(default_factory=dict)


MakeEngine = Callable[[], tuple[Engine, Callable[[], float]]]
"""An engine, and the seconds that its rounds take by the clock that counts."""


def mixed_lengths(
    requests: Sequence[Request], *, num_samples: int, least: int, most: int
) -> list[Request]:
    """So many samples of the requests in turn, each of its own `max_new_tokens`, spread evenly from
    `least` to `most` in no order."""
    golden = 0.6180339887498949
    samples = []
    for number in range(num_samples):
        request = requests[number % len(requests)]
        length = least + int((number * golden % 1.0) * (most - least + 1))
        params = replace(request.params, max_new_tokens=length)
        samples.append(replace(request, sample_id=number, params=params))
    return samples


def run_job(
    samples: Sequence[Request],
    make_engine: MakeEngine,
    *,
    budget: int | Literal["auto"],
    num_actors: int,
    max_sequences: int,
) -> Occupancy:
    """Decode all samples; `make_engine` makes one of `max_sequences` for each actor."""
    pool = LeasePool(pending=[range(len(samples))])
    actors = [_Actor(index, *make_engine()) for index in range(num_actors)]
    while not pool.done:
        actor = min(actors, key=lambda each: each.now_s)
        if actor.now_s >= actor.next_exchange_s or _asks(actor, max_sequences):
            _exchange(actor, pool, samples, max_sequences, num_actors)
        if actor.engine.has_work:
            _round(actor, pool, max_sequences)
            continue
        # As with the real one: who has nothing to do publishes, and is answered at once if it did.
        idle_s = max(1e-3, actor.next_exchange_s - actor.now_s) if not actor.finished else 0.0
        actor.next_exchange_s = actor.now_s + idle_s
        actor.now_s += idle_s
        actor.full_s += idle_s if pool.num_unlent else 0.0
    seconds = max(actor.now_s for actor in actors)
    tails = [one for actor in actors for one in actor.tail.values()]
    full_s, tail_s = sum(each.full_s for each in actors), sum(each.seconds for each in tails)
    return Occupancy(
        budget=f"{budget}",
        num_samples=len(samples),
        num_actors=num_actors,
        max_sequences=max_sequences,
        seconds=seconds,
        busy_share=sum(each.busy_s for each in actors) / full_s if full_s else 1.0,
        tail_share=tail_s / (full_s + tail_s),
        tail=_tail(actors),
    )


def _exchange(
    actor: _Actor,
    pool: LeasePool,
    samples: Sequence[Request],
    max_sequences: int,
    num_actors: int,
) -> None:
    """What is finished is published when it is time; then leases come."""
    late = actor.now_s - actor.last_publish_s >= PUBLISH_S
    if actor.finished and (late or not actor.engine.has_work):
        pool.published("data", frozenset(actor.finished))
        actor.num_published += len(actor.finished)
        actor.finished.clear()
        actor.last_publish_s = actor.now_s
    room = room_for(
        held=actor.engine.num_active + actor.engine.num_waiting,
        max_sequences=max_sequences,
        rows_per_s=actor.num_published / actor.now_s if actor.num_published else None,
        lease_s=LEASE_S,
    )
    for lease in pool.fill(actor.index, room=room, num_actors=num_actors):
        actor.has_asked = False
        for sample_id in lease.sample_ids:
            actor.engine.add(samples[sample_id])
    actor.next_exchange_s = actor.now_s + EXCHANGE_S


def _asks(actor: _Actor, max_sequences: int) -> bool:
    """Whether it runs short, once a lease; the driver is taken to answer at once."""
    num_owed = actor.engine.num_active + actor.engine.num_waiting
    asks = not actor.has_asked and runs_short(num_owed, max_sequences)
    actor.has_asked |= asks
    return asks


def _round(actor: _Actor, pool: LeasePool, max_sequences: int) -> None:
    engine, begin_s = actor.engine, actor.clock()
    before, steps = engine.rounds, engine.num_steps
    actor.finished += [done.sample_id for done in engine.step()]
    seconds = actor.clock() - begin_s
    actor.now_s += seconds
    in_flight = engine.rounds.num_samples - before.num_samples
    if in_flight == max_sequences or engine.num_waiting or pool.num_unlent:
        actor.full_s += seconds
        actor.busy_s += seconds * in_flight / max_sequences
        return
    one = actor.tail.setdefault(in_flight, _Sum())
    one.seconds += seconds
    one.num_steps += engine.num_steps - steps
    one.rounds += Rounds(
        num_rounds=1,
        num_samples=in_flight,
        num_drafted_slots=engine.rounds.num_drafted_slots - before.num_drafted_slots,
    )


def _tail(actors: Sequence[_Actor]) -> tuple[TailRow, ...]:
    """The curve, from the fullest to the last sample."""
    rows = []
    for in_flight in sorted({each for actor in actors for each in actor.tail}, reverse=True):
        sums = [actor.tail[in_flight] for actor in actors if in_flight in actor.tail]
        seconds, rounds = sum(one.seconds for one in sums), Rounds()
        for one in sums:
            rounds += one.rounds
        num_steps = sum(one.num_steps for one in sums)
        rows.append(
            TailRow(
                in_flight=in_flight,
                num_rounds=rounds.num_rounds,
                seconds=seconds,
                steps_per_s_per_sample=num_steps / (in_flight * seconds),
                drafted_slots=rounds.budget,
            )
        )
    return tuple(rows)
