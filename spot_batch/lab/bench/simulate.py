"""When drafts help: real decoding under the clock of a device that is not here.

Draft-free decoding visits every state that drafted decoding can stand on. So the target runs once,
draft-free, and what it left at each state is kept; after that the engine itself decodes with any
budget at any number of samples in flight, and a forward costs a look-up and the seconds that a
latency table says. Drafter, trees, walk and controller are the real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from spot_batch.drafters.base import Drafter, Proposals
from spot_batch.drafters.distributions import Queries, StaleStore
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.latency import LatencyTable
from spot_batch.lab.bench.cells import cell_of, digest_of
from spot_batch.lab.bench.grids import SimulateGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of_grid
from spot_batch.models.slots import Hidden, KeptSlots, PrefixCache, SlotBatch, Target
from spot_batch.records.sampling import NoiseRule, Request

_FIRST_ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRow:
    """`ratio`: samples a second against draft-free decoding; `best_fixed` is the fixed budget that
    does best, `of_best` what `auto` keeps of it."""

    table: str
    costs: str
    seed: int
    sequences: int
    auto: float
    best_fixed: int
    best_ratio: float
    of_best: float
    fixed: Mapping[int, float]

    @property
    def cell(self) -> SimulatedCell:
        return cell_of(SimulatedCell, self)

    @classmethod
    def read(cls, *, fixed: Mapping[str, float], **rest: Any) -> SimulatedRow:
        """Makes a row of what JSON holds of it."""
        return cls(fixed={int(budget): ratio for budget, ratio in fixed.items()}, **rest)


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """A number in flight under the clock of a table, by its name and the digest of its costs."""

    table: str
    costs: str
    seed: int
    sequences: int


def cells_of(grid: SimulateGrid, tables: Mapping[str, LatencyTable]) -> list[list[SimulatedCell]]:
    """The cells of a grid, those of one seed together."""
    costs = {name: digest_of([table.to_json()]) for name, table in tables.items()}
    return [
        [SimulatedCell(*each, seed, number) for each in costs.items() for number in grid.sequences]
        for seed in grid.seeds
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedBenchmark:
    """What all cells share; `tables` by name."""

    models: Models
    questions: Sequence[str]
    grid: SimulateGrid
    tables: Mapping[str, LatencyTable]

    def open(self) -> Callable[[Sequence[SimulatedCell]], Iterator[SimulatedRow]]:
        """Runs cells of one seed on one recording."""
        target, drafter, info = self.models.target(), self.models.some_drafter(), self.models.info

        def simulated(cells: Sequence[SimulatedCell]) -> Iterator[SimulatedRow]:
            params = params_of_grid(info, self.grid)
            requests = make_requests(info, self.questions, params, seed=cells[0].seed)
            recording = Recording(target)
            recording.record(requests)
            for cell in cells:
                yield simulate(
                    recording,
                    drafter,
                    self.tables[cell.table],
                    requests,
                    cell=cell,
                    budgets=self.grid.budgets,
                    num_rounds=self.grid.rounds,
                )

        return simulated


class _Tokens:
    """A prefix cache that holds token ids: the identity of what a state stands on. `real` is the
    recorded target's own, which follows it while there is something to record."""

    def __init__(self, num_rows: int, real: PrefixCache | None) -> None:
        self.of_row: list[list[int]] = [[] for _ in range(num_rows)]
        self.real = real

    def resize(self, num_rows: int, num_positions: int) -> None:
        if self.real is not None:
            self.real.resize(num_rows, num_positions)
        self.of_row += [[] for _ in range(num_rows - len(self.of_row))]

    def clear(self, row: int) -> None:
        self.of_row[row] = []
        if self.real is not None:
            self.real.clear(row)

    def put(self, row: int, start: int, ids: Sequence[int]) -> None:
        self.of_row[row][start:] = ids

    def adopt(self, kept: KeptSlots, index: int, *, row: int, start: int) -> None:
        assert isinstance(kept, _KeptIds), type(kept)
        self.put(row, start, kept.ids[index])


@dataclass(frozen=True, slots=True)
class _KeptIds:
    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.ids)


class Recording:
    """What a target left at every state that was visited: hidden rows by prefix and block.

    A `Target` whose forward is a look-up. States that draft-free decoding never visits hold NaN;
    no walk stands on one. `clock_s` runs by the table.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.block_length, self.mask_id = target.block_length, target.mask_id
        self.vocab_size, self.device = target.vocab_size, target.device
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self.latency: LatencyTable | None = None
        self.clock_s = 0.0

    def record(self, requests: Sequence[Request], *, sequences: int = 16) -> None:
        """Decode draft-free and remember."""
        engine = Engine(self, None, EngineSettings(max_sequences=sequences))
        for request in requests:
            engine.add(request)
        for _ in engine.run():
            pass

    def allocate(self, num_rows: int, num_positions: int) -> PrefixCache:
        records = self.latency is None
        real = self._target.allocate(num_rows, num_positions) if records else None
        return _Tokens(num_rows, real)

    def forward(self, slots: SlotBatch, cache: PrefixCache) -> Hidden:
        assert isinstance(cache, _Tokens), type(cache)
        ids, starts, rows = slots.ids.tolist(), slots.start.tolist(), slots.row.tolist()
        for index in torch.nonzero(slots.store).squeeze(1).tolist():
            cache.put(rows[index], starts[index], ids[index])
        keys = []
        for block, start, row, seen in zip(ids, starts, rows, slots.sees.tolist(), strict=True):
            before = [ids[at] for at in seen if at >= 0][:-1]
            first = start - len(before) * self.block_length
            prefix = [*cache.of_row[row][:first], *(token for each in before for token in each)]
            keys.append((tuple(prefix), tuple(block)))
        kept = _KeptIds([ids[index] for index in torch.nonzero(slots.keep).squeeze(1).tolist()])
        if self.latency is None:
            assert cache.real is not None, "nothing is recorded over a cache of the simulation"
            hidden = self._target.forward(slots, cache.real).rows
            self._rows |= dict(zip(keys, hidden, strict=True))
            return Hidden(hidden, kept)
        self.clock_s += self.latency.forward(
            len(keys), sum(starts) / len(starts) + self.block_length
        )
        nowhere = torch.full_like(next(iter(self._rows.values())), math.nan)
        return Hidden(torch.stack([self._rows.get(key, nowhere) for key in keys]), kept)

    def head(self, rows: Tensor) -> Tensor:
        assert not bool(rows.isnan().any()), "a walk stands on a state that was not recorded"
        if self.latency is not None:
            self.clock_s += self.latency.visit(len(rows), 0.0)
        return self._target.head(rows)


class _Waves:
    """A drafter whose waves take the table's time."""

    def __init__(self, drafter: Drafter, recording: Recording) -> None:
        self._drafter, self._recording, self.name = drafter, recording, drafter.name

    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        assert self._recording.latency is not None
        self._recording.clock_s += self._recording.latency.draft(len(queries.row))
        return self._drafter.propose(stale, queries, noise_rule)


def simulate(
    recording: Recording,
    drafter: Drafter,
    latency: LatencyTable,
    requests: Sequence[Request],
    *,
    cell: SimulatedCell,
    budgets: Sequence[int],
    num_rounds: int,
) -> SimulatedRow:
    """Steps a second of `auto` and of fixed budgets, against draft-free decoding."""

    def speed(budget: int | Literal["auto"]) -> float:
        return _speed(recording, drafter, latency, requests, cell.sequences, budget, num_rounds)

    draft_free = speed(0)
    fixed = {0: 1.0, **{budget: speed(budget) / draft_free for budget in budgets if budget}}
    auto = speed("auto") / draft_free
    best = max(fixed, key=lambda budget: fixed[budget])
    return SimulatedRow(
        **asdict(cell),
        auto=auto,
        best_fixed=best,
        best_ratio=fixed[best],
        of_best=auto / fixed[best],
        fixed=fixed,
    )


def simulated_engine(
    recording: Recording, drafter: Drafter, latency: LatencyTable, settings: EngineSettings
) -> Engine:
    """An engine over what was recorded; `recording.clock_s` runs by the table, from 0 on."""
    recording.latency, recording.clock_s = latency, 0.0
    return Engine(
        recording,
        _Waves(drafter, recording) if settings.budget else None,
        settings,
        latency=latency,
        clock=lambda: recording.clock_s,
    )


def _speed(
    recording: Recording,
    drafter: Drafter,
    latency: LatencyTable,
    requests: Sequence[Request],
    sequences: int,
    budget: int | Literal["auto"],
    num_rounds: int,
) -> float:
    settings = EngineSettings(max_sequences=sequences, budget=budget, max_slots=1 << 20)
    engine = simulated_engine(recording, drafter, latency, settings)
    number = count()
    num_steps, begin_s = 0, 0.0
    for at in range(_FIRST_ROUNDS + num_rounds):
        if at == _FIRST_ROUNDS:
            num_steps, begin_s = engine.num_steps, recording.clock_s
        # Late joiners, so that samples are out of step as in a long job.
        for _ in range(max(1, sequences // 4)):
            if engine.num_waiting + engine.num_active < sequences + 1:
                engine.add(requests[next(number) % len(requests)])
        engine.step()
    return (engine.num_steps - num_steps) / (recording.clock_s - begin_s)
