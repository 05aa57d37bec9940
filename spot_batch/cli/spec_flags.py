"""The flags that give a job's spec, each declared once: a key of the spec and an option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spot_batch.cli import specs
from spot_batch.terminal.options import Seed

if TYPE_CHECKING:
    from spot_batch.job.spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """An option that stands for a key of the spec; its name is the parameter's."""

    name: str
    key: str
    annotation: Any


def _flag(name: str, key: str, kind: type, *options: str, help: str) -> Flag:
    return Flag(
        name=name, key=key, annotation=Annotated[kind | None, typer.Option(*options, help=help)]
    )


Actors = Annotated[str | None, typer.Option(help="auto, or how many.")]

OUTPUT = _flag(
    *("output", "output.path", str, "-o", "--output"),
    help="The job directory or its URL, or one .jsonl or .parquet file.",
)
MODEL = _flag("model", "model.target", str, help="Hub id, folder, or bundled.")
DRAFTER = _flag("drafter", "model.drafter", str, help="auto, none, ranking, or a drafter's path.")
PROMPT = _flag("prompt", "input.prompt", str, help="The prompt's column.")
MESSAGES = _flag("messages", "input.messages", str, help="The column of chat messages.")
TEMPLATE = _flag(
    *("template", "input.template", str),
    help="Jinja over the columns, or a file of it: '{{ question }} Briefly.'",
)
SYSTEM = _flag("system", "input.system", str, help="System message of every prompt.")
N = _flag("n", "generation.n", int, "-n", help="Samples a row.")
TEMPERATURE = _flag("temperature", "generation.temperature", float, help="0 is greedy.")
MAX_NEW_TOKENS = _flag(
    "max_new_tokens", "generation.max_new_tokens", int, help="The longest answer."
)
SEED = Flag(name="seed", key="generation.seed", annotation=Seed)
LIMIT = _flag("limit", "input.limit", int, help="Only the first rows.")
ACTORS = Flag(name="actors", key="resources.actors", annotation=Actors)
NAME = _flag("name", "name", str, help="The job's name.")

RECORDED = (OUTPUT, MODEL, PROMPT, TEMPERATURE, MAX_NEW_TOKENS, SEED, LIMIT, ACTORS)
"""What `trajectories` takes: its jobs are of one sample a row and draft as they please."""

ALL = (
    *(OUTPUT, MODEL, DRAFTER, PROMPT, MESSAGES, TEMPLATE, SYSTEM, N, TEMPERATURE, MAX_NEW_TOKENS),
    *(SEED, LIMIT, ACTORS, NAME),
)

_SPEC = Annotated[
    str | None, typer.Argument(help="A YAML file or a packaged spec's name; none is needed.")
]
_INPUTS = Annotated[
    list[str] | None,
    typer.Option("-i", "--input", help="File, folder, pattern or hub dataset; may be repeated."),
]
_SETS = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the spec, as in generation.top_p=0.9.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a command line says of a spec: its file or packaged name, inputs, `--set` and flags."""

    spec: str | None = None
    inputs: list[str] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    values: Mapping[str, object] = field(default_factory=dict)

    def load(self, **more: object) -> JobSpec:
        """The spec: a flag comes before `--set`, and `--set` before the file. `more`: keys, with
        `__` for a dot, that come before all of them. Raises SpecError naming what is wrong."""
        from spot_batch.job.reading import load_spec

        path = specs.find(self.spec) if self.spec is not None else None
        fixed = {key.replace("__", "."): value for key, value in more.items()}
        return load_spec(path, self._overrides() | fixed)

    def _overrides(self) -> dict[str, object]:
        from spot_batch.job.reading import parse_override

        flags = {key: value for key, value in self.values.items() if value is not None}
        # A model first: it takes the place of the file's, and `--set` may say more of it.
        overrides: dict[str, object] = {
            key: flags[key] for key in (MODEL.key, DRAFTER.key) if key in flags
        }
        if self.inputs:  # another input is read in its own way
            overrides |= {
                "input.source": self.inputs,
                "input.format": "auto",
                "input.config": None,
                "input.revision": None,
            }
        overrides |= dict(parse_override(each) for each in self.sets)
        return overrides | flags


def of_spec(*flags: Flag) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Gives a command, whose first parameter is what is `Asked`, the options of a spec."""

    def made(command: Callable[..., int]) -> Callable[..., int]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def with_spec(
            spec: str | None = None,
            inputs: list[str] | None = None,
            sets: list[str] | None = None,
            **given: Any,
        ) -> int:
            values = {flag.key: given.pop(flag.name, None) for flag in flags}
            asked = Asked(spec=spec, inputs=inputs or [], sets=sets or [], values=values)
            return command(asked, **given)

        options = {
            "spec": _SPEC,
            "inputs": _INPUTS,
            **{flag.name: flag.annotation for flag in flags},
            "sets": _SETS,
        }
        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
            for name, annotation in options.items()
        ]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        with_spec.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_spec.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_spec

    return made
