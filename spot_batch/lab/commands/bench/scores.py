"""`bench scores`: right answers, drafted and draft-free."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import ScoreGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, say_measured

if TYPE_CHECKING:
    from spot_batch.lab.bench.grading import ScoreRow


@benchmark(ScoreGrid)
def scores(run: Run[ScoreGrid]) -> int:
    """Right answers, drafted and draft-free: equal, since the texts are."""
    from spot_batch.lab.bench.cells import TaskCell, digest_of
    from spot_batch.lab.bench.grading import ScoreRow, find_grader
    from spot_batch.lab.bench.scores import ScoreBenchmark
    from spot_batch.lab.bench.tasks import find_tasks, load_task

    grid = run.grid
    tasks = find_tasks(grid.tasks)
    for task in tasks:
        find_grader(task.name, run_code=grid.run_code)
    rows_of = {task.name: load_task(task, data=grid.data, limit=grid.limit) for task in tasks}
    digests = {name: digest_of([row.prompt for row in rows]) for name, rows in rows_of.items()}
    models = run.models()
    facts = run.facts(models)
    measured = ScoreBenchmark(models=models, rows=rows_of, digests=digests, grid=grid)
    groups = [[TaskCell(*each)] for each in product(rows_of, grid.temperatures, grid.seeds)]
    rows = run.measure(
        measured, groups, ScoreRow, facts, models=models, say=say_measured, prompts=digests
    )
    for row in rows:
        _show(row)
    run.write(facts, rows)
    return 1 if any(row.num_differ for row in rows) else 0


def _show(row: ScoreRow) -> None:
    typer.echo(
        f"{row.task}, T {row.temperature:g}, seed {row.seed}, {row.method}: "
        f"{row.score:.3f} right, draft-free {row.draft_free_score:.3f}; {row.num_differ} of "
        f"{row.num_prompts} texts differ, p {row.p_value:.3g}"
    )
