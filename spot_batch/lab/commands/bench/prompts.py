"""`bench prompts`: what the model is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from spot_batch.lab.bench.grids import TASKS_HELP
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json


@plain_errors
def prompts(
    tasks: Annotated[str, typer.Option(help=TASKS_HELP)] = "synthetic",
    model: Annotated[str, typer.Option(help="Whose chat template.")] = "bundled",
    data: Annotated[
        Path | None, typer.Option(help="A folder with the tasks' JSON-lines files, not the hub.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Only the first prompts.")] = 1,
    template: Annotated[bool, typer.Option(help="The Jinja template alone.")] = False,
    as_json: Json = False,
) -> None:
    """The exact prompt of each task, as the model is given it."""
    from spot_batch.checkpoints.registry import resolve_model
    from spot_batch.checkpoints.tokenizer import load_tokenizer
    from spot_batch.lab.bench.questions import rendered
    from spot_batch.lab.bench.tasks import find_tasks, load_task

    found: list[dict[str, object]] = []
    info = None if template else resolve_model(model)
    for task in find_tasks(tasks.split(",")):
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
