"""`bench nfe`, `bench prompts`, `calibrate spiffy`: every method under one decoder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spot_batch.cli.app import Json, numbers, speaking_plainly
from spot_batch.cli.bench import bench
from spot_batch.cli.drafters import calibrate

if TYPE_CHECKING:
    from spot_batch.bench.nfe import Cell, NfeRow

logger = logging.getLogger(__name__)

_LIVE = 20  # about one cell in so many is run live too


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What `bench nfe` measures; the keys of its YAML files."""

    model: str = "bundled"
    drafter: str = "auto"
    tasks: str = "synthetic"
    methods: str = "spot,spot-gamma,spiffy,ssd,blockspec,ranking,position-oracle,full-oracle"
    budgets: str = "8,20"
    temperatures: str = "0,1"
    seeds: str = "0"
    lengths: str = "end"
    limit: int = 20
    max_new_tokens: int = 128
    calibrate_on: int = 50
    published: tuple[Mapping[str, Any], ...] = ()


def read_grid(path: Path | None, given: Mapping[str, Any]) -> Grid:
    """A YAML file's grid under the options that were given. Raises ValueError naming a bad key."""
    values: dict[str, Any] = {}
    if path is not None:
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{path}: cannot be read ({error})") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}: want keys and values")
    known = {each.name: each for each in fields(Grid)}
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: unknown key {name!r}; there are {', '.join(known)}")
    values |= {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name == "published":
            values[name] = _published(value)
        elif known[name].type == "int":
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
        else:
            listed = value if isinstance(value, list) else [value]
            values[name] = ",".join(str(each) for each in listed)
    return Grid(**values)


_PUBLISHED = ("task", "method", "budget", "temperature", "nfe_ratio")


def _published(value: object) -> tuple[Mapping[str, Any], ...]:
    """A list of other people's figures; ValueError naming the entry and what is wrong with it."""
    if not isinstance(value, list):
        raise ValueError(f"published must be a list, got {value!r}")
    for at, each in enumerate(value):
        if not isinstance(each, dict) or not set(_PUBLISHED) <= each.keys():
            raise ValueError(f"published[{at}] must have {', '.join(_PUBLISHED)}, got {each!r}")
        for name in ("budget", "temperature"):
            if not isinstance(each[name], int | float) or isinstance(each[name], bool):
                raise ValueError(f"published[{at}].{name} must be a number, got {each[name]!r}")
    return tuple(value)


@bench.command("nfe")
@speaking_plainly
def nfe(
    spec: Annotated[
        Path | None, typer.Argument(help="A YAML file with these options as keys.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, folder, or a packaged one.")] = None,
    drafter: Annotated[str | None, typer.Option(help="SPOT's: auto, or a drafter's path.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="synthetic, gsm8k, mbpp, humaneval, math500.")
    ] = None,
    methods: Annotated[str | None, typer.Option(help="By comma.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Drafted slots, by comma.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="By comma.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Of the noise, by comma.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="`end`, or fixed numbers of tokens, by comma.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts a task.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    calibrate_on: Annotated[
        int | None, typer.Option(help="Training prompts that the baselines are calibrated on.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="JSON lines of training prompts; the synthetic corpus'.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder with the tasks' JSON-lines files, not the hub.")
    ] = None,
    spiffy_graphs: Annotated[
        Path | None, typer.Option("--spiffy", help="A file of `calibrate spiffy`.")
    ] = None,
    live: Annotated[
        int, typer.Option(help="Run one cell in so many live too; 1 all, 0 none.")
    ] = _LIVE,
    out: Annotated[
        Path | None, typer.Option(help="Keep cells here; the same command goes on there.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> int:
    """Forwards that each method needs, replayed on recorded draft-free decoding."""
    grid = read_grid(
        spec,
        {
            "model": model,
            "drafter": drafter,
            "tasks": tasks,
            "methods": methods,
            "budgets": budgets,
            "temperatures": temperatures,
            "seeds": seeds,
            "lengths": lengths,
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "calibrate_on": calibrate_on,
        },
    )
    rows = _run(grid, calibration, spiffy_graphs, data, live, out, json_file, threads)
    _show(rows, grid)
    wrong = [row for row in rows if row.live_agrees is False or row.identical is False]
    for row in wrong:
        logger.warning("%s: the live run differs", row.cell.name)
    num_live = sum(row.live_agrees is not None for row in rows)
    typer.echo(f"{num_live} of {len(rows)} cells run live too, {len(wrong)} differ")
    return 1 if wrong else 0


def _run(
    grid: Grid,
    calibration: Path | None,
    spiffy_graphs: Path | None,
    data: Path | None,
    live: int,
    out: Path | None,
    json_file: Path | None,
    threads: int,
) -> list[NfeRow]:
    import torch

    from spot_batch.bench.nfe import (
        METHODS,
        Cell,
        fitted,
        make_drafter,
        measure,
        params_of,
        record,
    )
    from spot_batch.bench.prompts import make_requests
    from spot_batch.bench.tasks import find_tasks, load_task
    from spot_batch.drafters.registry import choose_drafter, load_drafter
    from spot_batch.drafters.spiffy import load_graphs
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import resolve_model

    methods = [name.strip() for name in grid.methods.split(",")]
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    found_tasks = find_tasks(grid.tasks)
    budgets = numbers(grid.budgets, int, "budgets")
    if not budgets or min(budgets) < 1:
        raise ValueError(f"--budgets wants whole numbers from 1, got {grid.budgets!r}")
    ends = _lengths(grid.lengths)
    torch.set_num_threads(threads)
    prompts = {
        task.name: [row.prompt for row in load_task(task, data=data, limit=grid.limit)]
        for task in found_tasks
    }
    learned_from = _calibration_prompts(calibration, grid.calibrate_on)
    info = resolve_model(grid.model)
    choice = choose_drafter(grid.drafter, info)
    order = load_drafter(choice, block_length=info.block_length) if choice.path else None
    if order is None and {"spot", "spot-gamma"} & set(methods):
        raise ValueError(
            f"{info.name} has no order drafter ({choice.why}); train one, or leave out spot"
        )
    facts = {
        "model": info.identity(),
        "drafter": choice.name,
        "limit": grid.limit,
        "max_new_tokens": grid.max_new_tokens,
        "calibrate_on": grid.calibrate_on,
        "calibration": str(calibration) if calibration is not None else None,
        "spiffy": str(spiffy_graphs) if spiffy_graphs is not None else None,
    }
    given = {}
    if spiffy_graphs is not None:
        given = load_graphs(spiffy_graphs, block_length=info.block_length)
    kept = Cells(out, facts)
    target = load_target(info)
    rows: list[NfeRow] = []
    heats = numbers(grid.temperatures, float, "temperatures")
    for heat, length in product(heats, ends):
        params = params_of(
            info,
            temperature=heat,
            length=length or grid.max_new_tokens,
            fixed=length is not None,
        )
        fitted_to = None
        for task, seed in product(prompts, numbers(grid.seeds, int, "seeds")):
            cells = [
                Cell(
                    task=task,
                    method=method,
                    budget=budget,
                    temperature=heat,
                    seed=seed,
                    length=length,
                )
                for method, budget in product(methods, budgets)
            ]
            missing = [cell for cell in cells if cell not in kept.rows]
            if missing:
                if fitted_to is None:
                    fitted_to = fitted(target, info, learned_from, params, given)
                samples = record(target, make_requests(info, prompts[task], params, seed=seed))
                for cell in missing:
                    proposer = make_drafter(cell, order=order, fitted_to=fitted_to, samples=samples)
                    runs_live = live > 0 and cell.is_live(live)
                    row = measure(cell, samples, proposer, live_on=target if runs_live else None)
                    kept.add(row)
                    typer.echo(
                        f"{cell.name}: {row.nfe_ratio:.2f}x "
                        f"({row.nfe:.1f} forwards against {row.draft_free_nfe:.1f})",
                        err=True,
                    )
            rows += [kept.rows[cell] for cell in cells]
            if json_file is not None:
                document = {**facts, "rows": [asdict(row) for row in rows]}
                json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return rows


class Cells:
    """Measured cells, kept in a folder where one is given."""

    def __init__(self, folder: Path | None, facts: Mapping[str, object]) -> None:
        from spot_batch.bench.nfe import NfeRow

        self.rows: dict[Cell, NfeRow] = {}
        self._file = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "cells.jsonl"
        named = json.loads(json.dumps(facts))
        if not self._file.exists():
            self._file.write_text(json.dumps(named) + "\n", encoding="utf-8")
        lines = self._file.read_text(encoding="utf-8").split("\n")
        try:
            before = json.loads(lines[0])
            # The last line may be torn: what wrote it was ended.
            whole = [json.loads(line) for line in lines[1:-1]]
            self.rows = {(row := NfeRow(**each)).cell: row for each in whole}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._file}: not cells of `bench nfe` ({error})") from error
        for name, value in named.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{folder} holds cells of another run: {name} {before.get(name)!r}, "
                    f"now {value!r}; give another --out"
                )
        if lines[-1]:
            self._file.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")

    def add(self, row: NfeRow) -> None:
        """Keep a row, on disk first."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(row)) + "\n")
        self.rows[row.cell] = row


def _lengths(text: str) -> list[int | None]:
    """`end` and numbers of tokens. Raises ValueError naming the option."""
    found: list[int | None] = []
    for part in (each.strip() for each in text.split(",")):
        if part != "end" and not (part.isdecimal() and int(part)):
            raise ValueError(f"--lengths wants `end` and numbers of tokens, got {part!r}")
        found.append(None if part == "end" else int(part))
    return found


def _calibration_prompts(path: Path | None, count: int) -> list[str]:
    if path is None:
        from spot_batch.training.corpus import problems

        return [each.question for each in problems(count, seed=0, split="train")]
    from spot_batch.bench.prompts import read_questions

    return read_questions(path, limit=count)


def _show(rows: Sequence[NfeRow], grid: Grid) -> None:
    """Tables of ratios: a line a method, a column a temperature and budget."""
    from spot_batch.bench.nfe import gaps

    published = {
        (str(each["task"]), str(each["method"]), int(each["budget"]), float(each["temperature"])): (
            str(each["nfe_ratio"])
        )
        for each in grid.published
    }
    groups = dict.fromkeys((row.task, row.length, row.seed) for row in rows)
    for task, length, seed in groups:
        of_group = [row for row in rows if (row.task, row.length, row.seed) == (task, length, seed)]
        columns = list(dict.fromkeys((row.temperature, row.budget) for row in of_group))
        end = "" if length is None else f", {length} tokens"
        typer.echo(f"\n{task}{end}, seed {seed}, {of_group[0].num_prompts} prompts: fewer forwards")
        typer.echo("| method | " + " | ".join(f"T {heat:g}, D {d}" for heat, d in columns) + " |")
        typer.echo("|---" * (len(columns) + 1) + "|")
        for method in dict.fromkeys(row.method for row in of_group):
            cells = []
            for heat, budget in columns:
                row = next(
                    each
                    for each in of_group
                    if (each.method, each.temperature, each.budget) == (method, heat, budget)
                )
                theirs = published.get((task, method, budget, heat))
                cells.append(
                    f"{row.nfe_ratio:.2f} ({row.nfe_ratio_low:.2f} to {row.nfe_ratio_high:.2f})"
                    + (f", published {theirs}" if theirs else "")
                )
            typer.echo(f"| {method} | " + " | ".join(cells) + " |")
    for cell, share in gaps(rows):
        typer.echo(f"{cell.name}: closes {share:.0%} of the gap from Spiffy to the position oracle")


@bench.command("prompts")
@speaking_plainly
def prompts(
    tasks: Annotated[str, typer.Option(help="By comma.")] = "synthetic",
    model: Annotated[str, typer.Option(help="Whose chat template.")] = "bundled",
    data: Annotated[Path | None, typer.Option(help="A folder with the tasks' files.")] = None,
    limit: Annotated[int, typer.Option(help="Rows a task.")] = 1,
    template: Annotated[bool, typer.Option(help="The Jinja template alone.")] = False,
    as_json: Json = False,
) -> None:
    """The exact prompt of each task, as the model is given it."""
    from spot_batch.bench.prompts import rendered
    from spot_batch.bench.tasks import find_tasks, load_task
    from spot_batch.targets.registry import load_tokenizer, resolve_model

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


@calibrate.command("spiffy")
@speaking_plainly
def spiffy(
    jobs: Annotated[list[Path], typer.Argument(help="Directories of `trajectories` jobs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The JSON file to write.")],
    budgets: Annotated[str, typer.Option(help="Drafted slots a round, by comma.")] = "8,20",
    as_json: Json = False,
) -> None:
    """Count the baseline's draft graphs on recorded trajectories, one a temperature and budget."""
    import torch

    from spot_batch.drafters.spiffy import save_graphs
    from spot_batch.training.drafter import made_from
    from spot_batch.training.graphs import fit_graph
    from spot_batch.training.trajectories import load_trajectories

    sizes = numbers(budgets, int, "budgets")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--budgets wants whole numbers from 1, got {budgets!r}")
    recorded = load_trajectories(jobs)
    graphs = [
        fit_graph(
            recorded.take(torch.nonzero((recorded.temperature - heat).abs() < 1e-4).squeeze(1)),
            budget=budget,
        )
        for heat in recorded.temperatures
        for budget in sizes
    ]
    save_graphs(output, graphs, made_from(recorded))
    chosen = [
        {
            "temperature": graph.temperature,
            "budget": graph.budget,
            "num_states": graph.num_states,
            "ranks": graph.ranks,
            "selection": graph.selection,
            "widening": graph.widening,
            "num_formulas": len(graph.counts),
        }
        for graph in graphs
    ]
    if as_json:
        print(json.dumps({"path": str(output), "graphs": chosen}))
        return
    for each in chosen:
        typer.echo(", ".join(f"{name} {value}" for name, value in each.items()))
    typer.echo(f"{output} written")


@bench.command("commit-order")
@speaking_plainly
def commit_order(
    model: Annotated[str, typer.Option(help="Hub id, folder, or a packaged one.")] = "bundled",
    task: Annotated[str, typer.Option(help="Whose prompts.")] = "synthetic",
    data: Annotated[Path | None, typer.Option(help="A folder with the tasks' files.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts.")] = 20,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    budgets: Annotated[str, typer.Option(help="Of the oracles, by comma.")] = "8,20",
    plot: Annotated[Path | None, typer.Option(help="Write the figures as a PNG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> None:
    """How long stale distributions hold, and what knowing order or tokens is worth."""
    import torch

    from spot_batch.bench.nfe import params_of, record
    from spot_batch.bench.order import order_by_block, plot_order, worth_of_knowing
    from spot_batch.bench.prompts import make_requests
    from spot_batch.bench.tasks import find_tasks, load_task
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import resolve_model

    found_tasks = find_tasks(task)
    if len(found_tasks) != 1:
        raise ValueError(f"--task wants one task, got {task!r}")
    sizes = numbers(budgets, int, "budgets")
    torch.set_num_threads(threads)
    questions = [row.prompt for row in load_task(found_tasks[0], data=data, limit=limit)]
    info = resolve_model(model)
    params = params_of(info, temperature=temperature, length=max_new_tokens, fixed=False)
    samples = record(load_target(info), make_requests(info, questions, params))
    rows, oracles = order_by_block(samples, info), worth_of_knowing(samples, info, sizes)
    typer.echo("| block | commits | stale argmax is committed | most confident position is next |")
    typer.echo("|---|---|---|---|")
    for row in rows:
        typer.echo(
            f"| {row.block} | {row.num_commits:,} | {row.stale_argmax:.3f} "
            f"| {row.stale_position:.3f} |"
        )
    typer.echo("\n| known | " + " | ".join(f"D {budget}" for budget in sizes) + " |")
    typer.echo("|---" * (len(sizes) + 1) + "|")
    for kind in dict.fromkeys(each.knows for each in oracles):
        of_kind = [f"{each.nfe_ratio:.2f}x" for each in oracles if each.knows == kind]
        typer.echo(f"| {kind} | " + " | ".join(of_kind) + " |")
    if plot is not None:
        plot_order(rows, plot, title=f"{info.name}, {task}, T {temperature:g}")
        typer.echo(f"{plot} written")
    if json_file is not None:
        document = {
            "model": info.identity(),
            "task": task,
            "temperature": temperature,
            "blocks": [asdict(row) for row in rows],
            "oracles": [asdict(each) for each in oracles],
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@bench.command("scores")
@speaking_plainly
def scores(
    tasks: Annotated[
        str, typer.Option(help="synthetic, gsm8k, mbpp, humaneval, math500.")
    ] = "synthetic",
    model: Annotated[str, typer.Option(help="Hub id, folder, or a packaged one.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")] = "auto",
    budget: Annotated[int, typer.Option(help="Drafted slots a sample.")] = 8,
    temperatures: Annotated[str, typer.Option(help="By comma.")] = "0",
    data: Annotated[Path | None, typer.Option(help="A folder with the tasks' files.")] = None,
    limit: Annotated[int, typer.Option(help="Prompts a task.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the programs that the model wrote, in limits.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
) -> int:
    """Right answers, drafted and draft-free: equal, since the texts are."""
    import torch

    from spot_batch.bench.exact import decode_all
    from spot_batch.bench.grading import ScoreRow, find_grader, score_row
    from spot_batch.bench.nfe import params_of
    from spot_batch.bench.prompts import make_requests
    from spot_batch.bench.tasks import find_tasks, load_task
    from spot_batch.decoding import EngineSettings
    from spot_batch.drafters.registry import choose_drafter, load_drafter
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import load_tokenizer, resolve_model

    if budget < 1:
        raise ValueError(f"--budget must be at least 1, got {budget}")
    torch.set_num_threads(threads)
    found = [
        (task, find_grader(task.name, run_code=run_code), load_task(task, data=data, limit=limit))
        for task in find_tasks(tasks)
    ]
    info = resolve_model(model)
    choice = choose_drafter(drafter, info)
    proposer = load_drafter(choice, block_length=info.block_length)
    if proposer is None:
        raise ValueError("--drafter none drafts nothing; there is nothing to compare")
    target, tokenizer = load_target(info), load_tokenizer(info.path)
    rows: list[ScoreRow] = []
    for (task, grader, of_task), heat in product(
        found, numbers(temperatures, float, "temperatures")
    ):
        params = params_of(info, temperature=heat, length=max_new_tokens, fixed=False)
        requests = make_requests(info, [row.prompt for row in of_task], params)
        texts: list[list[str]] = []
        for settings in (EngineSettings(budget=0), EngineSettings(budget=budget)):
            done = decode_all(target, proposer if settings.budget else None, requests, settings)
            texts.append(
                [
                    str(tokenizer.decode(done[at].token_ids, skip_special_tokens=True))
                    for at in range(len(requests))
                ]
            )
        right = [
            [grader(row.fields, text) for row, text in zip(of_task, each, strict=True)]
            for each in texts
        ]
        row = score_row(
            task.name,
            heat,
            f"{choice.name}, D {budget}",
            texts=(texts[0], texts[1]),
            right=(right[0], right[1]),
        )
        rows.append(row)
        typer.echo(
            f"{row.task}, T {row.temperature:g}, {row.method}: {row.score:.3f} right, draft-free "
            f"{row.draft_free_score:.3f}; {row.num_differ} of {row.num_prompts} texts differ, "
            f"p {row.p_value:.3g}"
        )
    if json_file is not None:
        document = {"model": info.identity(), "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row.num_differ for row in rows) else 0
