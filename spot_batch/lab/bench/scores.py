"""`bench scores`' cells: the same prompts answered draft-free and drafted, and graded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.cells import TaskCell
from spot_batch.lab.bench.exact import decode_all
from spot_batch.lab.bench.grading import ScoreRow, find_grader, score_row
from spot_batch.lab.bench.grids import ScoreGrid
from spot_batch.lab.bench.loading import Models
from spot_batch.lab.bench.questions import make_requests, params_of
from spot_batch.lab.bench.tasks import TaskRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreBenchmark:
    """What all cells share: rows of each task, with their prompts' digest."""

    models: Models
    rows: Mapping[str, Sequence[TaskRow]]
    digests: Mapping[str, str]
    grid: ScoreGrid

    def open(self) -> Callable[[Sequence[TaskCell]], Iterator[ScoreRow]]:
        info, target, drafter = self.models.info, self.models.target(), self.models.some_drafter()
        tokenizer = load_tokenizer(info.path)

        def answered(cell: TaskCell, budget: int) -> list[str]:
            params = params_of(
                info, temperature=cell.temperature, max_new_tokens=self.grid.max_new_tokens
            )
            prompts = [row.prompt for row in self.rows[cell.task]]
            requests = make_requests(info, prompts, params, seed=cell.seed)
            settings = EngineSettings(budget=budget)
            done = decode_all(target, drafter if budget else None, requests, settings)
            return [
                str(tokenizer.decode(done[at].token_ids, skip_special_tokens=True))
                for at in range(len(requests))
            ]

        def scored(cells: Sequence[TaskCell]) -> Iterator[ScoreRow]:
            for cell in cells:
                grade = find_grader(cell.task, run_code=self.grid.run_code)
                free, drafted = (answered(cell, budget) for budget in (0, self.grid.budget))
                rows = self.rows[cell.task]
                right = [
                    [grade(row.fields, text) for row, text in zip(rows, texts, strict=True)]
                    for texts in (free, drafted)
                ]
                yield score_row(
                    cell,
                    f"{self.models.choice.name}, D {self.grid.budget}",
                    prompts=self.digests[cell.task],
                    texts=(free, drafted),
                    right=(right[0], right[1]),
                )

        return scored
