"""What the benchmarks' commands share: options by their grid, models, cells, rows and files."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic

import typer

from spot_batch.lab.bench.grids import Grid, GridT, PromptGrid, key_of, read_grid
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import check_writable

if TYPE_CHECKING:
    from spot_batch.lab.bench.cells import Benchmark, CellT, Row, RowT
    from spot_batch.lab.bench.commit_order import CommitOrder
    from spot_batch.lab.bench.grading import ScoreRow
    from spot_batch.lab.bench.loading import Models

_JSON = Annotated[Path | None, typer.Option("--json", help="Write the rows here.")]
_OUT = Annotated[Path | None, typer.Option(help="Keep cells here; the same command goes on there.")]
_ADDRESS = Annotated[
    str | None,
    typer.Option(
        help="Measure on this Ray cluster: an address, auto, or local for one of its own here."
    ),
]
_GRID = Annotated[
    Path | None, typer.Argument(metavar="[GRID]", help="A YAML file with these options as keys.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Generic[GridT]):
    """One command: its grid, and where its rows are measured and written."""

    command: str
    grid: GridT
    out: Path | None = None
    address: str | None = None
    json: Path | None = None

    def models(self, *, drafts: bool = True) -> Models:
        """The grid's target and drafter, not loaded yet. Raises ValueError where one is not there,
        and where the benchmark `drafts` and there is nothing to draft with."""
        from huggingface_hub.utils.tqdm import disable_progress_bars
        from transformers.utils.logging import disable_progress_bar

        from spot_batch.lab.bench.loading import find_models

        disable_progress_bars()  # no library's progress between our lines
        disable_progress_bar()
        grid = self.grid
        models = find_models(
            grid.model, grid.drafter, dtype=grid.dtype, threads=grid.threads, device=grid.device
        )
        if drafts:
            models.some_drafter()
        return models

    def facts(self, models: Models, **more: object) -> dict[str, object]:
        """What all cells have in common, and decides their figures."""
        shared = {name: getattr(self.grid, name) for name in self.grid.SHARED}
        return {"command": f"bench {self.command}", **models.facts(), **shared, **more}

    def measure(
        self,
        benchmark: Benchmark[CellT, RowT],
        groups: Sequence[Sequence[CellT]],
        read: Callable[..., RowT],
        facts: Mapping[str, object],
        *,
        models: Models,
        say: Callable[[RowT], None],
        prompts: Mapping[str, str] | None = None,
        is_done: Callable[[CellT, RowT], bool] = lambda cell, row: True,
    ) -> list[RowT]:
        """The rows of all cells in their order; each that is new is kept and said at once."""
        from spot_batch.lab.bench.cells import MeasuredCells, run_cells

        measured = MeasuredCells(self.out, read, facts, prompts=prompts)
        spread = None
        if self.address is not None:
            from spot_batch.lab.bench.cluster import spread_over

            num_gpus = int(models.device.type == "cuda")
            spread = spread_over(self.address, num_threads=models.threads, num_gpus=num_gpus)
        for row in run_cells(benchmark, groups, measured, spread=spread, is_done=is_done):
            say(row)
        return [measured.rows[cell] for group in groups for cell in group]

    def write(self, facts: Mapping[str, object], rows: Sequence[Row]) -> None:
        """One JSON document, where one is asked for: what all rows share, and the rows."""
        self.write_document({**facts, "rows": [asdict(row) for row in rows]})  # type: ignore[call-overload]

    def write_document(self, document: Mapping[str, object]) -> None:
        """JSON that appears whole."""
        if self.json is None:
            return
        partial = self.json.with_name(self.json.name + ".partial")
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.json)


def benchmark(
    kind: type[GridT], *, keeps: bool = True, spreads: bool = True
) -> Callable[[Callable[[Run[GridT]], int]], Callable[..., int]]:
    """Makes a command of a function of a `Run`; its options are the keys of its grid.

    `keeps`: it measures cells that a folder can hold; `spreads`: a cluster can measure them.
    """

    def made(measure: Callable[[Run[GridT]], int]) -> Callable[..., int]:
        @functools.wraps(measure)
        def command(
            grid: Path | None = None,
            out: Path | None = None,
            address: str | None = None,
            json: Path | None = None,
            **given: Any,
        ) -> int:
            check_writable(json, "--json")
            wanted = read_grid(kind, grid, given)
            name = measure.__name__.replace("_", "-")
            return measure(Run(command=name, grid=wanted, out=out, address=address, json=json))

        parameters = [
            _parameter("grid", _GRID),
            *_options_of(kind),
            *([_parameter("out", _OUT)] if keeps else ()),
            *([_parameter("address", _ADDRESS)] if spreads else ()),
            _parameter("json", _JSON),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return plain_errors(command)

    return made


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _options_of(kind: type[Grid]) -> list[inspect.Parameter]:
    """An option a key, in the order of the grid's own; those without a help text are not shown."""
    found = []
    for each in fields(kind):
        key = key_of(each)
        if key.kind is None:
            continue
        names = key.names or (f"--{each.name.replace('_', '-')}",)
        text = f"{key.help} {_in_brackets(each.default)}".rstrip()
        option = typer.Option(*names, help=text, hidden=not key.help)
        found.append(_parameter(each.name, Annotated[key.kind | None, option]))
    return found


def _in_brackets(default: Any) -> str:
    """A default as one would type it, in brackets; nothing where there is none to type."""
    if isinstance(default, tuple):
        default = ",".join("end" if each is None else f"{each}" for each in default)
    return "" if default in (None, "") or isinstance(default, bool) else f"[{default}]"


def say_models(models: Models, *more: str) -> None:
    """One line of what is about to be measured."""
    choice = models.choice
    typer.echo(", ".join([models.info.name, f"drafter {choice.name} ({choice.why})", *more]))


def say_measured(row: ScoreRow | CommitOrder) -> None:
    """One line for a recording of a task that is done."""
    typer.echo(f"{row.task}, T {row.temperature:g}, seed {row.seed}: measured", err=True)


def questions_of(grid: PromptGrid, models: Models) -> tuple[list[str], str]:
    """A grid's prompts and their digest; says how many there are."""
    from spot_batch.lab.bench.cells import digest_of
    from spot_batch.lab.bench.questions import read_questions

    questions = read_questions(grid.input, limit=grid.limit)
    say_models(models, f"{len(questions)} prompts")
    return questions, digest_of(questions)
