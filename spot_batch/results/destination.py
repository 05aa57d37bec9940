"""Where an export goes: never over a job, its input or a folder that is not an earlier export."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError

# What `save_to_disk` and an export write into a folder; anything else there is somebody's.
_SAVED = ("state.json", "dataset_info.json")
_SAVED_BESIDE = ("README.md",)


def check_destination(job: JobDirectory, path: Path, *, is_folder: bool) -> Path:
    """The file or folder that `path` means, links followed; OutputError where it may not be taken.

    Refused are the job itself, what is in it or above it, any other job, the job's input, and
    whatever stands there and is not what an export of this form replaces.
    """
    final = Path(os.path.realpath(path))
    root = Path(os.path.realpath(job.root))
    if final == root or root in final.parents:
        raise OutputError(f"{path}: is in the job directory {job.root}; give another output")
    if final in root.parents:
        raise OutputError(f"{path}: holds the job directory {job.root}; give another output")
    for folder in (final, *final.parents):
        if (folder / "_spot" / "format").is_file():
            raise OutputError(f"{path}: is in the job directory {folder}; give another output")
    for file in job.pinned.files:
        if final in (Path(os.path.realpath(each)) for each in (file.path, file.origin) if each):
            raise OutputError(f"{path}: is the job's input; give another output")
    if final.is_dir():
        if not is_folder:
            raise OutputError(f"{path}: is a folder, and this format is a file")
        stranger = _stranger_in(final)
        if stranger is not None:
            raise OutputError(
                f"{path}: is not a saved dataset (it holds {stranger!r}) and is left as it is; "
                "give another output"
            )
    elif final.exists() and (is_folder or not final.is_file()):
        kind = "is a file, and this format is a folder" if final.is_file() else "is no plain file"
        raise OutputError(f"{path}: {kind}; give another output")
    return final


def _stranger_in(folder: Path) -> str | None:
    """What a folder holds that no export put there; None for an empty folder or a saved dataset."""
    with os.scandir(folder) as entries:
        files = {entry.name: entry.is_file(follow_symlinks=False) for entry in entries}
    if files and not all(files.get(name, False) for name in _SAVED):
        return min(files)
    known = (*_SAVED, *_SAVED_BESIDE)
    strangers = [
        name
        for name, is_file in files.items()
        if not is_file or not (name in known or name.endswith(".arrow"))
    ]
    return min(strangers, default=None)


@contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A path to write to, in a folder of its own beside `final`, whose place it takes at the end.

    What stood there is moved aside first and goes last: it is back where the move fails, and
    stays where writing fails.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=final.parent) as folder:
        made, before = Path(folder) / "new", Path(folder) / "before"
        yield made
        if not final.is_dir():
            made.replace(final)
            return
        final.rename(before)
        try:
            made.rename(final)
        except OSError:
            before.rename(final)
            raise
