"""Files that are unpacked or copied once beside the job: compressed ones, and those of a URL.

Actors read rows by their place in a file. A compressed file has no such places, and a remote one
may change or go: both are kept whole in the job directory, under a name made of where they came
from and of how they were, so that a job that goes on copies nothing again.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa

from spot_batch.inputs.errors import InputError
from spot_batch.job.remote import file_system, is_url, mark_of
from spot_batch.job.secrets import redacted

JOB_STATE = "_spot"
"""The folder that makes its parent a job directory."""

_MAGIC = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class Origin:
    """A file that is kept elsewhere: a URL or a local path, and what tells its versions apart."""

    name: str
    mark: str

    @classmethod
    def of(cls, name: str) -> Origin:
        """As it stands now; InputError where it cannot be found."""
        if not is_url(name):
            return cls.of_file(Path(name))
        with _plainly(name):
            files, path = file_system(name)
            return cls(name, mark_of(files.info(path)))

    @classmethod
    def of_file(cls, path: Path) -> Origin:
        try:
            stat = path.stat()
        except FileNotFoundError:
            raise InputError(f"{path}: gone since the job was submitted") from None
        return cls(str(path), f"{stat.st_size}:{stat.st_mtime_ns}")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """What the file holds, unpacked. Raises InputError where it cannot be read."""
        with _plainly(self.name), _opened(self.name) as packed:
            suffix = PurePosixPath(self.name).suffix.lower()
            try:
                with COMPRESSED[suffix](packed) if suffix in COMPRESSED else packed as stream:
                    yield stream
            except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
                raise InputError(f"{self.name}: cannot be unpacked: {error}") from error


def keep(origin: Origin, folder: Path) -> Path:
    """A local, unpacked copy, made once and whole."""
    key = hashlib.sha256(f"{origin.name}\n{origin.mark}".encode()).hexdigest()[:16]
    path = PurePosixPath(origin.name)
    name = path.stem if path.suffix.lower() in COMPRESSED else path.name
    kept = folder / f"{key}-{name[-100:]}"
    if kept.exists():
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{os.getpid()}.partial"
    try:
        with origin.open() as stream, partial.open("wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(kept)
    finally:
        partial.unlink(missing_ok=True)
    return kept


def list_remote(url: str, *, readable: Callable[[str], bool]) -> list[Origin]:
    """The files of a URL: itself, those a pattern matches, or those of a folder, by name.

    s3:// and gs:// are read by pyarrow itself, with the credentials and endpoint that the usual
    variables give; any other scheme by fsspec. Raises InputError.
    """
    with _plainly(url):
        files, path = file_system(url)
        if _MAGIC & set(path):
            found = {each: info for each, info in files.glob(path, detail=True).items()}
        elif files.isdir(path):
            found = _of_folder(files, path, redacted(url.rstrip("/")), readable)
        else:
            found = {path: files.info(path)}
        scheme = url.partition("://")[0]
        origins = [
            Origin(each if "://" in each else f"{scheme}://{each.lstrip('/')}", mark_of(info))
            if scheme != "file"
            else Origin(each, mark_of(info))
            for each, info in sorted(found.items())
            if info["type"] == "file" and not PurePosixPath(each).name.startswith((".", "_"))
        ]
    if not origins:
        raise InputError(f"input.source: no file that can be read at {redacted(url)}")
    return origins


def num_files(count: int) -> str:
    """A count of files, in words."""
    return {0: "no file", 1: "1 file"}.get(count, f"{count:,} files")


def _of_folder(
    files: Any, folder: str, shown: str, readable: Callable[[str], bool]
) -> dict[str, Any]:
    """The readable files of a remote folder. InputError where its folders hold more of them, which
    are no job's: what is meant is for a person to say."""
    found: dict[str, Any] = {}
    for place, (_, folders, listed) in enumerate(files.walk(folder, detail=True)):
        is_job = JOB_STATE in folders
        for name in list(folders):
            if is_job or name.startswith((".", "_")):
                del folders[name]
        own = {
            info["name"]: info
            for name, info in listed.items()
            if readable(name) and not name.startswith((".", "_"))
        }
        if place == 0:
            found = own
        elif own and not is_job:
            more = next(iter(own)).removeprefix(folder).lstrip("/")
            one = f"'{shown}/*' or " if found else ""
            raise InputError(
                f"input.source: {shown} holds {num_files(len(found))} to read and its folders more "
                f"({more}); say which: {one}'{shown}/{more.rpartition('/')[0]}'"
            )
    return found


# -- file systems ----------------------------------------------------------------------------------


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    if is_url(name):
        files, path = file_system(name)
        with files.open(path, "rb") as file:
            yield file
    else:
        with Path(name).open("rb") as file:
            yield file


@contextmanager
def _plainly(name: str) -> Iterator[None]:
    """Whatever a file system raises, as one line that names the file."""
    try:
        yield
    except (InputError, GeneratorExit):
        raise
    except FileNotFoundError:
        raise InputError(f"input.source: no such file: {redacted(name)}") from None
    except ImportError as error:
        scheme = name.partition("://")[0]
        raise InputError(f"input.source: {scheme}:// needs another package: {error}") from error
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"input.source: {redacted(name)} cannot be read: {why}") from error


# -- compression -----------------------------------------------------------------------------------


def _unzipped(file: IO[bytes]) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    names = [
        info.filename
        for info in archive.infolist()
        if not info.is_dir()
        and not info.filename.startswith("__MACOSX/")  # what a Mac packs beside each file
        and not info.filename.endswith(".DS_Store")
    ]
    if len(names) != 1:
        raise InputError(f"a .zip input holds one file, this one {len(names)}: unpack it first")
    return archive.open(names[0])


def _by_arrow(codec: str) -> Callable[[IO[bytes]], Any]:
    return lambda file: pa.CompressedInputStream(pa.PythonFile(file, mode="r"), codec)


COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zip": _unzipped,
    ".zst": _by_arrow("zstd"),
    ".lz4": _by_arrow("lz4"),
}
"""How to read what a suffix says is packed."""
