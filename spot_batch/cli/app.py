"""The commands."""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from spot_batch.cli import specs

if TYPE_CHECKING:
    from spot_batch.job.spec import JobSpec

app = typer.Typer(
    name="spot-batch",
    help="Exact batch inference for block-diffusion language models: prompts in, Arrow out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DEMO_OUT = "spot-batch-demo"

# One slash is what a pathlib path leaves of a URL's two.
_WAS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Command = TypeVar("Command", bound=Callable[..., Any])
Number = TypeVar("Number", int, float)

Input = Annotated[
    list[str] | None,
    typer.Option("-i", "--input", help="File, folder, pattern or hub dataset; may be repeated."),
]
Output = Annotated[
    str | None,
    typer.Option(
        "-o", "--output", help="The job directory or its URL, or one .jsonl or .parquet file."
    ),
]
Out = Annotated[str, typer.Argument(help="The job directory, or its URL.")]
Model = Annotated[str | None, typer.Option(help="Hub id, folder, or bundled.")]
DrafterOption = Annotated[
    str | None, typer.Option(help="auto, none, ranking, or a drafter's path.")
]
Prompt = Annotated[str | None, typer.Option(help="The prompt's column.")]
Template = Annotated[
    str | None,
    typer.Option(help="Jinja over the columns, or a file of it: '{{ question }} Briefly.'"),
]
System = Annotated[str | None, typer.Option(help="System message of every prompt.")]
N = Annotated[int | None, typer.Option("-n", help="Samples a row.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="The longest answer.")]
Seed = Annotated[int | None, typer.Option(help="Decides the noise, together with the row's id.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the spec, as in generation.top_p=0.9.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first rows.")]
Actors = Annotated[str | None, typer.Option(help="auto, or how many.")]
Name = Annotated[str | None, typer.Option(help="The job's name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end.")]


def speaking_plainly(command: Command) -> Command:
    """One clear message and the right exit code, where a person can do something about it."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        # Libraries keep quiet; the environment of ray and its workers is set in the driver.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        warnings.filterwarnings("ignore", module=r"transformers\.")
        logger, handler = logging.getLogger("spot_batch"), _Warnings(logging.WARNING)
        logger.addHandler(handler)
        try:
            _check_local(kwargs)
            code = command(*args, **kwargs)
        except ValueError as error:
            if os.environ.get("SPOT_BATCH_TRACEBACK"):  # for those who work on spot-batch
                raise
            _fail(str(error), 2)
        except OSError as error:
            from spot_batch.jobdir.files import StorageFull
            from spot_batch.service.progress import no_space

            if isinstance(error, StorageFull):
                _fail(no_space(error), 75)
            said = _said_of(error)
            if said is None or os.environ.get("SPOT_BATCH_TRACEBACK"):
                raise
            _fail(said, 2)
        except KeyboardInterrupt:
            _fail("interrupted", 75)
        finally:
            logger.removeHandler(handler)
        raise typer.Exit(int(code or 0))

    return wrapped  # type: ignore[return-value]


def _check_local(values: Mapping[str, object]) -> None:
    """ValueError for a URL given as a file of this machine: it would be a folder named `s3:`."""
    for name, value in values.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, Path) and _WAS_URL.match(str(each)):
                option = name.replace("_", "-")
                raise ValueError(f"{option} wants a path on this machine, got the URL {each}")


class _Warnings(logging.Handler):
    """The package's warnings on stderr, one line each, unless a command logs everything."""

    def emit(self, record: logging.LogRecord) -> None:
        from spot_batch.cli.screen import Screen

        if not logging.getLogger("spot_batch").isEnabledFor(logging.INFO):
            Screen(to_stderr=True).line(f"warning: {record.getMessage()}", style="yellow")


def _said_of(error: OSError) -> str | None:
    """One line about a path that cannot be used; None where the error names none."""
    if error.errno == errno.ENOENT:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory is not there any more: go to another and try again"
    if not isinstance(error.filename, str | bytes):
        return None
    path = os.fsdecode(error.filename).replace("\n", "\\n")
    return f"{path}: {error.strerror}"


def _fail(message: str, code: int) -> NoReturn:
    from spot_batch.cli.screen import printable
    from spot_batch.job.secrets import redacted

    sys.stderr.write(f"spot-batch: {printable(redacted(message))}\n")
    raise typer.Exit(code)


@app.command()
@speaking_plainly
def submit(
    spec: Annotated[
        str | None, typer.Argument(help="A YAML file or a packaged spec's name; none is needed.")
    ] = None,
    inputs: Input = None,
    output: Output = None,
    model: Model = None,
    drafter: DrafterOption = None,
    prompt: Prompt = None,
    template: Template = None,
    system: System = None,
    n: N = None,
    temperature: Temperature = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Seed = None,
    sets: Sets = None,
    limit: Limit = None,
    actors: Actors = None,
    name: Name = None,
    save_spec: Annotated[
        Path | None, typer.Option(help="Write the resolved spec to this file.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and stop.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Run a job. The same command again resumes it, or follows it while it runs."""
    from spot_batch.cli import running

    loaded, out = compose(
        spec,
        inputs=inputs,
        sets=sets,
        values={
            "output.path": str(output) if output is not None else None,
            "model.target": model,
            "model.drafter": drafter,
            "input.prompt": prompt,
            "input.template": template,
            "input.system": system,
            "input.limit": limit,
            "generation.n": n,
            "generation.temperature": temperature,
            "generation.max_new_tokens": max_new_tokens,
            "generation.seed": seed,
            "resources.actors": actors,
            "name": name,
        },
    )
    return running.submit(loaded, out, as_json=as_json, dry_run=dry_run, save_spec=save_spec)


@app.command()
@speaking_plainly
def demo(
    output: Annotated[
        str, typer.Option("-o", "--output", help="The job directory or its URL.")
    ] = DEMO_OUT,
    actors: Actors = None,
    as_json: Json = False,
) -> int:
    """Run the packaged quickstart: bundled model, packaged prompts."""
    from spot_batch.cli import running

    packaged = str(specs.folder() / "quickstart.yaml")
    values: dict[str, object] = {"output.path": output, "resources.actors": actors}
    loaded, out = compose(packaged, inputs=None, sets=None, values=values)
    return running.submit(loaded, out, as_json=as_json)


@app.command()
@speaking_plainly
def resume(out: Out, as_json: Json = False) -> int:
    """Go on with the job in a directory, or follow it while it runs."""
    from spot_batch.cli import running
    from spot_batch.jobdir.mirror import folder_of

    return running.resume(folder_of(out), as_json=as_json)


@app.command()
@speaking_plainly
def retry(
    out: Out,
    code: Annotated[str, typer.Option(help="Only these error codes, by comma.")] = "",
    as_json: Json = False,
) -> int:
    """Make the error rows of a complete job again, but those whose fault is their own."""
    from spot_batch.cli import running
    from spot_batch.jobdir.mirror import folder_of

    codes = [each.strip() for each in code.split(",") if each.strip()]
    return running.retry(folder_of(out), codes, as_json=as_json)


@app.command()
@speaking_plainly
def status(out: Out, as_json: Json = False) -> int:
    """How far a job is, from its directory alone."""
    from spot_batch.cli.status import show_status
    from spot_batch.jobdir.mirror import folder_of

    return show_status(folder_of(out), as_json=as_json)


@app.command()
@speaking_plainly
def validate(
    spec: Annotated[
        str | None, typer.Argument(help="A YAML file or a packaged spec's name.")
    ] = None,
    inputs: Input = None,
    model: Model = None,
    prompt: Prompt = None,
    template: Template = None,
    sets: Sets = None,
    limit: Limit = None,
    as_json: Json = False,
) -> int:
    """Check spec, input and prompts without a device: nothing is generated."""
    from spot_batch.cli.validation import show_validation
    from spot_batch.job.reading import load_spec

    overrides = _overrides(
        inputs=inputs,
        sets=sets,
        values={
            "model.target": model,
            "input.prompt": prompt,
            "input.template": template,
            "input.limit": limit,
        },
    )
    loaded = load_spec(specs.find(spec) if spec is not None else None, overrides)
    return show_validation(loaded, as_json=as_json)


@app.command()
@speaking_plainly
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented spec to start from."""
    text = specs.TEMPLATE.read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path}: is there already; give another name") from None
    print(f"{path} written; next: spot-batch validate {path}")


@app.command()
@speaking_plainly
def jobs(
    name: Annotated[str | None, typer.Argument(help="Print this spec.")] = None,
    path: Annotated[bool, typer.Option("--path", help="Print its path instead.")] = False,
) -> None:
    """List the packaged specs, or print one."""
    if name is None:
        width = max(len(spec.stem) for spec in specs.packaged())
        for spec in specs.packaged():
            print(f"{spec.stem:<{width}}  {spec if path else specs.about(spec)}")
        return
    found = specs.find(name)
    if found not in specs.packaged():
        known = ", ".join(spec.stem for spec in specs.packaged())
        raise ValueError(f"no packaged spec named {name!r}; there are: {known}")
    print(found if path else found.read_text(encoding="utf-8"), end="\n" if path else "")


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from spot_batch.version import __version__

        print(__version__)
        raise typer.Exit


def compose(
    spec: str | None,
    *,
    inputs: list[str] | None,
    sets: list[str] | None,
    values: dict[str, object],
) -> tuple[JobSpec, Path]:
    """The spec of a file (or none) under the flags, and the job directory that it goes to."""
    from spot_batch.job.reading import load_spec

    loaded = load_spec(
        specs.find(spec) if spec is not None else None,
        _overrides(inputs=inputs, sets=sets, values=values),
    )
    return loaded, loaded.directory


def numbers(
    text: str,
    kind: type[Number],
    name: str,
    *,
    least: Number | None = None,
    most: Number | None = None,
    may_be_empty: bool = False,
) -> list[Number]:
    """A comma-separated option, each number once. Raises ValueError naming it."""
    try:
        found = list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"--{name} wants {kind.__name__}s by comma, got {text!r}") from None
    if not found and not may_be_empty:
        raise ValueError(f"--{name} wants at least one number, got {text!r}")
    for each in found:
        low, high = least is not None and each < least, most is not None and each > most
        if low or high or not math.isfinite(each):
            what = "whole numbers" if kind is int else "numbers"
            reach = "" if least is None else f" from {least}"
            reach += "" if most is None else f" to {most}"
            raise ValueError(f"--{name} wants {what}{reach}, got {each}")
    return found


def _overrides(
    *, inputs: list[str] | None, sets: list[str] | None, values: dict[str, object]
) -> dict[str, object]:
    """Dotted keys, a flag over `--set` over the file. Another input is read in its own way."""
    from spot_batch.job.reading import parse_override

    flags = {key: value for key, value in values.items() if value is not None}
    # A model first: it takes the place of the file's, and `--set` may say more of it.
    overrides: dict[str, object] = {
        key: flags[key] for key in ("model.target", "model.drafter") if key in flags
    }
    if inputs:
        overrides |= {
            "input.source": inputs,
            "input.format": "auto",
            "input.config": None,
            "input.revision": None,
        }
    overrides |= dict(parse_override(each) for each in sets or ())
    return overrides | flags
