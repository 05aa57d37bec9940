"""`bench commit-order`: in which order a target commits."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import OrderGrid
from spot_batch.lab.commands.bench.running import Run, benchmark, say_measured
from spot_batch.terminal.options import check_writable

if TYPE_CHECKING:
    from spot_batch.lab.bench.commit_order import CommitOrder


@benchmark(OrderGrid)
def commit_order(run: Run[OrderGrid]) -> int:
    """How long stale distributions hold, and what knowing order or tokens is worth."""
    from spot_batch.lab.bench.cells import TaskCell
    from spot_batch.lab.bench.commit_order import CommitOrder, OrderBenchmark, plot_order
    from spot_batch.lab.bench.tasks import load_prompts

    grid = run.grid
    check_writable(grid.plot, "--plot")
    prompts = load_prompts(grid.tasks, data=grid.data, limit=grid.limit)
    cells = [TaskCell(*each) for each in product(prompts.texts, grid.temperatures, grid.seeds)]
    if grid.plot is not None and len(cells) > 1:
        raise ValueError(f"--plot wants one task, temperature and seed, got {len(cells)} of them")
    models = run.models(drafts=False)
    facts = run.facts(models)
    measured = OrderBenchmark(models=models, prompts=prompts, grid=grid)
    rows = run.measure(
        measured,
        [[cell] for cell in cells],
        CommitOrder.read,
        facts,
        models=models,
        say=say_measured,
        prompts=prompts.digests,
    )
    for row in rows:
        _show(row, models.choice.name)
    if grid.plot is not None:
        title = f"{models.info.name}, {','.join(grid.tasks)}, T {rows[0].temperature:g}"
        plot_order(rows[0].blocks, grid.plot, title=title)
        typer.echo(f"{grid.plot} written")
    blocks = [{**asdict(row.cell), **asdict(each)} for row in rows for each in row.blocks]
    oracles = [{**asdict(row.cell), **asdict(each)} for row in rows for each in row.oracles]
    run.write_document({**facts, "blocks": blocks, "oracles": oracles})
    return 0


def _show(row: CommitOrder, drafter: str) -> None:
    typer.echo(f"\n{row.task}, T {row.temperature:g}, seed {row.seed}")
    typer.echo("| block | commits | stale argmax is committed | most confident position is next |")
    typer.echo("|---|---|---|---|")
    for each in row.blocks:
        typer.echo(
            f"| {each.block} | {each.num_commits:,} | {each.stale_argmax:.3f} "
            f"| {each.stale_position:.3f} |"
        )
    sizes = dict.fromkeys(each.budget for each in row.oracles)
    typer.echo("\n| known | " + " | ".join(f"D {budget}" for budget in sizes) + " |")
    typer.echo("|---" * (len(sizes) + 1) + "|")
    for kind in dict.fromkeys(each.knows for each in row.oracles):
        of_kind = [f"{each.nfe_ratio:.2f}x" for each in row.oracles if each.knows == kind]
        name = f"nothing ({drafter})" if kind == "nothing" else kind
        typer.echo(f"| {name} | " + " | ".join(of_kind) + " |")
