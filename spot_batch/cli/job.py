"""The commands on one job: `submit`, `demo`, `resume`, `retry`, `status`, `validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spot_batch.cli import specs
from spot_batch.cli.spec_flags import ACTORS, ALL, Actors, Asked, of_spec
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, Out

_DEMO_OUT = "spot-batch-demo"


@plain_errors
@of_spec(*ALL)
def submit(
    asked: Asked,
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

    spec = asked.load()
    if dry_run:
        return running.show_dry_run(spec, save_spec=save_spec, as_json=as_json)
    return running.run_or_follow(running.new_job(spec, save_spec=save_spec), as_json=as_json)


@plain_errors
def demo(
    output: Annotated[
        str, typer.Option("-o", "--output", help="The job directory or its URL.")
    ] = _DEMO_OUT,
    actors: Actors = None,
    as_json: Json = False,
) -> int:
    """Run the packaged quickstart: bundled model, packaged prompts."""
    from spot_batch.cli import running

    asked = Asked(
        spec=str(specs.folder() / "quickstart.yaml"),
        values={"output.path": output, ACTORS.key: actors},
    )
    return running.run_or_follow(running.new_job(asked.load()), as_json=as_json)


@plain_errors
def resume(out: Out, as_json: Json = False) -> int:
    """Go on with the job in a directory, or follow it while it runs."""
    from spot_batch.cli import running
    from spot_batch.jobdir.mirror import folder_of

    return running.run_or_follow(running.begun_job(folder_of(out)), as_json=as_json)


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


@plain_errors
def status(out: Out, as_json: Json = False) -> int:
    """How far a job is, from its directory alone."""
    from spot_batch.cli.status import show_status
    from spot_batch.jobdir.mirror import folder_of

    return show_status(folder_of(out), as_json=as_json)


@plain_errors
@of_spec(*ALL)
def validate(asked: Asked, as_json: Json = False) -> int:
    """Check spec, input and prompts without a device: nothing is generated."""
    from spot_batch.cli.validation import show_validation

    return show_validation(asked.load(), as_json=as_json)
