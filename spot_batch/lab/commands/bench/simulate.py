"""`bench simulate`: the engine under the clock of another device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import SimulateGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, questions_of

if TYPE_CHECKING:
    from spot_batch.lab.bench.simulate import SimulatedRow


@benchmark(SimulateGrid)
def simulate(run: Run[SimulateGrid]) -> int:
    """Decode under the clock of another device: is `auto` as good as the best fixed budget?"""
    from spot_batch.lab.bench.clocks import clock_of
    from spot_batch.lab.bench.simulate import SimulatedBenchmark, SimulatedRow, cells_of

    grid = run.grid
    tables = {name: clock_of(name) for name in grid.tables}
    models = run.models()
    questions, digest = questions_of(grid, models)
    facts = run.facts(models, prompts=digest)
    measured = SimulatedBenchmark(models=models, questions=questions, grid=grid, tables=tables)
    groups = cells_of(grid, tables)
    rows = run.measure(measured, groups, SimulatedRow.read, facts, models=models, say=_say)
    run.write(facts, rows)
    return 0


def _say(row: SimulatedRow) -> None:
    cells = "  ".join(f"D {one} {ratio:.2f}" for one, ratio in row.fixed.items())
    typer.echo(
        f"{row.table}  in flight {row.sequences:3}  auto {row.auto:.3f}x of draft-free, "
        f"{row.of_best:.3f} of the best (D {row.best_fixed})  {cells}"
    )
