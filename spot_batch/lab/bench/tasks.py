"""The tasks of the benchmarks: where their rows are, and the exact prompt made of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from spot_batch.inputs.json_lines import json_lines
from spot_batch.lab.bench.cells import digest_of

_ASSETS = Path(__file__).parents[2] / "assets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A set of prompts. `files`: names it goes by in a folder of JSON-lines files; `hub`: path,
    configuration and split for `datasets`; `first_row`: rows before it train others."""

    name: str
    files: tuple[str, ...]
    hub: tuple[str, str | None, str] | None = None
    columns: tuple[str, ...]

    @property
    def template(self) -> str:
        """The Jinja template of the one user turn."""
        return (_ASSETS / "tasks" / f"{self.name}.jinja").read_text(encoding="utf-8")


TASKS = {
    task.name: task
    for task in (
        Task(name="synthetic", files=(), columns=("question",)),
        Task(
            name="gsm8k",
            files=("gsm8k_test.jsonl", "gsm8k.jsonl"),
            hub=("openai/gsm8k", "main", "test"),
            columns=("question", "answer"),
        ),
        Task(
            name="mbpp",
            files=("mbpp.jsonl",),
            hub=("google-research-datasets/mbpp", None, "test"),
            columns=("text", "test_list"),
        ),
        Task(
            name="humaneval",
            files=("humaneval.jsonl",),
            hub=("openai/openai_humaneval", None, "test"),
            columns=("prompt", "test", "entry_point"),
        ),
        Task(
            name="math500",
            files=("math500.jsonl",),
            hub=("HuggingFaceH4/MATH-500", None, "test"),
            columns=("question", "answer"),
        ),
    )
}

# Task ids below the first are MBPP's examples, those from the other on its training split.
_MBPP_FIRST, _MBPP_TRAIN = 11, 601
_HUB_S = 10.0  # seconds that the hub may take to answer
_RENAMED = {"problem": "question"}  # a column's name in some copies -> ours


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A row of a task and the user turn made of it."""

    prompt: str
    fields: dict[str, Any]


def find_tasks(names: Iterable[str]) -> list[Task]:
    """Tasks by name, each once. Raises ValueError naming the known ones."""
    wanted = list(dict.fromkeys(name.strip() for name in names))
    unknown = [name for name in wanted if name not in TASKS]
    if unknown:
        raise ValueError(f"unknown task {unknown[0]!r}; there are {', '.join(TASKS)}")
    return [TASKS[name] for name in wanted]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPrompts:
    """The first prompts of some tasks, and their digests, by the task's name."""

    texts: Mapping[str, Sequence[str]]
    digests: Mapping[str, str]


def load_prompts(names: Iterable[str], *, data: Path | None, limit: int) -> TaskPrompts:
    """The first prompts of each task. Raises ValueError naming a bad row."""
    texts = {
        task.name: [row.prompt for row in load_task(task, data=data, limit=limit)]
        for task in find_tasks(names)
    }
    return TaskPrompts(texts=texts, digests={name: digest_of(each) for name, each in texts.items()})


def load_task(task: Task, *, data: Path | None, limit: int) -> list[TaskRow]:
    """The first rows of a task: packaged, from the folder `data`, or from the hub.

    Raises ValueError naming the file and line, or what to give.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    found: list[TaskRow] = []
    for where, fields in _rows(task, data):
        if len(found) == limit:
            break
        fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
        if task.name == "mbpp" and not _is_tested(fields, where):
            continue
        missing = [name for name in task.columns if fields.get(name) is None]
        if missing:
            raise ValueError(f"{where}: {task.name} wants a column {missing[0]!r}")
        found.append(TaskRow(render(task, fields, where=where), fields))
    if not found:
        raise ValueError(f"{task.name} holds no rows")
    return found


def _is_tested(fields: Mapping[str, Any], where: str) -> bool:
    """Whether a row of MBPP is one to measure on. Raises ValueError naming the row where it does
    not say, or has no list of tests."""
    number, tests = fields.get("task_id", _MBPP_FIRST), fields.get("test_list")
    if type(number) is not int:
        raise ValueError(f"{where}: task_id must be a whole number, got {number!r}")
    if tests is not None and not isinstance(tests, list):
        raise ValueError(f"{where}: test_list must be a list, got {type(tests).__name__}")
    return _MBPP_FIRST <= number < _MBPP_TRAIN


def render(task: Task, fields: dict[str, Any], *, where: str) -> str:
    """The user turn of a row. Raises ValueError naming the row where a column is missing."""
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(task.template).render(**fields)
    except TemplateError as error:
        raise ValueError(f"{where}: cannot be rendered ({error})") from error


def _rows(task: Task, data: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it is, its fields) of each row."""
    if task.name == "synthetic":
        yield from json_lines(_ASSETS / "prompts.jsonl")
        return
    if data is not None:
        file = next((data / name for name in task.files if (data / name).is_file()), None)
        if file is None:
            raise ValueError(f"{data}: no {' or '.join(task.files)} for the task {task.name}")
        yield from json_lines(file)
        return
    assert task.hub is not None
    yield from _hub_rows(task, *task.hub)


def _hub_rows(
    task: Task, path: str, name: str | None, split: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a hub dataset. Asked once whether it is there: `datasets` tries for half a minute."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    instead = f"or give --data FOLDER with {task.files[0]}"
    if not constants.is_offline_mode():
        try:
            HfApi().dataset_info(path, timeout=_HUB_S)
        except (OSError, HTTPError) as error:
            raise ValueError(
                f"{task.name}: {path} cannot be had from {constants.ENDPOINT} "
                f"({' '.join(str(error).split())[:200]}); with HF_HUB_OFFLINE=1 the cache is "
                f"looked up, {instead}"
            ) from error
    try:
        rows = load_dataset(path, name, split=split)
    except (OSError, DatasetNotFoundError, ValueError) as error:
        raise ValueError(
            f"{task.name}: {path} cannot be had ({' '.join(str(error).split())[:200]}); {instead}"
        ) from error
    for index, fields in enumerate(rows):
        yield f"{path}, row {index}", dict(fields)
