"""`bench nfe` and `calibrate spiffy`: every method under one decoder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spot_batch.lab.commands.bench import bench
from spot_batch.lab.commands.measuring import (
    Address,
    Data,
    Device,
    JsonFile,
    Out,
    Threads,
    load_prompts,
    seeds_of,
    spread_to,
    temperatures_of,
    write_rows,
)
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, check_writable, numbers

if TYPE_CHECKING:
    from spot_batch.lab.bench.nfe import Cell, NfeRow
    from spot_batch.lab.methods.spiffy import SpiffyGraph

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
@plain_errors
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
    data: Data = None,
    spiffy_graphs: Annotated[
        Path | None, typer.Option("--spiffy", help="A file of `calibrate spiffy`.")
    ] = None,
    live: Annotated[
        int, typer.Option(min=0, help="Run one cell in so many live too; 1 all, 0 none.")
    ] = _LIVE,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
    device: Device = "auto",
    threads: Threads = 1,
) -> int:
    """Forwards that each method needs, replayed on recorded draft-free decoding."""
    from spot_batch.lab.bench.grid import NfeBenchmark
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.nfe import NfeRow
    from spot_batch.lab.bench.running import Kept, digest_of, digest_of_files, run_cells
    from spot_batch.lab.methods.spiffy import load_graphs

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
    check_writable(json_file, "--json")
    groups = _groups(grid)
    wanted = {cell.method for group in groups for cell in group}
    prompts, digests = load_prompts(grid.tasks, data=data, limit=grid.limit)
    learned_from = _calibration_prompts(calibration, grid.calibrate_on)
    models = find_models(grid.model, grid.drafter, threads=threads, device=device)
    if models.choice.path is None and {"spot", "spot-gamma"} & wanted:
        raise ValueError(
            f"{models.info.name} has no order drafter ({models.choice.why}); train one, or leave "
            "out spot"
        )
    graphs = {}
    if spiffy_graphs is not None:
        graphs = load_graphs(spiffy_graphs, block_length=models.info.block_length)
        _check_graphs(spiffy_graphs, graphs, groups)
    facts = {
        "command": "bench nfe",
        **models.facts(),
        "limit": grid.limit,
        "max_new_tokens": grid.max_new_tokens,
        "calibration": digest_of(learned_from),
        "spiffy": digest_of_files(spiffy_graphs) if spiffy_graphs is not None else None,
    }
    kept = Kept(out, NfeRow, facts, prompts=digests)
    benchmark = NfeBenchmark(
        models=models,
        prompts=prompts,
        digests=digests,
        learned_from=learned_from,
        graphs=graphs,
        max_new_tokens=grid.max_new_tokens,
        live=live,
    )
    found = run_cells(
        benchmark,
        groups,
        kept,
        spread=spread_to(address, models),
        is_done=benchmark.is_done,
    )
    for row in found:
        typer.echo(
            f"{row.cell.name}: {row.nfe_ratio:.2f}x "
            f"({row.nfe:.1f} forwards against {row.draft_free_nfe:.1f})",
            err=True,
        )
    rows = [kept.rows[cell] for group in groups for cell in group]
    write_rows(json_file, facts, rows)
    _show(rows, grid)
    wrong = [row for row in rows if row.live_agrees is False or row.identical is False]
    for row in wrong:
        logger.warning("%s: the live run differs", row.cell.name)
    num_live = sum(row.live_agrees is not None for row in rows)
    if num_live:
        typer.echo(f"{num_live} of {len(rows)} cells run live too, {len(wrong)} differ")
    else:
        typer.echo(f"none of {len(rows)} cells run live too: --live takes a larger share")
    return 1 if wrong else 0


def _groups(grid: Grid) -> list[list[Cell]]:
    """The cells of a grid, those of one recording together. Raises ValueError naming an option."""
    from spot_batch.lab.bench.nfe import METHODS, Cell
    from spot_batch.lab.bench.tasks import find_tasks

    methods = list(dict.fromkeys(name.strip() for name in grid.methods.split(",")))
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    tasks = [task.name for task in find_tasks(grid.tasks)]
    budgets = numbers(grid.budgets, int, "budgets", least=1)
    heats, seeds = temperatures_of(grid.temperatures), seeds_of(grid.seeds)
    return [
        [
            Cell(
                task=task, method=method, budget=budget, temperature=heat, seed=seed, length=length
            )
            for method, budget in product(methods, budgets)
        ]
        for heat, length, task, seed in product(heats, _lengths(grid.lengths), tasks, seeds)
    ]


def _check_graphs(
    path: Path, graphs: Mapping[tuple[float, int], SpiffyGraph], groups: Sequence[Sequence[Cell]]
) -> None:
    """Raises ValueError where a file of graphs has none for a cell that wants one."""
    for cell in (cell for group in groups for cell in group if cell.method == "spiffy"):
        if (cell.temperature, cell.budget) not in graphs:
            there = ", ".join(f"T {heat:g}, D {budget}" for heat, budget in sorted(graphs))
            raise ValueError(
                f"{path}: no graph for T {cell.temperature:g}, D {cell.budget}; there are {there}"
            )


def _lengths(text: str) -> list[int | None]:
    """`end` and numbers of tokens. Raises ValueError naming the option."""
    found: list[int | None] = []
    for part in dict.fromkeys(each.strip() for each in text.split(",")):
        if part != "end" and not (part.isdecimal() and int(part)):
            raise ValueError(f"--lengths wants `end` and numbers of tokens, got {part!r}")
        found.append(None if part == "end" else int(part))
    return found


def _calibration_prompts(path: Path | None, count: int) -> list[str]:
    if path is None:
        from spot_batch.lab.bundled.corpus import problems

        return [each.question for each in problems(count, seed=0, split="train")]
    from spot_batch.lab.bench.questions import read_questions

    return read_questions(path, limit=count)


def _show(rows: Sequence[NfeRow], grid: Grid) -> None:
    """Tables of ratios: a line a method, a column a temperature and budget."""
    from spot_batch.lab.bench.nfe import gaps

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


@plain_errors
def spiffy(
    jobs: Annotated[list[str], typer.Argument(help="`trajectories` jobs, or their URLs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The JSON file to write.")],
    budgets: Annotated[str, typer.Option(help="Drafted slots a round, by comma.")] = "8,20",
    as_json: Json = False,
) -> None:
    """Count the baseline's draft graphs on recorded trajectories, one a temperature and budget."""
    import torch

    from spot_batch.lab.methods.graphs import count_formulas, fit_graph
    from spot_batch.lab.methods.spiffy import save_graphs
    from spot_batch.learning.drafter import made_from
    from spot_batch.learning.trajectories import load_trajectories

    sizes = numbers(budgets, int, "budgets", least=1)
    check_writable(output, "--output", makes_folders=True)
    recorded = load_trajectories(jobs)
    graphs = []
    for heat in recorded.temperatures:
        of_heat = torch.nonzero((recorded.temperature - heat).abs() < 1e-4).squeeze(1)
        counted = count_formulas(recorded.take(of_heat))
        graphs += [fit_graph(counted, budget=budget) for budget in sizes]
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
