"""`bench nfe`'s cells: what they share, and how those of one recording are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spot_batch.lab.bench.exact import params_of
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.nfe import (
    CALIBRATED,
    Cell,
    Fitted,
    NfeRow,
    fitted,
    make_drafter,
    measure,
    record,
)
from spot_batch.lab.bench.questions import make_requests
from spot_batch.lab.methods.spiffy import SpiffyGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class NfeBenchmark:
    """What the cells of a grid share.

    `prompts` of each task, with their digest; `learned_from`: training prompts of the baselines;
    `graphs`: Spiffy's, by temperature and budget, fitted where there are none; `live`: one cell in
    so many is run live too, none with 0.
    """

    models: Models
    prompts: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]
    learned_from: Sequence[str]
    graphs: Mapping[tuple[float, int], SpiffyGraph]
    max_new_tokens: int
    live: int

    def runs_live(self, cell: Cell) -> bool:
        return self.live > 0 and cell.is_live(self.live)

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
                length=first.length or self.max_new_tokens,
                fixed=first.length is not None,
            )
            key = (first.temperature, first.length)
            if key not in calibrated and any(cell.method in CALIBRATED for cell in cells):
                calibrated[key] = fitted(
                    target, models.info, self.learned_from, params, self.graphs
                )
            prompts = list(self.prompts[first.task])
            samples = record(target, make_requests(models.info, prompts, params, seed=first.seed))
            fit = calibrated.get(key)
            for cell in cells:
                yield measure(
                    cell,
                    samples,
                    make_drafter(cell, order=order, fitted_to=fit, samples=samples),
                    prompts=self.digests[cell.task],
                    live_on=target if self.runs_live(cell) else None,
                    device=target.device,
                )

        return of_recording
