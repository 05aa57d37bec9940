"""`bench store`: what leases, publication and compaction cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spot_batch.terminal.errors import plain_errors


@plain_errors
def store(
    folder: Annotated[Path, typer.Argument(help="An empty folder for the job; left there.")],
    samples: Annotated[int, typer.Option(min=2, help="How many samples.")] = 1_000_000,
    lease: Annotated[int, typer.Option(min=1, help="Samples to a segment.")] = 1_000,
) -> int:
    """Measure leasing, publication, compaction and recovery with an engine that answers at once."""
    from spot_batch.lab.bench.store import bench_store

    figures = bench_store(folder, num_samples=samples, lease_rows=lease)
    typer.echo(
        f"{figures.num_samples:,} samples: {figures.rows_per_s:,.0f} rows/s published and "
        f"compacted, recovery of the half-done job {figures.recovery_s:.2f} s, memory grew by "
        f"{figures.growth_mib:.0f} MiB, the end took {figures.finish_s:.1f} s"
    )
    return 0
