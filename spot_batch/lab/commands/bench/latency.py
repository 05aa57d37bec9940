"""`bench latency`: what forwards, drafts and visited states cost here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import LatencyGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, say_models

if TYPE_CHECKING:
    from spot_batch.engine.latency import LatencyTable


@benchmark(LatencyGrid, keeps=False, spreads=False)
def latency(run: Run[LatencyGrid]) -> int:
    """Measure what forwards, drafts and visited states cost on this device."""
    from spot_batch.engine.measure import measure_latency
    from spot_batch.lab.bench.loading import find_models

    grid = run.grid
    models = find_models(
        grid.model,
        grid.drafter,
        dtype=grid.dtype,
        threads=grid.threads,
        device=grid.device,
        random_weights=grid.random_weights,
    )
    target = models.target(canonical=grid.numerics == "canonical")
    say_models(models)
    table = measure_latency(
        target, models.drafter(), max_slots=grid.max_slots, at_most_s=grid.seconds
    )
    _show(table)
    if run.json is not None:
        run.json.write_text(table.to_json(), encoding="utf-8")
    return 0


def _show(table: LatencyTable) -> None:
    """Milliseconds, and the curve of the shortest prefix as bars."""
    for length, row in zip(table.num_keys, table.forward_s, strict=True):
        typer.echo(f"forwards over {length} keys a slot, ms")
        for size, seconds in zip(table.slots, row, strict=True):
            bar = "#" * max(1, round(40 * seconds / max(row)))
            typer.echo(f"  {size:5} slots {1e3 * seconds:9.2f}  {bar}")
    for what, sizes, taken in (
        ("a drafting wave", table.queries, table.draft_s),
        ("visiting, greedy", table.states, table.visit_s),
        ("visiting, with noise", table.states, table.noisy_visit_s),
    ):
        cells = "  ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(sizes, taken, strict=True))
        typer.echo(f"{what} of so many states, ms: {cells or 'no drafter'}")
