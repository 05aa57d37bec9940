"""`bench commit-order`, `bench scores`, `bench prompts`: what the prompts of tasks show."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.lab.commands.bench import bench
from spot_batch.lab.commands.measuring import (
    Address,
    Data,
    Device,
    DrafterOption,
    JsonFile,
    Length,
    Limit,
    Model,
    Out,
    Seeds,
    Tasks,
    Temperatures,
    Threads,
    load_prompts,
    seeds_of,
    spread_to,
    temperatures_of,
    write_document,
    write_rows,
)
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, check_writable, numbers

if TYPE_CHECKING:
    from spot_batch.lab.bench.order import CommitOrder


@bench.command("prompts")
@plain_errors
def prompts(
    tasks: Tasks = "synthetic",
    model: Annotated[str, typer.Option(help="Whose chat template.")] = "bundled",
    data: Data = None,
    limit: Limit = 1,
    template: Annotated[bool, typer.Option(help="The Jinja template alone.")] = False,
    as_json: Json = False,
) -> None:
    """The exact prompt of each task, as the model is given it."""
    from spot_batch.checkpoints.registry import load_tokenizer, resolve_model
    from spot_batch.lab.bench.questions import rendered
    from spot_batch.lab.bench.tasks import find_tasks, load_task

    found: list[dict[str, object]] = []
    info = None if template else resolve_model(model)
    for task in find_tasks(tasks):
        if info is None:
            found.append({"task": task.name, "template": task.template})
            continue
        tokenizer = load_tokenizer(info.path)
        found += [
            {"task": task.name, "prompt": rendered(info, tokenizer, row.prompt)}
            for row in load_task(task, data=data, limit=limit)
        ]
    if as_json:
        print(json.dumps(found))
        return
    for each in found:
        typer.echo(f"--- {each['task']}")
        typer.echo(each.get("template", each.get("prompt")))


@bench.command("commit-order")
@plain_errors
def commit_order(
    model: Model = "bundled",
    drafter: Annotated[
        str, typer.Option(help="Set beside the oracles: auto, ranking, none, or a path.")
    ] = "auto",
    tasks: Annotated[
        str, typer.Option("--tasks", "--task", help="synthetic, gsm8k, mbpp, humaneval, math500.")
    ] = "synthetic",
    data: Data = None,
    limit: Limit = 20,
    temperatures: Annotated[
        str, typer.Option("--temperatures", "--temperature", help="By comma; 0 is greedy.")
    ] = "0",
    seeds: Seeds = "0",
    max_new_tokens: Length = 128,
    budgets: Annotated[str, typer.Option(help="Of the oracles, by comma.")] = "8,20",
    plot: Annotated[
        Path | None, typer.Option(help="Write the figures as a PNG, of one recording.")
    ] = None,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    threads: Threads = 1,
) -> None:
    """How long stale distributions hold, and what knowing order or tokens is worth."""
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.order import CommitOrder, OrderBenchmark, OrderCell, plot_order
    from spot_batch.lab.bench.running import Kept, run_cells

    sizes = numbers(budgets, int, "budgets", least=1)
    heats, numbered = temperatures_of(temperatures), seeds_of(seeds)
    check_writable(json_file, "--json")
    check_writable(plot, "--plot")
    prompts, digests = load_prompts(tasks, data=data, limit=limit)
    cells = [OrderCell(*each) for each in product(prompts, heats, numbered)]
    if plot is not None and len(cells) > 1:
        raise ValueError(f"--plot wants one task, temperature and seed, got {len(cells)} of them")
    models = find_models(model, drafter, threads=threads, device=device)
    facts = {
        "command": "bench commit-order",
        **models.facts(),
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "budgets": sizes,
    }
    kept = Kept(out, CommitOrder.read, facts, prompts=digests)
    benchmark = OrderBenchmark(
        models=models,
        prompts=prompts,
        digests=digests,
        budgets=sizes,
        max_new_tokens=max_new_tokens,
    )
    spread = spread_to(address, models)
    for row in run_cells(benchmark, [[cell] for cell in cells], kept, spread=spread):
        typer.echo(f"{row.task}, T {row.temperature:g}, seed {row.seed}: measured", err=True)
    rows = [kept.rows[cell] for cell in cells]
    for row in rows:
        _show_order(row, models.choice.name)
    if plot is not None:
        title = f"{models.info.name}, {tasks}, T {rows[0].temperature:g}"
        plot_order(rows[0].blocks, plot, title=title)
        typer.echo(f"{plot} written")
    of_cell = {
        row.cell: {"task": row.task, "temperature": row.temperature, "seed": row.seed}
        for row in rows
    }
    blocks = [{**of_cell[row.cell], **asdict(each)} for row in rows for each in row.blocks]
    oracles = [{**of_cell[row.cell], **asdict(each)} for row in rows for each in row.oracles]
    write_document(json_file, {**facts, "blocks": blocks, "oracles": oracles})


def _show_order(row: CommitOrder, drafter: str) -> None:
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


@bench.command("scores")
@plain_errors
def scores(
    tasks: Tasks = "synthetic",
    model: Model = "bundled",
    drafter: DrafterOption = "auto",
    budget: Annotated[int, typer.Option(min=1, help="Drafted slots a sample.")] = 8,
    temperatures: Temperatures = "0",
    seeds: Seeds = "0",
    data: Data = None,
    limit: Limit = 20,
    max_new_tokens: Length = 128,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the programs that the model wrote, in limits.")
    ] = False,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    threads: Threads = 1,
) -> int:
    """Right answers, drafted and draft-free: equal, since the texts are."""
    from spot_batch.lab.bench.grading import ScoreCell, ScoreRow, find_grader
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.running import Kept, digest_of, run_cells
    from spot_batch.lab.bench.scores import ScoreBenchmark
    from spot_batch.lab.bench.tasks import find_tasks, load_task

    heats, numbered = temperatures_of(temperatures), seeds_of(seeds)
    check_writable(json_file, "--json")
    found = find_tasks(tasks)
    for task in found:
        find_grader(task.name, run_code=run_code)
    rows_of = {task.name: load_task(task, data=data, limit=limit) for task in found}
    digests = {name: digest_of([row.prompt for row in rows]) for name, rows in rows_of.items()}
    models = find_models(model, drafter, threads=threads, device=device)
    models.some_drafter()
    facts = {
        "command": "bench scores",
        **models.facts(),
        "budget": budget,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
    }
    kept = Kept(out, ScoreRow, facts, prompts=digests)
    benchmark = ScoreBenchmark(
        models=models,
        rows=rows_of,
        digests=digests,
        budget=budget,
        max_new_tokens=max_new_tokens,
        run_code=run_code,
    )
    cells = [ScoreCell(*each) for each in product(rows_of, heats, numbered)]
    spread = spread_to(address, models)
    for row in run_cells(benchmark, [[cell] for cell in cells], kept, spread=spread):
        typer.echo(f"{row.task}, T {row.temperature:g}, seed {row.seed}: measured", err=True)
    rows = [kept.rows[cell] for cell in cells]
    for row in rows:
        typer.echo(
            f"{row.task}, T {row.temperature:g}, seed {row.seed}, {row.method}: "
            f"{row.score:.3f} right, draft-free {row.draft_free_score:.3f}; {row.num_differ} of "
            f"{row.num_prompts} texts differ, p {row.p_value:.3g}"
        )
    write_rows(json_file, facts, rows)
    return 1 if any(row.num_differ for row in rows) else 0
