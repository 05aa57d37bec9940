"""How a job directory is begun: in a folder that is free, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa

from spot_batch.job.fingerprint import diff_fields
from spot_batch.job.reading import dump_spec
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.card import CardFacts, render_card
from spot_batch.jobdir.directory import (
    FORMAT,
    INDEX_SCHEMA,
    TOOL_VERSION,
    JobDirectory,
    SpecConflict,
    check_format,
)
from spot_batch.jobdir.files import (
    OutputError,
    clear_folder,
    speaking_plainly,
    sync_folder,
    write_atomically,
    write_durably,
)
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.schema import completion_schema
from spot_batch.records.input import PinnedInput


def create_or_open(
    root: Path | str,
    spec: JobSpec,
    *,
    fingerprint: str,
    fields: Mapping[str, object],
    pinned: PinnedInput,
) -> JobDirectory:
    """The job of this fingerprint in `root`, begun there or gone on with.

    Raises SpecConflict for a directory of another fingerprint, OutputError for one that is not
    ours. What does not decide the output (actors, scheduling) is written anew.
    """
    job = Layout(root)
    check_usable(job)
    if job.exists:
        check_format(job)
        stored = json.loads(job.fingerprint_path.read_text())
        if stored["fingerprint"] != fingerprint:
            lines = tuple(diff_fields(stored["fields"], json.loads(json.dumps(dict(fields)))))
            raise SpecConflict(str(job.root), lines)
        _write_spec_and_input(job, spec, pinned)
    else:
        if job.format_path.exists():  # a creation cut short, maybe of a later version
            check_format(job)
        create(job, spec, fingerprint=fingerprint, fields=fields, pinned=pinned)
    return JobDirectory.open(job.root)


def check_usable(job: Layout) -> None:
    """OutputError unless the folder is absent, empty or a job's, and can be written to."""
    check_free(job)
    with speaking_plainly(job.root):
        job.tmp.mkdir(parents=True, exist_ok=True)
    probe = job.tmp / f"{os.getpid()}-probe"
    write_durably(probe, b"")
    probe.unlink(missing_ok=True)


def check_free(job: Layout) -> None:
    """What of `check_usable` can be known without writing anything."""
    root = job.root
    if root.exists() and not root.is_dir():
        raise OutputError(f"{root}: is a file; the output is a folder")
    if (root / "_spot").is_symlink():
        raise OutputError(f"{root}/_spot: is a link; refused")
    if root.is_dir() and not job.format_path.exists():
        strangers = sorted(e.name for e in os.scandir(root) if not _is_begun(job, e))
        if strangers:
            raise OutputError(
                f"{root}: is not empty and not a job directory (it holds {strangers[0]!r}); "
                "give another output folder"
            )
    above = next(each for each in (root, *root.absolute().parents) if each.exists())
    if not above.is_dir():
        raise OutputError(f"{root}: a file stands in the way, {above}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"{root}: {above} may not be written to")


@contextmanager
def as_it_was_if_refused(job: Layout) -> Iterator[None]:
    """A ValueError before a job is begun here leaves the folder as it was, or not there.

    Nothing is taken from a folder that held job state before, or that another process drives.
    """
    root_was, spot_was = job.root.exists(), job.spot.exists()
    try:
        yield
    except ValueError:
        begun = job.format_path.exists() or job.driver_path.exists()
        if not (spot_was or begun):
            clear_folder(job.hub_input)
            folders = (job.hub_input, job.tmp, job.spot)
            for folder in (*folders, *(() if root_was else (job.root,))):
                with suppress(OSError):  # not there, or not empty: somebody's
                    folder.rmdir()
        raise


def create(
    job: Layout,
    spec: JobSpec,
    *,
    fingerprint: str,
    fields: Mapping[str, object],
    pinned: PinnedInput,
) -> None:
    """Writes what a job is, its fingerprint last: a stop before leaves a creation cut short."""
    input_schema = pa.ipc.read_schema(pa.py_buffer(pinned.schema))
    schema = completion_schema(input_schema, spec).with_metadata(
        _schema_metadata(fingerprint, fields)
    )
    with speaking_plainly(job.root):
        job.tmp.mkdir(parents=True, exist_ok=True)
    # Before anything that a person sees: a stop from here on leaves a folder known as ours.
    _write(job, job.format_path, FORMAT + "\n")
    sync_folder(job.root)
    with speaking_plainly(job.root):
        for folder in (job.data, job.stats, job.audit, job.segments):
            folder.mkdir(parents=True, exist_ok=True)
    facts = CardFacts(spec=spec, fingerprint=fingerprint, fields=fields, pinned=pinned)
    _write(job, job.readme, render_card(facts))
    _write_spec_and_input(job, spec, pinned)
    write_atomically(job.schema_path, schema.serialize().to_pybytes(), tmp=job.tmp)
    stored = {"fingerprint": fingerprint, "fields": dict(fields)}
    _write(job, job.fingerprint_path, json.dumps(stored, indent=1, sort_keys=True) + "\n")


def _is_begun(job: Layout, entry: os.DirEntry[str]) -> bool:
    """Whether an entry is what a creation that was cut short leaves: our names, no content."""
    if entry.name == job.spot.name:
        return True
    ours = {job.data.name, job.stats.name, job.audit.name}
    is_folder = entry.is_dir(follow_symlinks=False)
    return entry.name in ours and is_folder and not os.listdir(entry.path)


def _write_spec_and_input(job: Layout, spec: JobSpec, pinned: PinnedInput) -> None:
    _write(job, job.spec_path, dump_spec(spec))
    columns = {
        name: [getattr(chunk, name) for chunk in pinned.chunks] for name in INDEX_SCHEMA.names
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=INDEX_SCHEMA))
    write_atomically(job.input_index_path, sink.getvalue().to_pybytes(), tmp=job.tmp)
    tree = asdict(replace(pinned, chunks=()))
    del tree["chunks"]
    tree["schema"] = pinned.schema.hex()
    for file in tree["files"]:
        path = Path(file["path"])
        if path.is_relative_to(job.root):  # a folder that is moved keeps its own input
            file["path"] = str(path.relative_to(job.root))
    if pinned.copy:
        tree["copy"] = str(Path(pinned.copy).relative_to(job.root))
    _write(job, job.input_path, json.dumps(tree, indent=1) + "\n")


def _write(job: Layout, path: Path, text: str) -> None:
    write_atomically(path, text.encode(), tmp=job.tmp)


def _schema_metadata(fingerprint: str, fields: Mapping[str, object]) -> dict[str, str]:
    model = {
        key.removeprefix("model."): value
        for key, value in fields.items()
        if key.startswith("model.")
    }
    return {
        "spot_batch.fingerprint": fingerprint,
        "spot_batch.model": json.dumps(model, sort_keys=True, separators=(",", ":")),
        "spot_batch.version": TOOL_VERSION,
    }
