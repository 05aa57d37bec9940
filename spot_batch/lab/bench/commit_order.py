"""In which order a target commits: the paper's motivating figures, of any target.

How long stale distributions hold (is the argmax of one forward what the next one commits?), how
often the position that was most confident goes next, and what knowing positions or tokens is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.drafters.base import Drafter
from spot_batch.lab.bench.cells import TaskCell, cell_of
from spot_batch.lab.bench.forwards import forwards_needed
from spot_batch.lab.bench.grids import OrderGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of
from spot_batch.lab.bench.recording import RecordedSample, as_trajectories, future_of, record
from spot_batch.lab.bench.tasks import TaskPrompts
from spot_batch.lab.methods.graphs import fit_sharpness
from spot_batch.lab.methods.oracles import OracleDrafter, OracleKind
from spot_batch.learning.queries import make_examples
from spot_batch.models.device import CPU

MAX_BLOCKS = 8
"""Blocks with a row of their own; later ones share the last."""

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderRow:
    """How the commits of one block of the answers compare with the distributions of one forward
    before: `stale_argmax` is the share whose token was the candidate at its position,
    `stale_position` the share that went to the most confident position."""

    block: int
    num_commits: int
    stale_argmax: float
    stale_position: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleRow:
    """Forwards saved where the order, or the tokens, or both are known; `nothing` is a drafter."""

    knows: OracleKind | Literal["nothing"]
    budget: int
    nfe_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOrder:
    """The figures of a recording; `prompts` is their digest."""

    task: str
    temperature: float
    seed: int
    prompts: str
    blocks: tuple[OrderRow, ...]
    oracles: tuple[OracleRow, ...]

    @property
    def cell(self) -> TaskCell:
        return cell_of(TaskCell, self)

    @classmethod
    def read(
        cls,
        *,
        blocks: Sequence[Mapping[str, Any]],
        oracles: Sequence[Mapping[str, Any]],
        **rest: Any,
    ) -> CommitOrder:
        """Makes a row of what JSON holds of it."""
        return cls(
            blocks=tuple(OrderRow(**each) for each in blocks),
            oracles=tuple(OracleRow(**each) for each in oracles),
            **rest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderBenchmark:
    """What all recordings share."""

    models: Models
    prompts: TaskPrompts
    grid: OrderGrid

    def open(self) -> Callable[[Sequence[TaskCell]], Iterator[CommitOrder]]:
        info, target, drafter = self.models.info, self.models.target(), self.models.drafter()

        def recorded(cells: Sequence[TaskCell]) -> Iterator[CommitOrder]:
            for cell in cells:
                params = params_of(
                    info, temperature=cell.temperature, max_new_tokens=self.grid.max_new_tokens
                )
                prompts = self.prompts.texts[cell.task]
                samples = record(target, make_requests(info, prompts, params, seed=cell.seed))
                oracles = worth_of_knowing(
                    samples, info, self.grid.budgets, drafter, device=target.device
                )
                yield CommitOrder(
                    **asdict(cell),
                    prompts=self.prompts.digests[cell.task],
                    blocks=tuple(order_by_block(samples, info)),
                    oracles=tuple(oracles),
                )

        return recorded


def order_by_block(samples: Sequence[RecordedSample], info: ModelInfo) -> list[OrderRow]:
    """The figures of each block, counted from the one that the answer begins in, from 1 on.

    Raises ValueError where no block has two commits.
    """
    states = as_trajectories(samples, info)
    width = info.block_length
    first = torch.tensor(
        [
            len(sample.request.prompt_ids) // width
            for sample in samples
            for block in sample.blocks
            for _ in block.states
        ]
    )
    index = torch.nonzero(states.num_ahead >= 1).squeeze(1)
    if not len(index):
        raise ValueError("no block has two commits: nothing follows a forward's own")
    block = (states.start // width - first).clamp(0, MAX_BLOCKS - 1)[index]
    agrees, position = [], []
    for part in index.split(_CHUNK):
        asked = make_examples(states, part, torch.ones_like(part))
        agrees.append(asked.agrees)
        position.append(asked.stale_best == asked.label)
    right, named = torch.cat(agrees).float(), torch.cat(position).float()
    return [
        OrderRow(
            block=number + 1,
            num_commits=int((block == number).sum()),
            stale_argmax=float(right[block == number].mean()),
            stale_position=float(named[block == number].mean()),
        )
        for number in block.unique().tolist()
    ]


def worth_of_knowing(
    samples: Sequence[RecordedSample],
    info: ModelInfo,
    budgets: Sequence[int],
    drafter: Drafter | None = None,
    *,
    device: torch.device = CPU,
) -> list[OracleRow]:
    """What each oracle, and a drafter that knows nothing, saves at each budget."""
    sharpness = fit_sharpness(as_trajectories(samples, info))
    future, base = future_of(samples), sum(sample.num_commits for sample in samples)
    kinds: tuple[OracleKind, ...] = ("position", "token", "full")
    asked: dict[OracleKind | Literal["nothing"], Drafter] = {
        kind: OracleDrafter(kind, future, sharpness=sharpness) for kind in kinds
    }
    if drafter is not None:
        asked = {"nothing": drafter, **asked}
    rows = []
    for budget in budgets:
        for kind, one in asked.items():
            found = forwards_needed(samples, one, budget=budget, device=device)
            ratio = base / sum(each.num_forwards for each in found)
            rows.append(OracleRow(knows=kind, budget=budget, nfe_ratio=ratio))
    return rows


def plot_order(rows: Sequence[OrderRow], path: Path, *, title: str) -> None:
    """The figures by block, as a PNG. Raises ValueError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot wants matplotlib: pip install 'spot-batch[train]'") from error
    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    axes = figure.subplots()
    blocks = [row.block for row in rows]
    axes.plot(blocks, [row.stale_argmax for row in rows], "o-", label="stale argmax is committed")
    axes.plot(
        blocks, [row.stale_position for row in rows], "s-", label="most confident position is next"
    )
    axes.set(xlabel="block of the answer", ylabel="share of commits", ylim=(0.0, 1.0), title=title)
    axes.set_xticks(blocks)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
