"""`bench occupancy`: how full a job keeps its slots."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import OccupancyGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, questions_of

if TYPE_CHECKING:
    from spot_batch.lab.bench.occupancy import Occupancy


@benchmark(OccupancyGrid)
def occupancy(run: Run[OccupancyGrid]) -> int:
    """How full a job keeps its slots, and what drafts do with those that fall idle at its end."""
    from spot_batch.lab.bench.cells import digest_of
    from spot_batch.lab.bench.clocks import clock_of
    from spot_batch.lab.bench.occupancy import Occupancy, OccupancyBenchmark, cells_of

    grid = run.grid
    table = None if grid.clock == "device" else clock_of(grid.clock)
    models = run.models()
    questions, digest = questions_of(grid, models)
    facts = run.facts(
        models,
        prompts=digest,
        clock="device" if table is None else digest_of([table.to_json()]),
        new_tokens=[grid.min_new_tokens, grid.max_new_tokens],
    )
    measured = OccupancyBenchmark(models=models, questions=questions, grid=grid, table=table)
    say = partial(_say, plot=grid.plot)
    rows = run.measure(measured, cells_of(grid), Occupancy.read, facts, models=models, say=say)
    run.write(facts, rows)
    return 0


def _say(row: Occupancy, *, plot: bool) -> None:
    typer.echo(
        f"budget {row.budget}: {row.num_samples} samples in {row.seconds:.1f} s, "
        f"{100 * row.busy_share:.1f} % of the slots busy until the tail, which is "
        f"{100 * row.tail_share:.1f} % of the time"
    )
    fastest = max((each.steps_per_s_per_sample for each in row.tail), default=1.0)
    for each in row.tail:
        bar = "#" * round(30 * each.steps_per_s_per_sample / fastest) if plot else ""
        typer.echo(
            f"  {each.in_flight:4} in flight, {each.num_rounds:4} rounds: "
            f"{each.steps_per_s_per_sample:8.1f} commits/s a sample, "
            f"{each.drafted_slots:5.2f} drafted slots  {bar}".rstrip()
        )
