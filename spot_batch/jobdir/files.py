"""Files appear whole or not at all: written aside, made durable, then linked into place."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

ABANDONED_S = 30.0  # nobody is at a rename for so long

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class OutputError(ValueError):
    """An output folder that cannot be used; the message says which and why."""


class StorageFull(OSError):
    """No space left (or the quota is spent): nothing was lost, and the job resumes."""


@contextmanager
def speaking_plainly(path: Path) -> Iterator[None]:
    """Turns a full disk and a refused write into errors that say what to do."""
    try:
        yield
    except StorageFull:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                error.errno,
                "no space left; what is published is kept: free some space and submit again",
                str(path),
            ) from error
        if error.errno in _REFUSED:
            raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
        if error.errno == errno.ENOTDIR:
            raise OutputError(f"{path}: cannot be written (a file stands in the way)") from error
        raise


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A path of its own in `folder` to write to; whatever is left there is removed."""
    with speaking_plainly(folder):  # a copied directory has lost its empty folders
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}-{secrets.token_hex(8)}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def write_durably(path: Path, data: bytes) -> None:
    """Writes and fsyncs a file that nobody reads yet."""
    with speaking_plainly(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link_whole(source: Path, final: Path) -> bool:
    """Publishes the durable `source` under `final`; False where that name is taken already."""
    with speaking_plainly(final):
        try:
            os.link(source, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with _alone_at(final):
                if final.exists():
                    return False
                source.replace(final)
        sync_folder(final.parent)
    return True


@contextmanager
def _alone_at(final: Path) -> Iterator[None]:
    """One process at a time, where a file system has no links: by a file that one alone creates.

    What a crash left is taken away by whoever has waited for it long enough.
    """
    mark = final.with_name(f".{final.name}.mine")
    began_s = time.monotonic()
    while True:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() - began_s > ABANDONED_S:
                mark.unlink(missing_ok=True)
            time.sleep(0.01)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


Reach = Callable[[str], None]
"""Called with the name of every step that a stop must not hurt; tests stop the process there."""


def unhindered(step: str) -> None:
    """What is reached where nobody is testing: nothing happens."""
    del step


def publish_bytes(data: bytes, final: Path, *, tmp: Path, reach: Reach = unhindered) -> bool:
    """Publishes `data` under `final` and never over another whole copy of it.

    False where the same bytes stood there already. Other bytes under the name, which can only be
    damage where names come from content, are replaced with a warning.
    """
    with speaking_plainly(final.parent):
        final.parent.mkdir(exist_ok=True)
    with staged(tmp) as path:
        write_durably(path, data)
        reach("file.written")
        if link_whole(path, final):
            reach("file.linked")
            return True
        if final.read_bytes() == data:
            return False
        logger.warning("%s: damaged; replaced", final.name)
        replace_whole(path, final)
    return True


def replace_whole(source: Path, final: Path) -> None:
    with speaking_plainly(final):
        source.replace(final)
        sync_folder(final.parent)


def write_atomically(path: Path, data: bytes, *, tmp: Path) -> None:
    """Readers see the old file or the new one, never a mixture."""
    with staged(tmp) as source:
        write_durably(source, data)
        replace_whole(source, path)


def sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:  # some file systems cannot; the file itself is durable
        pass
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear_folder(folder: Path) -> int:
    """Removes the files of a folder, never what a link points at; returns how many."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    count = 0
    for entry in os.scandir(folder):
        if entry.is_symlink() or entry.is_file(follow_symlinks=False):
            Path(entry.path).unlink(missing_ok=True)
            count += 1
    return count
