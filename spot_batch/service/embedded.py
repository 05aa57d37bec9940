"""A Ray of the job's own on this machine, which joins nothing and leaves nothing behind."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Ray's smallest object store; nothing of ours goes through it.
OBJECT_STORE_BYTES = 75 * 1024 * 1024
# AF_UNIX paths end at 107 bytes, and Ray adds about 66 to its folder.
LONGEST_TEMP_PATH = 36
TEMP_PREFIX = "spot-"
# One secret a process: Ray's client caches the first it reads.
_RAY_TOKEN = secrets.token_hex(32)


@contextmanager
def embedded_ray(*, cpu_threads: int) -> Iterator[Machine]:
    """A Ray of our own on this machine: loopback only, silent, gone at the end with its folder.

    Joins nothing that runs, whatever RAY_* variables say; touches neither HOME nor /dev/shm.
    """
    with _temp_folder() as folder, _ray_environment(cpu_threads=cpu_threads), _silent_logger("ray"):
        import ray

        if ray.is_initialized():
            raise RuntimeError("ray is in use in this process already: call ray.shutdown() first")
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(folder),
                _plasma_directory=str(folder),
                _node_ip_address="127.0.0.1",
            )
            resources = ray.cluster_resources()
            yield Machine(
                num_cpus=max(1, int(resources.get("CPU", 1))),
                num_gpus=int(resources.get("GPU", 0)),
                folder=folder,
            )
        finally:
            ray.shutdown()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the embedded Ray found here."""

    num_cpus: int
    num_gpus: int
    folder: Path

    def worker_log(self, pid: int, *, num_bytes: int = 2000) -> str:
        """The end of what a worker process wrote to its stderr."""
        for path in self.folder.glob(f"session_latest/logs/worker-*-{pid}.err"):
            return path.read_bytes()[-num_bytes:].decode(errors="replace").strip()
        return ""


@contextmanager
def _temp_folder() -> Iterator[Path]:
    """A short private folder, locked while in use; folders of killed drivers are removed."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) + len(TEMP_PREFIX) + 8 > LONGEST_TEMP_PATH:
        parent = Path("/tmp")  # a longer path would not fit Ray's sockets
    _sweep_temp_folders(parent)
    folder, lock = _locked_folder(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new folder and the lock on it; another driver's sweep may come before the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=parent))
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "lock").exists():
            return folder, lock
        os.close(lock)


def _sweep_temp_folders(parent: Path) -> None:
    """Remove our folders whose lock nobody holds: their drivers were killed."""
    for path in parent.glob(f"{TEMP_PREFIX}*/lock"):
        try:
            if path.parent.is_symlink() or path.parent.stat().st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # in use
        finally:
            os.close(lock)


@contextmanager
def _ray_environment(*, cpu_threads: int) -> Iterator[None]:
    """The environment that Ray and its workers start in; put back as it was at the end."""
    before = dict(os.environ)
    for name in before:
        if name.startswith("RAY_"):
            del os.environ[name]
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _RAY_TOKEN,
            # Whatever its name says: makes Ray listen on the loopback address alone.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Actors that asked for no GPU keep seeing what the user lets them see.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": str(cpu_threads),
            "MKL_NUM_THREADS": str(cpu_threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _silent_logger(name: str) -> Iterator[None]:
    """Keep a library's log lines off the screen."""
    library = logging.getLogger(name)
    handler = logging.NullHandler()
    propagate = library.propagate
    library.addHandler(handler)
    library.propagate = False
    try:
        yield
    finally:
        library.removeHandler(handler)
        library.propagate = propagate
