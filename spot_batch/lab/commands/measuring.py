"""What the benchmarks' commands share: their options, and the files that they write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.terminal.options import numbers

if TYPE_CHECKING:
    from spot_batch.lab.bench.loading import Models
    from spot_batch.lab.bench.running import Row, Spread

Inputs = Annotated[
    Path | None, typer.Option("-i", "--input", help="JSON lines of prompts; packaged ones.")
]
Model = Annotated[str, typer.Option(help="Hub id, folder, or a packaged one.")]
DrafterOption = Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")]
Tasks = Annotated[str, typer.Option(help="synthetic, gsm8k, mbpp, humaneval, math500.")]
Data = Annotated[
    Path | None, typer.Option(help="A folder with the tasks' JSON-lines files, not the hub.")
]
Limit = Annotated[int, typer.Option(min=1, help="Only the first prompts.")]
Length = Annotated[int, typer.Option(min=1, help="The longest answer.")]
Temperatures = Annotated[str, typer.Option(help="By comma; 0 is greedy.")]
Seeds = Annotated[str, typer.Option(help="Of the noise, by comma.")]
Sequences = Annotated[str, typer.Option(help="Samples in flight, by comma.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
Out = Annotated[Path | None, typer.Option(help="Keep cells here; the same command goes on there.")]
Address = Annotated[
    str | None,
    typer.Option(
        help="Measure on this Ray cluster: an address, auto, or local for one of its own here."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows here.")]

_MOST_SEED = 2**64 - 1


def seeds_of(text: str) -> list[int]:
    """`--seeds`. Raises ValueError naming it."""
    return numbers(text, int, "seeds", least=0, most=_MOST_SEED)


def temperatures_of(text: str) -> list[float]:
    """`--temperatures`. Raises ValueError naming it."""
    from spot_batch.job.limits import checked_temperature

    found = numbers(text, float, "temperatures")
    for each in found:
        try:
            checked_temperature(each)
        except ValueError as error:
            raise ValueError(f"--temperatures: {error}") from None
    return found


def write_rows(path: Path | None, facts: Mapping[str, object], rows: Sequence[Row]) -> None:
    """One JSON document: what all rows share, and the rows."""
    write_document(path, {**facts, "rows": [asdict(row) for row in rows]})  # type: ignore[call-overload]


def write_document(path: Path | None, document: Mapping[str, object]) -> None:
    """JSON that appears whole."""
    if path is None:
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def spread_to(address: str | None, models: Models) -> Spread | None:
    """Where cells are measured: on a cluster, or here with None."""
    if address is None:
        return None
    from spot_batch.lab.bench.cluster import spread_over

    return spread_over(
        address, num_threads=models.threads, num_gpus=int(models.device.type == "cuda")
    )


def load_prompts(
    tasks: str, *, data: Path | None, limit: int
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The first prompts of each task, and their digests. Raises ValueError naming a bad row."""
    from spot_batch.lab.bench.running import digest_of
    from spot_batch.lab.bench.tasks import find_tasks, load_task

    prompts = {
        task.name: [row.prompt for row in load_task(task, data=data, limit=limit)]
        for task in find_tasks(tasks)
    }
    return prompts, {task: digest_of(found) for task, found in prompts.items()}
