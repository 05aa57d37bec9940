"""The commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.cli import specs
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Seed

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
Sets = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the spec, as in generation.top_p=0.9.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first rows.")]
Actors = Annotated[str | None, typer.Option(help="auto, or how many.")]
Name = Annotated[str | None, typer.Option(help="The job's name.")]


@app.command()
@plain_errors
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
    if dry_run:
        return running.show_dry_run(loaded, out, as_json=as_json, save_spec=save_spec)
    asked = running.new_job(loaded, out, save_spec=save_spec)
    return running.run_or_follow(asked, as_json=as_json)


@app.command()
@plain_errors
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
    return running.run_or_follow(running.new_job(loaded, out), as_json=as_json)


@app.command()
@plain_errors
def resume(out: Out, as_json: Json = False) -> int:
    """Go on with the job in a directory, or follow it while it runs."""
    from spot_batch.cli import running
    from spot_batch.jobdir.mirror import folder_of

    return running.run_or_follow(running.begun_job(folder_of(out)), as_json=as_json)


@app.command()
@plain_errors
def retry(
    out: Out,
    code: Annotated[str, typer.Option(help="Only these error codes, by comma.")] = "",
    as_json: Json = False,
) -> int:
    """Make the error rows of a complete job again, but those whose fault is their own."""
    from spot_batch.cli import running
    from spot_batch.jobdir.mirror import folder_of

    codes = [each.strip() for each in code.split(",") if each.strip()]
    asked = running.retried_job(folder_of(out), codes)
    return running.run_or_follow(asked, as_json=as_json)


@app.command()
@plain_errors
def status(out: Out, as_json: Json = False) -> int:
    """How far a job is, from its directory alone."""
    from spot_batch.cli.status import show_status
    from spot_batch.jobdir.mirror import folder_of

    return show_status(folder_of(out), as_json=as_json)


@app.command()
@plain_errors
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
@plain_errors
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
@plain_errors
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
