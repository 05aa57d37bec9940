"""A job directory at a URL: worked in on this machine, and copied there while it grows.

What is published never changes under its name, so that copying is uploading what is new. The store
holds whose copy it has; on a machine with another one, or with none, the store is the truth.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from spot_batch.job.remote import file_system, is_url, local_folder, mark_of
from spot_batch.job.secrets import redacted
from spot_batch.jobdir.driver_lock import drives_here
from spot_batch.jobdir.files import (
    OutputError,
    StorageFull,
    replace_whole,
    staged,
    write_atomically,
)

logger = logging.getLogger(__name__)

PUSH_S = 10.0
KEEP_S = 5.0  # a machine that is lost copies again what it had copied since
_MOST_IN_MEMORY = 64 << 20
_MOST_AT_ONCE = 1 << 30
_PULL_TRIES = 5  # a listing is old as soon as it is there
_MARK = "_spot/mirror.json"  # of this machine alone
_OWNER = "_spot/mirrored-by"  # in the store alone
_SUCCESS = "_SUCCESS"
_DRIVER = "_spot/driver.json"
_NOT_COPIED = ("_spot/tmp/", _MARK)
# Who reads data/ finds the errors and statistics that belong to it.
_ORDER = ("_spot/", "audit/", "errors/", "stats/", "data/", "")

Stat = tuple[int, int]


@dataclass(slots=True)
class _Copies:
    """What this machine knows: its id, and of each copied file how it is here and there.

    It is kept while files are copied, so that a store which fails goes on where it failed.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    here: dict[str, Stat] = field(default_factory=dict)
    there: dict[str, str] = field(default_factory=dict)


class _TakenOver(OutputError):
    """The store has another machine's copy, and this one's counts no more."""


class Mirror:
    """A job directory `root` whose place is `url`."""

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url.rstrip("/"), root
        self._lock = threading.Lock()

    @classmethod
    def of(cls, root: Path) -> Mirror | None:
        """The mirror that a folder is worked in for; None for a job directory of its own."""
        try:
            return cls(json.loads((root / _MARK).read_text())["url"], root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, LookupError, TypeError) as error:
            raise OutputError(f"{root / _MARK}: damaged ({error}); remove {root}") from error

    def pull(self) -> None:
        """Bring the folder to the store's state, unless this machine wrote that.

        OutputError where the store cannot be read or holds something else.
        """
        with _alone(self.root), self._plainly("read"):
            for tries_left in reversed(range(_PULL_TRIES)):
                try:
                    self._pull()
                    return
                except FileNotFoundError:  # taken away since it was listed: it is in a part by now
                    if not tries_left:
                        raise

    def _pull(self) -> None:
        files, base = self._store()
        listed = _listed(files, base)
        if listed and not any(name.startswith("_spot/") for name in listed):
            raise OutputError(
                f"{self.url}: is not empty and not a job directory (it holds "
                f"{min(listed)!r}); give another output"
            )
        state = self._read_copies()
        with self._keeping(state) as keep:
            if self._owner(files, base, listed) != state.id:
                self._take(files, base, listed, state, keep)

    def has_taken(self, name: str) -> bool:
        """Whether the file here is the store's, copied from there and not written since."""
        state = self._read_copies()
        return name in state.there and state.here.get(name) == _stat(self.root / name)

    def claim(self) -> None:
        """Say that from now on this machine's copy counts. OutputError where that fails."""
        with self._plainly("written"):
            files, base = self._store()
            self._put(files, f"{base}/{_OWNER}", self._read_copies().id.encode())

    def push(self, *, is_last: bool = False) -> None:
        """Copy what is new; `is_last` leaves nobody named as the driver. OutputError as `claim`."""
        with self._lock, self._plainly("written"):
            files, base = self._store()
            state = self._read_copies()
            listed = _listed(files, base)
            owner = self._owner(files, base, listed)
            if owner is None:  # emptied meanwhile
                self._put(files, f"{base}/{_OWNER}", state.id.encode())
            elif owner != state.id:  # its copy counts; to make it like ours would take files away
                raise _TakenOver(
                    f"{redacted(self.url)}: another machine has gone on with this job; nothing "
                    "more is copied from here"
                )
            there = set(listed) - {_OWNER}
            here = self._files()
            if is_last:
                here.pop(_DRIVER, None)
            if _SUCCESS in there - here.keys():  # first: what follows is not a finished job
                files.rm_file(f"{base}/{_SUCCESS}")
            with self._keeping(state) as keep:
                for name in sorted(here, key=_rank):
                    if name in there and state.here.get(name) == here[name]:
                        continue
                    if name == _SUCCESS:
                        self._remove(files, base, there - here.keys(), state)
                    with suppress(FileNotFoundError):  # published under another name meanwhile
                        self._put(files, f"{base}/{name}", _contents(self.root / name))
                        state.here[name] = here[name]
                        state.there.pop(name, None)
                    keep()
                self._remove(files, base, there - here.keys(), state)

    def _remove(self, files: Any, base: str, names: set[str], state: _Copies) -> None:
        """Take away what is no longer here: segments in parts, checkpoints of finished samples."""
        for name in sorted(names):
            with suppress(FileNotFoundError):
                files.rm_file(f"{base}/{name}")
            state.here.pop(name, None)
            state.there.pop(name, None)
        names.clear()

    def _owner(self, files: Any, base: str, listed: Mapping[str, str]) -> str | None:
        """Whose copy the store has."""
        return str(files.cat_file(f"{base}/{_OWNER}").decode()) if _OWNER in listed else None

    def _take(
        self,
        files: Any,
        base: str,
        listed: Mapping[str, str],
        state: _Copies,
        keep: Callable[[], None],
    ) -> None:
        (self.root / _SUCCESS).unlink(missing_ok=True)
        for name in self._files().keys() - listed.keys():
            (self.root / name).unlink(missing_ok=True)
            state.here.pop(name, None)
            state.there.pop(name, None)
        for name in sorted(listed.keys() - {_OWNER}, key=_rank):
            path, pure = self.root / name, PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts:
                raise OutputError(f"{self.url}: holds {name!r}, which no job has")
            if state.there.get(name) == listed[name] and _stat(path) == state.here.get(name):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with staged(self.root / "_spot" / "tmp") as aside:
                with files.open(f"{base}/{name}", "rb") as source, aside.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                replace_whole(aside, path)
            stat = _stat(path)
            assert stat is not None
            state.here[name], state.there[name] = stat, listed[name]
            keep()

    def _files(self) -> dict[str, Stat]:
        """Every file that belongs in the store, by its name there."""
        found: dict[str, Stat] = {}
        for folder, _, names in os.walk(self.root):
            for each in names:
                path = Path(folder) / each
                name = path.relative_to(self.root).as_posix()
                stat = None if name.startswith(_NOT_COPIED) or path.is_symlink() else _stat(path)
                if stat is not None:
                    found[name] = stat
        return found

    def _put(self, files: Any, path: str, data: bytes | mmap.mmap) -> None:
        """One write, so that a reader sees the file whole or not at all; of a file that is too
        large for one, several."""
        if not self.url.startswith(("s3://", "gs://")):  # those have no folders
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with files.open(path, "wb") as sink, memoryview(data) as view:
            for start in range(0, len(view), _MOST_AT_ONCE):
                with view[start : start + _MOST_AT_ONCE] as some:
                    sink.write(some)

    def _store(self) -> tuple[Any, str]:
        files, base = file_system(self.url)
        pieces = base.strip("/").split("/")
        if not is_url(self.url) or {"", ".", ".."} & set(
            pieces
        ):  # a client may resolve them: that is another folder
            raise OutputError(f"{redacted(self.url)}: names no folder of its own")
        files.invalidate_cache()
        return files, base.rstrip("/")

    def _read_copies(self) -> _Copies:
        try:
            tree = json.loads((self.root / _MARK).read_text())
            here = {name: (int(size), int(time)) for name, (size, time) in tree["here"].items()}
            return _Copies(id=tree["id"], here=here, there=tree["there"])
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return _Copies()

    @contextmanager
    def _keeping(self, state: _Copies) -> Iterator[Callable[[], None]]:
        """Writes the copies down at the end, whatever it is, and where they are asked to be kept
        also on the way, now and then."""
        written_s = time.monotonic()

        def keep() -> None:
            nonlocal written_s
            if time.monotonic() - written_s > KEEP_S:
                self._write_copies(state)
                written_s = time.monotonic()

        try:
            yield keep
        finally:
            self._write_copies(state)

    def _write_copies(self, state: _Copies) -> None:
        tree = {"url": self.url, "id": state.id, "here": state.here, "there": state.there}
        tmp = self.root / "_spot" / "tmp"
        write_atomically(self.root / _MARK, json.dumps(tree).encode(), tmp=tmp)

    @contextmanager
    def _plainly(self, done: str) -> Iterator[None]:
        """Whatever a store raises, as one line that names it."""
        try:
            yield
        except (OutputError, StorageFull):
            raise
        except ImportError as error:
            scheme = self.url.partition("://")[0]
            raise OutputError(f"{scheme}:// needs another package: {error}") from error
        except Exception as error:
            why = " ".join(str(error).split())[:300] or type(error).__name__
            raise OutputError(f"{redacted(self.url)}: cannot be {done}: {why}") from error


def _contents(path: Path) -> bytes | mmap.mmap:
    """What a file holds; a large one is not brought into memory for it."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= _MOST_IN_MEMORY:
            return file.read()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@contextmanager
def mirrored(root: Path) -> Iterator[None]:
    """Copies what changes in a mirrored job directory for as long as the context is open.

    A store that cannot be written is waited for; at the end OutputError says so. Nothing is done
    for a directory that is no mirror.
    """
    mirror = Mirror.of(root)
    if mirror is None:
        yield
        return
    mirror.claim()
    ended = threading.Event()

    def copy() -> None:
        while not ended.wait(PUSH_S):
            try:
                mirror.push()
            except _TakenOver as error:
                logger.warning("%s", error)
                return
            except OutputError as error:
                logger.warning("%s; tried again later", error)

    thread = threading.Thread(target=copy, name="mirror", daemon=True)
    mirror.push()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            mirror.push(is_last=True)
        except _TakenOver as error:
            raise OutputError(f"{error}; `spot-batch status` says how it stands") from None
        except OutputError as error:
            raise OutputError(
                f"{error}; everything is in {root}, and resuming the job copies it"
            ) from error


def folder_of(out: str | Path) -> Path:
    """The folder on this machine of a job directory or its URL, as the store has it now."""
    text = str(out)
    mirror = Mirror(text, local_folder(text)) if is_url(text) else Mirror.of(Path(out))
    if mirror is None:
        return Path(out)
    if not is_driven_from(mirror):
        mirror.pull()
    return mirror.root


def is_driven_from(mirror: Mirror) -> bool:
    """Whether a live process drives the job in this very folder.

    A driver of this host may also work in another cache folder; its record came from the store.
    """
    return drives_here(mirror.root) and not mirror.has_taken(_DRIVER)


def address_of(root: Path) -> str:
    """How a person names a job directory: its URL where it is a mirror."""
    mirror = Mirror.of(root)
    return str(root) if mirror is None else mirror.url


def _listed(files: Any, base: str) -> dict[str, str]:
    """Every file below, by its name there, with what tells its versions apart.

    All of it or an error: fsspec's own `find` leaves out a folder that could not be listed, and
    what is not listed counts as removed. Segments come before the parts that take them in, so that
    a sample is seen in one of them.
    """
    prefix = base.strip("/") + "/"
    listed: dict[str, str] = {}
    folders = [base]
    while folders:
        folder = folders.pop()
        try:
            entries = files.ls(folder, detail=True)
        except FileNotFoundError:  # not there yet, or not any more
            continue
        for info in sorted(entries, key=lambda info: str(info["name"]), reverse=True):
            path = info["name"].strip("/")
            if not path.startswith(prefix):  # the folder itself
                continue
            if info["type"] == "file":
                listed[path.removeprefix(prefix)] = mark_of(info)
            elif path != folder.strip("/"):
                folders.append(info["name"])
    return listed


def _rank(name: str) -> tuple[int, str]:
    if name == _SUCCESS:
        return len(_ORDER), name
    if name == "_spot/format":
        return -1, name
    return next(at for at, folder in enumerate(_ORDER) if name.startswith(folder)), name


def _stat(path: Path) -> Stat | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process of this machine pulls at a time."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_name(root.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
