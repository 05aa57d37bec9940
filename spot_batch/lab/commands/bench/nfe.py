"""`bench nfe`: every method under one decoder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from spot_batch.lab.bench.grids import NfeGrid
from spot_batch.lab.commands.bench.running import Run, benchmark

if TYPE_CHECKING:
    from spot_batch.lab.bench.nfe import NfeRow

logger = logging.getLogger(__name__)


@benchmark(NfeGrid)
def nfe(run: Run[NfeGrid]) -> int:
    """Forwards that each method needs, replayed on recorded draft-free decoding."""
    from spot_batch.lab.bench.cells import digest_of, digest_of_files
    from spot_batch.lab.bench.nfe import NfeBenchmark, NfeRow, cells_of, check_graphs
    from spot_batch.lab.bench.tasks import load_prompts
    from spot_batch.lab.methods.spiffy import load_graphs

    grid = run.grid
    groups = cells_of(grid)
    prompts = load_prompts(grid.tasks, data=grid.data, limit=grid.limit)
    learned_from = _calibration_prompts(grid.calibration, grid.calibrate_on)
    models = run.models(drafts=False)
    if models.choice.path is None and {"spot", "spot-gamma"} & set(grid.methods):
        raise ValueError(
            f"{models.info.name} has no order drafter ({models.choice.why}); train one, or leave "
            "out spot"
        )
    graphs = {}
    if grid.spiffy is not None:
        graphs = load_graphs(grid.spiffy, block_length=models.info.block_length)
        check_graphs(grid.spiffy, graphs, groups)
    facts = run.facts(
        models,
        calibration=digest_of(learned_from),
        spiffy=digest_of_files(grid.spiffy) if grid.spiffy is not None else None,
    )
    measured = NfeBenchmark(
        models=models, prompts=prompts, grid=grid, learned_from=learned_from, graphs=graphs
    )
    rows = run.measure(
        measured,
        groups,
        NfeRow,
        facts,
        models=models,
        say=_say,
        prompts=prompts.digests,
        is_done=measured.is_done,
    )
    run.write(facts, rows)
    _show_tables(rows, grid)
    return _show_live(rows)


def _calibration_prompts(path: Path | None, count: int) -> list[str]:
    if path is None:
        from spot_batch.lab.bundled.corpus import problems

        return [each.question for each in problems(count, seed=0, split="train")]
    from spot_batch.lab.bench.questions import read_questions

    return read_questions(path, limit=count)


def _say(row: NfeRow) -> None:
    typer.echo(
        f"{row.cell.name}: {row.nfe_ratio:.2f}x "
        f"({row.nfe:.1f} forwards against {row.draft_free_nfe:.1f})",
        err=True,
    )


def _show_tables(rows: Sequence[NfeRow], grid: NfeGrid) -> None:
    """Tables of ratios: a line a method, a column a temperature and budget."""
    from spot_batch.lab.bench.nfe import gaps

    published = {
        (str(each["task"]), str(each["method"]), int(each["budget"]), float(each["temperature"])): (
            str(each["nfe_ratio"])
        )
        for each in grid.published
    }
    for task, length, seed in dict.fromkeys((row.task, row.length, row.seed) for row in rows):
        of_group = [row for row in rows if (row.task, row.length, row.seed) == (task, length, seed)]
        columns = list(dict.fromkeys((row.temperature, row.budget) for row in of_group))
        end = "" if length is None else f", {length} tokens"
        typer.echo(f"\n{task}{end}, seed {seed}, {of_group[0].num_prompts} prompts: fewer forwards")
        typer.echo("| method | " + " | ".join(f"T {heat:g}, D {d}" for heat, d in columns) + " |")
        typer.echo("|---" * (len(columns) + 1) + "|")
        for method in dict.fromkeys(row.method for row in of_group):
            of_method = [row for row in of_group if row.method == method]
            row_of = {(row.temperature, row.budget): row for row in of_method}
            cells = []
            for heat, budget in columns:
                row = row_of[heat, budget]
                theirs = published.get((task, method, budget, heat))
                cells.append(
                    f"{row.nfe_ratio:.2f} ({row.nfe_ratio_low:.2f} to {row.nfe_ratio_high:.2f})"
                    + (f", published {theirs}" if theirs else "")
                )
            typer.echo(f"| {method} | " + " | ".join(cells) + " |")
    for cell, share in gaps(rows):
        typer.echo(f"{cell.name}: closes {share:.0%} of the gap from Spiffy to the position oracle")


def _show_live(rows: Sequence[NfeRow]) -> int:
    """How the live runs compare; the exit code."""
    wrong = [row for row in rows if row.live_agrees is False or row.identical is False]
    for row in wrong:
        logger.warning("%s: the live run differs", row.cell.name)
    num_live = sum(row.live_agrees is not None for row in rows)
    if num_live:
        typer.echo(f"{num_live} of {len(rows)} cells run live too, {len(wrong)} differ")
    else:
        typer.echo(f"none of {len(rows)} cells run live too: --live takes a larger share")
    return 1 if wrong else 0
