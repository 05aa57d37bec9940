"""Are drafted outputs the draft-free ones, token for token? And what do drafts save?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from spot_batch.drafters.base import Drafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.lab.bench.cells import cell_of
from spot_batch.lab.bench.grids import ExactGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of
from spot_batch.models.block import BlockTarget
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """One way to draft."""

    budget: int
    gamma: float = 0.0
    crossing: bool = True

    @property
    def name(self) -> str:
        floor = f", gamma {self.gamma:g}" if self.gamma else ""
        return f"D {self.budget}{floor}{'' if self.crossing else ', no crossing'}"


def draftings_of(grid: ExactGrid) -> dict[str, Drafting]:
    """The ways to draft of a grid, by name, each once."""
    crossings = {"on": (True,), "off": (False,), "both": (True, False)}[grid.crossing]
    pairs = [(size, 0.0) for size in grid.budgets]
    pairs += [(grid.budgets[-1], floor) for floor in grid.gammas]
    found = (
        Drafting(budget=budget, gamma=gamma, crossing=over)
        for (budget, gamma), over in product(pairs, crossings)
    )
    return {each.name: each for each in found}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactCell:
    """One way to draft, by its name, of so many samples in flight."""

    numerics: str
    temperature: float
    seed: int
    sequences: int
    drafting: str

    def __str__(self) -> str:
        return (
            f"{self.numerics:9} T {self.temperature:g}  seed {self.seed}  {self.drafting:18} in "
            f"flight {self.sequences:2}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRow:
    """One cell: `num_differ` of `num_compared` samples are not the draft-free ones.

    `nfe` and `draft_free_nfe` are verify forwards a sample; `nfe_apart` counts each clean pass as a
    forward of its own, as without fusing.
    """

    numerics: str
    temperature: float
    seed: int
    sequences: int
    drafting: str
    num_compared: int
    num_differ: int
    nfe: float
    draft_free_nfe: float
    nfe_ratio: float
    nfe_apart_ratio: float
    accepted_per_round: float

    @property
    def cell(self) -> ExactCell:
        return cell_of(ExactCell, self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactBenchmark:
    """What all cells share."""

    models: Models
    questions: Sequence[str]
    grid: ExactGrid

    def open(self) -> Callable[[Sequence[ExactCell]], Iterator[ExactRow]]:
        """Decodes every prompt draft-free, one at a time, then in every other way, and compares.

        The cells are of one kind of numerics, temperature and seed.
        """
        info, drafter = self.models.info, self.models.some_drafter()
        targets: dict[str, BlockTarget] = {}
        draftings = draftings_of(self.grid)

        def compared(cells: Sequence[ExactCell]) -> Iterator[ExactRow]:
            kind = cells[0].numerics
            if kind not in targets:
                targets[kind] = self.models.target(canonical=kind == "canonical")
            params = params_of(
                info, temperature=cells[0].temperature, max_new_tokens=self.grid.max_new_tokens
            )
            requests = make_requests(info, self.questions, params, seed=cells[0].seed)
            alone = EngineSettings(max_sequences=1, budget=0)
            base = decode_all(targets[kind], None, requests, alone)
            for cell in cells:
                drafting = draftings[cell.drafting]
                settings = replace(
                    alone,
                    max_sequences=cell.sequences,
                    budget=drafting.budget,
                    gamma=drafting.gamma,
                    crossing=drafting.crossing,
                )
                yield exact_row(cell, base, decode_all(targets[kind], drafter, requests, settings))

        return compared


def cells_of(grid: ExactGrid) -> list[list[ExactCell]]:
    """The cells of a grid; those of one draft-free decoding stand together."""
    names = list(draftings_of(grid))
    return [
        [
            ExactCell(
                numerics=kind, temperature=heat, seed=seed, sequences=number, drafting=drafting
            )
            for number, drafting in product(grid.sequences, names)
        ]
        for kind, heat, seed in product(grid.numerics, grid.temperatures, grid.seeds)
    ]


def decode_all(
    target: BlockTarget,
    drafter: Drafter | None,
    requests: Sequence[Request],
    settings: EngineSettings,
) -> dict[int, Completion]:
    """Every request's completion, by sample id."""
    engine = Engine(target, drafter, settings)
    for request in requests:
        engine.add(request)
    return {completion.sample_id: completion for completion in engine.run()}


def exact_row(
    cell: ExactCell, base: Mapping[int, Completion], found: Mapping[int, Completion]
) -> ExactRow:
    """Compare two decodings of the same requests."""
    differ = [
        sample_id
        for sample_id, completion in base.items()
        if (found[sample_id].token_ids, found[sample_id].commit_step)
        != (completion.token_ids, completion.commit_step)
    ]
    if differ:
        some = ", ".join(map(str, differ[:3])) + (", ..." if len(differ) > 3 else "")
        logger.warning("%s: %d samples are not the draft-free ones: %s", cell, len(differ), some)
    stats = [completion.stats for completion in found.values()]
    nfe = sum(one.num_forwards for one in stats)
    clean = sum(one.num_clean_passes for one in stats)
    base_nfe = sum(completion.stats.num_forwards for completion in base.values())
    base_clean = sum(completion.stats.num_clean_passes for completion in base.values())
    return ExactRow(
        **asdict(cell),
        num_compared=len(base),
        num_differ=len(differ),
        nfe=nfe / len(found),
        draft_free_nfe=base_nfe / len(base),
        nfe_ratio=base_nfe / nfe,
        nfe_apart_ratio=(base_nfe + base_clean) / (nfe + clean),
        accepted_per_round=sum(one.num_accepted for one in stats) / nfe,
    )
