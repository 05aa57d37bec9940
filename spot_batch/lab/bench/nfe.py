"""How many forwards each method needs: every published drafter under one decoder and verifier.

Draft-free decoding is recorded once a task and temperature; every method and budget is replayed on
that. Some cells are run live beside it, and have to agree to the forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.cells import cell_of
from spot_batch.lab.bench.exact import decode_all
from spot_batch.lab.bench.forwards import Needed, forwards_needed
from spot_batch.lab.bench.grids import NfeGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of
from spot_batch.lab.bench.recording import RecordedSample, as_trajectories, future_of, record
from spot_batch.lab.bench.tasks import TaskPrompts, find_tasks
from spot_batch.lab.methods.baselines import ChainDrafter, ConfidenceTreeDrafter, RandomDrafter
from spot_batch.lab.methods.graphs import Counted, count_formulas, fit_graph, fit_sharpness
from spot_batch.lab.methods.oracles import OracleDrafter, OracleKind
from spot_batch.lab.methods.spiffy import SpiffyDrafter, SpiffyGraph
from spot_batch.learning.trajectories import Trajectories
from spot_batch.models.block import BlockTarget
from spot_batch.models.device import CPU
from spot_batch.records.sampling import SamplingParams

GAMMA = 0.1
"""Of SPOT-gamma: the least mass of a drafted state, as published."""

METHODS = (
    "spot",
    "spot-gamma",
    "spiffy",
    "ssd",
    "blockspec",
    "ranking",
    "random",
    "position-oracle",
    "token-oracle",
    "full-oracle",
)

CALIBRATED = ("spiffy", "blockspec", "token-oracle")
"""Methods that are fitted on training prompts first."""

_NUM_RESAMPLES = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement. `length` is None where samples end at their first stop token, else the fixed
    number of tokens that are written."""

    task: str
    method: str
    budget: int
    temperature: float
    seed: int = 0
    length: int | None = None

    @property
    def name(self) -> str:
        end = "to the end" if self.length is None else f"{self.length} tokens"
        return (
            f"{self.task}, T {self.temperature:g}, {self.method}, D {self.budget}, {end}, "
            f"seed {self.seed}"
        )

    def is_live(self, one_in: int) -> bool:
        """Whether it is among the cells, about one in so many, that are run live too."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=4, person=b"spot-live")
        return int.from_bytes(digest.digest(), "little") % one_in == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NfeRow:
    """What a method needed. `prompts`: their digest; `nfe`: forwards a sample; `nfe_ratio`:
    draft-free forwards over them, with its 95 % interval by a paired bootstrap over prompts;
    `next_position_accuracy`: of rounds with a tree, how often the best first guess was the position
    committed next; `accepted_share`: of drafted states. `live_agrees`, `identical`: of the cells
    that were run live too, whether each sample took the replayed number of forwards and is token
    for token the draft-free one.
    """

    task: str
    method: str
    budget: int
    temperature: float
    seed: int
    length: int | None
    prompts: str
    num_prompts: int
    nfe: float
    draft_free_nfe: float
    nfe_ratio: float
    nfe_ratio_low: float
    nfe_ratio_high: float
    accepted_per_round: float
    accepted_share: float
    next_position_accuracy: float
    live_agrees: bool | None = None
    identical: bool | None = None

    @property
    def cell(self) -> Cell:
        return cell_of(Cell, self)


@dataclass(slots=True)
class Fitted:
    """What baselines are calibrated to, of one temperature: on training prompts alone.

    `graphs` by temperature and budget; those that are not given are fitted when they are wanted.
    """

    calibration: Trajectories
    graphs: dict[tuple[float, int], SpiffyGraph] = field(default_factory=dict)
    _counted: Counted | None = None
    _sharpness: float | None = None

    def graph(self, budget: int) -> SpiffyGraph:
        key = (self.calibration.temperatures[0], budget)
        if key not in self.graphs:
            if self._counted is None:
                self._counted = count_formulas(self.calibration)
            self.graphs[key] = fit_graph(self._counted, budget=budget)
        return self.graphs[key]

    @property
    def sharpness(self) -> float:
        if self._sharpness is None:
            self._sharpness = fit_sharpness(self.calibration)
        return self._sharpness


def fitted(
    target: BlockTarget,
    info: ModelInfo,
    questions: Sequence[str],
    params: SamplingParams,
    graphs: Mapping[tuple[float, int], SpiffyGraph],
) -> Fitted:
    """Calibration trajectories of training prompts, under the parameters of the cells."""
    requests = make_requests(info, questions, replace(params, stop_at="block"), seed=1)
    return Fitted(as_trajectories(record(target, requests), info), dict(graphs))


def make_drafter(
    cell: Cell,
    *,
    order: Drafter | None,
    fitted_to: Fitted | None,
    samples: Sequence[RecordedSample],
) -> Drafter:
    """The drafter of a cell's method; `fitted_to` is of use to those in `CALIBRATED` alone.

    Raises ValueError where there is none.
    """
    assert fitted_to is not None or cell.method not in CALIBRATED, f"{cell.method} wants a fit"
    kind = cell.method.removesuffix("-oracle")
    if cell.method in ("spot", "spot-gamma"):
        if order is None:
            raise ValueError(f"{cell.method} wants an order drafter; --drafter names one")
        return order
    if cell.method == "spiffy" and fitted_to is not None:
        return SpiffyDrafter(fitted_to.graph(cell.budget))
    if cell.method == "blockspec" and fitted_to is not None:
        return ConfidenceTreeDrafter(sharpness=fitted_to.sharpness)
    if kind != cell.method and kind in get_args(OracleKind):
        sharpness = fitted_to.sharpness if fitted_to is not None and kind == "token" else 1.0
        return OracleDrafter(kind, future_of(samples), sharpness=sharpness)  # type: ignore[arg-type]
    if cell.method == "ssd":
        return ChainDrafter()
    if cell.method == "ranking":
        return RankingDrafter()
    if cell.method == "random":
        return RandomDrafter()
    raise ValueError(f"unknown method {cell.method!r}; there are {', '.join(METHODS)}")


def measure(
    cell: Cell,
    samples: Sequence[RecordedSample],
    drafter: Drafter,
    *,
    prompts: str,
    live_on: BlockTarget | None = None,
    device: torch.device = CPU,
) -> NfeRow:
    """One cell, replayed with a drafter on `device`; run on a target there as well where one is
    given."""
    gamma = GAMMA if cell.method == "spot-gamma" else 0.0
    found = forwards_needed(samples, drafter, budget=cell.budget, gamma=gamma, device=device)
    base = np.array([sample.num_commits for sample in samples])
    forwards = np.array([one.num_forwards for one in found])
    low, high = ratio_interval(base, forwards)
    agrees, identical = None, None
    if live_on is not None:
        agrees, identical = _live(cell, samples, found, drafter, live_on, gamma)
    num_accepted = sum(one.num_accepted for one in found)
    return NfeRow(
        **asdict(cell),
        prompts=prompts,
        num_prompts=len(samples),
        nfe=float(forwards.mean()),
        draft_free_nfe=float(base.mean()),
        nfe_ratio=float(base.sum() / forwards.sum()),
        nfe_ratio_low=low,
        nfe_ratio_high=high,
        accepted_per_round=num_accepted / int(forwards.sum()),
        accepted_share=num_accepted / max(1, sum(one.num_drafted for one in found)),
        next_position_accuracy=sum(one.num_right for one in found)
        / max(1, sum(one.num_rooted for one in found)),
        live_agrees=agrees,
        identical=identical,
    )


def ratio_interval(base: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of sum(base) / sum(found) by a bootstrap over pairs; seeded."""
    draw = np.random.default_rng(0).integers(len(base), size=(_NUM_RESAMPLES, len(base)))
    ratios = base[draw].sum(1) / found[draw].sum(1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


def _live(
    cell: Cell,
    samples: Sequence[RecordedSample],
    replayed: Sequence[Needed],
    drafter: Drafter,
    target: BlockTarget,
    gamma: float,
) -> tuple[bool, bool]:
    """(every sample took as many forwards as replayed, every sample is the draft-free one)."""
    settings = EngineSettings(max_sequences=16, budget=cell.budget, gamma=gamma)
    found = decode_all(target, drafter, [sample.request for sample in samples], settings)
    done = [found[sample.request.sample_id] for sample in samples]
    agrees = all(
        one.num_forwards == completion.stats.num_forwards
        for one, completion in zip(replayed, done, strict=True)
    )
    identical = all(
        (one.token_ids, one.commit_step)
        == (sample.completion.token_ids, sample.completion.commit_step)
        for one, sample in zip(done, samples, strict=True)
    )
    return agrees, identical


def gaps(rows: Sequence[NfeRow]) -> Iterator[tuple[Cell, float]]:
    """Each cell of `spot`, and which share it closes of the gap in forwards between Spiffy and the
    position oracle."""
    by_cell = {row.cell: row for row in rows}
    for cell, row in by_cell.items():
        if cell.method != "spot":
            continue
        spiffy = by_cell.get(replace(cell, method="spiffy"))
        oracle = by_cell.get(replace(cell, method="position-oracle"))
        if spiffy is not None and oracle is not None and spiffy.nfe > oracle.nfe:
            yield cell, (spiffy.nfe - row.nfe) / (spiffy.nfe - oracle.nfe)


@dataclass(frozen=True, kw_only=True, slots=True)
class NfeBenchmark:
    """What the cells of a grid share.

    `learned_from`: training prompts of the baselines; `graphs`: Spiffy's, by temperature and
    budget, fitted where there are none.
    """

    models: Models
    prompts: TaskPrompts
    grid: NfeGrid
    learned_from: Sequence[str]
    graphs: Mapping[tuple[float, int], SpiffyGraph]

    def runs_live(self, cell: Cell) -> bool:
        return self.grid.live > 0 and cell.is_live(self.grid.live)

    def is_done(self, cell: Cell, row: NfeRow) -> bool:
        """Whether a row that was kept has been run live if it is to be."""
        return row.live_agrees is not None or not self.runs_live(cell)

    def open(self) -> Callable[[Sequence[Cell]], Iterator[NfeRow]]:
        """Measures cells of one task, temperature, seed and length: they share a recording."""
        target, models = self.models.target(), self.models
        order = models.drafter() if models.choice.path is not None else None
        calibrated: dict[tuple[float, int | None], Fitted] = {}

        def of_recording(cells: Sequence[Cell]) -> Iterator[NfeRow]:
            first = cells[0]
            params = params_of(
                models.info,
                temperature=first.temperature,
                max_new_tokens=first.length or self.grid.max_new_tokens,
                is_fixed=first.length is not None,
            )
            key = (first.temperature, first.length)
            if key not in calibrated and any(cell.method in CALIBRATED for cell in cells):
                calibrated[key] = fitted(
                    target, models.info, self.learned_from, params, self.graphs
                )
            prompts = self.prompts.texts[first.task]
            samples = record(target, make_requests(models.info, prompts, params, seed=first.seed))
            fit = calibrated.get(key)
            for cell in cells:
                yield measure(
                    cell,
                    samples,
                    make_drafter(cell, order=order, fitted_to=fit, samples=samples),
                    prompts=self.prompts.digests[cell.task],
                    live_on=target if self.runs_live(cell) else None,
                    device=target.device,
                )

        return of_recording


def cells_of(grid: NfeGrid) -> list[list[Cell]]:
    """The cells of a grid, those of one recording together. Raises ValueError for a method that
    there is not."""
    for name in grid.methods:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    tasks = [task.name for task in find_tasks(grid.tasks)]
    return [
        [
            Cell(
                task=task, method=method, budget=budget, temperature=heat, seed=seed, length=length
            )
            for method, budget in product(grid.methods, grid.budgets)
        ]
        for heat, length, task, seed in product(grid.temperatures, grid.lengths, tasks, grid.seeds)
    ]


def check_graphs(
    path: Path, graphs: Mapping[tuple[float, int], SpiffyGraph], groups: Sequence[Sequence[Cell]]
) -> None:
    """Raises ValueError where a file of graphs has none for a cell that wants one."""
    for cell in (cell for group in groups for cell in group if cell.method == "spiffy"):
        if (cell.temperature, cell.budget) not in graphs:
            there = ", ".join(f"T {heat:g}, D {budget}" for heat, budget in sorted(graphs))
            raise ValueError(
                f"{path}: no graph for T {cell.temperature:g}, D {cell.budget}; there are {there}"
            )
