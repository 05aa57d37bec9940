"""`driver.json`: an advisory lock, so that a second driver attaches or exits.

Two drivers at once cost time and never correctness: what they publish is the same.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spot_batch.jobdir.files import link_whole, staged, write_atomically, write_durably
from spot_batch.jobdir.layout import Layout

STALE_AFTER_S = 60.0
LOOK_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverRecord:
    """Who drives: `start_time` tells a process from a later one of the same pid."""

    token: str
    pid: int
    host: str
    start_time: str
    began: float
    heartbeat: float


class DriverAlive(ValueError):
    """Another driver holds the job."""

    def __init__(self, root: str, pid: int, host: str, age_s: float) -> None:
        super().__init__(root, pid, host, age_s)
        self.root, self.pid, self.host, self.age_s = root, pid, host, age_s

    def __str__(self) -> str:
        return (
            f"{self.root} is driven by process {self.pid} on {self.host.partition('/')[0]}, "
            f"last heard of {self.age_s:.0f} s ago"
        )


class DriverLock:
    """The lock, held; `beat` it at least every 20 seconds."""

    def __init__(self, job: Layout, record: DriverRecord) -> None:
        self._job = job
        self._record = record

    def beat(self) -> None:
        """Says that the driver lives; taken over meanwhile, it says nothing."""
        if self.is_held:
            self._record = replace(self._record, heartbeat=time.time())
            write_atomically(self._job.driver_path, _as_json(self._record), tmp=self._job.tmp)

    @property
    def is_held(self) -> bool:
        now = read_driver(self._job)
        return now is not None and now.token == self._record.token

    def release(self) -> None:
        if self.is_held:
            self._job.driver_path.unlink(missing_ok=True)


class DriverWatch:
    """Whether drivers live, as a process sees it that goes on looking at their records.

    On this host the process itself is looked up. On another one a driver lives while its heartbeat
    moves, and how long it has not is told by the watcher's clock: the other host's may be wrong.
    """

    def __init__(self) -> None:
        self._seen: tuple[str, float] | None = None
        self._moved_s = 0.0

    def is_alive(self, record: DriverRecord) -> bool:
        here = _lives_here(record)
        if here is not None:
            return here
        now_s = time.monotonic()
        if self._seen != (record.token, record.heartbeat):
            self._seen, self._moved_s = (record.token, record.heartbeat), now_s
        return now_s - self._moved_s < STALE_AFTER_S


def _nothing() -> None:
    """What there is to do before looking again at a record that its driver itself writes."""


@contextmanager
def acquire_driver_lock(
    job: Layout, *, watch: DriverWatch | None = None, look_again: Callable[[], None] = _nothing
) -> Iterator[DriverLock]:
    """Holds the job for this process; DriverAlive while another live driver does.

    The job may not have been created yet; its folder must be usable. A driver on another host that
    is dead by the clocks is watched for as long as a live one may be silent. `watch` is what this
    process has seen of it so far; `look_again` brings its record here where the folder is a copy.
    """
    job.tmp.mkdir(parents=True, exist_ok=True)
    now = time.time()
    record = DriverRecord(
        token=secrets.token_hex(16),
        pid=os.getpid(),
        host=_this_host(),
        start_time=_start_time(os.getpid()) or "",
        began=now,
        heartbeat=now,
    )
    with staged(job.tmp) as source:
        write_durably(source, _as_json(record))
        while not link_whole(source, job.driver_path):
            _make_way(job, watch or DriverWatch(), look_again)
    lock = DriverLock(job, record)
    try:
        yield lock
    finally:
        lock.release()


def read_driver(job: Layout) -> DriverRecord | None:
    """Who holds the lock, alive or not."""
    return _read(job.driver_path)


def is_alive(record: DriverRecord) -> bool:
    """At one look: by process on this host, by heartbeat and both clocks on another."""
    here = _lives_here(record)
    return abs(time.time() - record.heartbeat) < STALE_AFTER_S if here is None else here


def _lives_here(record: DriverRecord) -> bool | None:
    """Whether the process of a driver on this host lives; None where it cannot be looked up."""
    start_time = _start_time(record.pid) if is_here(record.host) else None
    return None if start_time is None else start_time == record.start_time


def drives_here(root: Path) -> bool:
    """Whether a live process of this host drives the job."""
    record = _read(Layout(root).driver_path)
    return record is not None and is_here(record.host) and is_alive(record)


def is_here(host: str) -> bool:
    return host == _this_host()


def _make_way(job: Layout, watch: DriverWatch, look_again: Callable[[], None]) -> None:
    """Moves a dead driver's record away; DriverAlive where it is not dead."""
    found = first = read_driver(job)
    while found is not None and watch.is_alive(found):
        if is_alive(found) or found != first:
            raise DriverAlive(str(job.root), found.pid, found.host, time.time() - found.heartbeat)
        if found is first:
            logger.warning(
                "%s: process %d on %s may still drive it; it is given %.0f s to say so",
                job.root,
                found.pid,
                found.host.partition("/")[0],
                STALE_AFTER_S,
            )
        time.sleep(min(LOOK_S, STALE_AFTER_S))
        look_again()
        found = read_driver(job)
    with staged(job.tmp) as aside:
        try:
            job.driver_path.rename(aside)
        except FileNotFoundError:
            return
        moved = _read(aside)
        if moved is not None and moved != found:  # a third driver came in between: give it back
            link_whole(aside, job.driver_path)


def _read(path: Path) -> DriverRecord | None:
    try:
        return DriverRecord(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _as_json(record: DriverRecord) -> bytes:
    return json.dumps(asdict(record), indent=1).encode()


def _this_host() -> str:
    """The host and its process namespace: pids mean nothing across containers."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}/{namespace}"


def _start_time(pid: int) -> str | None:
    """When a process began, in the kernel's words; "" for none, None where nobody can say."""
    if not Path("/proc/self/stat").exists():
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    state_and_more = stat.rpartition(")")[2].split()
    return "" if state_and_more[0] == "Z" else state_and_more[19]
