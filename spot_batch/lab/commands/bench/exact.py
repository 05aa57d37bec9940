"""`bench exact`: are drafted outputs the draft-free ones?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import ExactGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, questions_of

if TYPE_CHECKING:
    from spot_batch.lab.bench.exact import ExactRow


@benchmark(ExactGrid)
def exact(run: Run[ExactGrid]) -> int:
    """Compare drafted outputs with draft-free ones token for token, and count forwards saved."""
    from spot_batch.lab.bench.exact import ExactBenchmark, ExactRow, cells_of

    grid, models = run.grid, run.models()
    questions, digest = questions_of(grid, models)
    facts = run.facts(models, prompts=digest)
    measured = ExactBenchmark(models=models, questions=questions, grid=grid)
    rows = run.measure(measured, cells_of(grid), ExactRow, facts, models=models, say=_say)
    run.write(facts, rows)
    canonical = [row for row in rows if row.numerics == "canonical"]
    num_differ = sum(row.num_differ for row in canonical)
    if canonical:
        num_compared = sum(row.num_compared for row in canonical)
        typer.echo(f"canonical: {num_compared} sequences compared, {num_differ} differ")
    return 1 if num_differ else 0


def _say(row: ExactRow) -> None:
    typer.echo(
        f"{row.cell}: {row.num_differ} of {row.num_compared} differ, {row.nfe_ratio:.2f}x "
        f"fewer forwards ({row.nfe:.1f} against {row.draft_free_nfe:.1f})"
    )
