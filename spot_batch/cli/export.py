"""`spot-batch export`: results for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Out

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from spot_batch.jobdir.directory import JobDirectory
    from spot_batch.results.export import ExportSpec


@plain_errors
def export(
    out: Out,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file or folder to write.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="parquet, jsonl, hf, arrow-stream, openai-batch; by name."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--as", help="messages or prompt-completion: for training.")
    ] = None,
    group: Annotated[
        bool, typer.Option("--group", help="One row an input row: its samples are lists.")
    ] = False,
    columns: Annotated[str, typer.Option(help="Comma-separated; all.")] = "",
    where: Annotated[
        str | None, typer.Option(help="Which rows, in SQL: finish_reason = 'stop'.")
    ] = None,
    sql: Annotated[
        str | None, typer.Option(help="A SELECT over the rows as the table data, instead.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Of a running job: what is published, marked so.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Over what is there already.")] = False,
    push: Annotated[
        str | None, typer.Option("--push-to-hub", help="OWNER/NAME of a dataset repository.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="For everybody to see; private without it.")
    ] = False,
) -> int:
    """Write results as Parquet, JSON lines, a saved dataset, an Arrow stream or batch responses."""
    from typing import get_args

    from spot_batch.jobdir.directory import JobDirectory
    from spot_batch.jobdir.mirror import folder_of
    from spot_batch.results.destination import check_destination
    from spot_batch.results.export import ExportFormat, ExportSpec, TrainingForm, format_of
    from spot_batch.results.export import export as write

    if (output is None) == (push is None):
        raise ValueError("export wants a file or folder (-o), or a repository (--push-to-hub)")
    for option, value, known in (
        ("format", kind, get_args(ExportFormat)),
        ("as", form, get_args(TrainingForm)),
    ):
        if value is not None and value not in known:
            raise ValueError(f"--{option} must be one of {', '.join(known)}, got {value!r}")
    job = JobDirectory.open(folder_of(out))
    spec = ExportSpec(
        format=kind or (format_of(output) if output is not None else "hf"),  # type: ignore[arg-type]
        form=form,  # type: ignore[arg-type]
        group=group,
        columns=tuple(filter(None, (name.strip() for name in columns.split(",")))),
        where=where,
        sql=sql,
    )
    left_out = _left_out(job, spec)
    if spec.format == "hf":
        _without_bars()
    if push is not None:
        print(f"pushed to {_pushed(job, spec, push, public=public, partial=partial)}{left_out}")
        return 0
    assert output is not None
    if output.exists() and not force:
        check_destination(job, output, is_folder=spec.format == "hf")  # where force is no help
        raise ValueError(f"{output}: is there already; --force writes over it")
    num_rows = write(job, output, spec, partial=partial)
    mark, waiting = ("", "") if job.is_complete else (", not complete", _in_no_part(job))
    print(f"{output}: {num_rows:,} rows ({spec.format}{mark}){waiting}{left_out}")
    return 0


def _without_bars() -> None:
    """Keeps the libraries' progress and remarks from between our lines."""
    import datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    disable_progress_bars()


def _in_no_part(job: JobDirectory) -> str:
    """What is said of a running job's samples that are durable and not to be exported yet."""
    from spot_batch.jobdir.scan import scan

    published = scan(job)
    count = len(published.data) - len(published.in_parts)
    return f"; {count:,} more are durable and in no part yet" if count else ""


def _left_out(job: JobDirectory, spec: ExportSpec) -> str:
    """What is said of the rows without a generation: batch responses alone have them."""
    from spot_batch.results.load import num_errors

    count = 0 if spec.format == "openai-batch" else num_errors(job)
    if not count:
        return ""
    rows = "1 error row is" if count == 1 else f"{count:,} error rows are"
    return f"; {rows} not in it, but in {job.errors}"


def _pushed(
    job: JobDirectory, spec: ExportSpec, repository: str, *, public: bool, partial: bool
) -> str:
    """Uploads the rows; private unless told otherwise. The job's card goes along as JOB.md.

    ValueError where the hub refuses or is not there, and for a repository that is public already
    without `public`.
    """
    import tempfile

    from huggingface_hub import HfApi
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HTTPError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    from spot_batch.results.export import as_dataset

    if spec.format == "openai-batch":
        raise ValueError("--push-to-hub pushes a dataset, not openai-batch responses")
    if not job.is_complete and not partial:
        raise ValueError(f"{job.root}: not complete yet; --partial pushes the parts there are")
    api = HfApi()
    try:
        if not public and _is_public(api, repository):
            raise ValueError(
                f"--push-to-hub: {repository} is public already; --public pushes there nevertheless"
            )
        with tempfile.TemporaryDirectory() as scratch:
            dataset = as_dataset(job, spec, Path(scratch) / "rows.arrows")
            dataset.push_to_hub(repository, private=not public)
        api.upload_file(
            path_or_fileobj=job.readme.read_bytes(),
            path_in_repo="JOB.md",
            repo_id=repository,
            repo_type="dataset",
        )
    except (HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"--push-to-hub: {repository}: {why}") from error
    return f"{api.endpoint}/datasets/{repository}"


def _is_public(api: HfApi, repository: str) -> bool:
    """Whether everybody sees the repository; False where there is none yet."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return not api.dataset_info(repository).private
    except RepositoryNotFoundError:
        return False
