"""`bench throughput`: rows a second with drafts and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import ThroughputGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, questions_of

if TYPE_CHECKING:
    from spot_batch.lab.bench.throughput import ThroughputRow


@benchmark(ThroughputGrid, spreads=False)
def throughput(run: Run[ThroughputGrid]) -> int:
    """Rows a second of each budget against the fastest draft-free build, turn by turn."""
    from spot_batch.lab.bench.cells import digest_of_files
    from spot_batch.lab.bench.clocks import read_table
    from spot_batch.lab.bench.loading import device_name
    from spot_batch.lab.bench.throughput import ThroughputBenchmark, ThroughputRow, ways_of

    grid = run.grid
    table = read_table(grid.table) if grid.table is not None else None
    models = run.models()
    questions, digest = questions_of(grid, models)
    facts = run.facts(
        models,
        device=device_name(models.device),
        prompts=digest,
        latency=digest_of_files(grid.table) if grid.table is not None else "measured",
        budgets=[way.name for way in ways_of(grid)],
    )
    measured = ThroughputBenchmark(models=models, questions=questions, grid=grid, latency=table)
    rows = run.measure(measured, measured.cells(), ThroughputRow, facts, models=models, say=_say)
    run.write(facts, rows)
    return 0


def _say(row: ThroughputRow) -> None:
    host = "" if row.host_share is None else f"host {100 * row.host_share:.1f} %, "
    typer.echo(
        f"in flight {row.sequences:3}  {row.budget:15} {row.tokens_per_s:8.1f} tokens/s  "
        f"{row.ratio_to_draft_free:.3f}x [{row.low:.3f}, {row.high:.3f}] of draft-free, "
        f"{row.ratio_to_canonical:.3f}x under the same numerics, {host}"
        f"{row.drafted_per_forward:.2f} drafted, {row.steps_per_forward:.2f} steps a forward"
    )
