"""Jobs on the bundled target, small enough for a test."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from spot_batch.job.reading import load_spec
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.creation import create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.events import read_events
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.records.lending import Lease
from spot_batch.service.actor import Actor
from spot_batch.service.plan import JobPlan, plan_job
from spot_batch.service.progress import Silent
from spot_batch.service.run import JobResult, run_job

# Several rounds of samples for each actor, over a block's end, published as they finish. The budget
# is a fixed one: `auto` drafts nothing where a test's machine has nothing to spare.
SMALL: Mapping[str, object] = {
    "speculation.budget": 4,
    "generation.max_new_tokens": 36,
    "generation.temperature": 1.0,
    "generation.top_p": 1.0,
    "generation.top_k": 0,
    "engine.max_sequences": 4,
    "resources.actors": 2,
    "scheduling.publish_seconds": 0.2,
    "equivalence.min_rows": 4,
}
NUM_ROWS = 16
SPOT_BATCH = str(Path(sys.executable).with_name("spot-batch"))


def prompts(count: int = NUM_ROWS) -> list[dict[str, object]]:
    """Short questions; every row has something of its own that must be kept."""
    return [
        {"id": f"q-{row}", "question": f"Ann has {row} figs and gets {row + 3} more. How many?"}
        for row in range(count)
    ]


def write_rows(folder: Path, rows: Iterable[object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small_spec(rows: Path, overrides: Mapping[str, object] | None = None) -> JobSpec:
    return load_spec(None, {"input.source": str(rows), **SMALL, **(overrides or {})})


def begin(out: Path, spec: JobSpec) -> tuple[JobDirectory, JobPlan]:
    plan = plan_job(spec, out)
    job = create_or_open(
        out, plan.spec, fingerprint=plan.fingerprint, fields=plan.fields, pinned=plan.pinned
    )
    return job, plan


def run(out: Path, spec: JobSpec) -> JobResult:
    """Submit a job in this process, to its end."""
    job, plan = begin(out, spec)
    with acquire_driver_lock(job) as lock:
        return run_job(job, plan.facts, Silent(), lock=lock)


def run_here(out: Path, spec: JobSpec) -> JobDirectory:
    """A whole job by one actor in this process, without ray."""
    job, plan = begin(out, spec)
    actor = Actor(job.root, 0)
    leases = [Lease(sample_ids=tuple(range(job.num_samples)))]
    done = 0
    while done < job.num_samples:
        done += sum(receipt.num_rows for receipt in actor.exchange(leases, 60.0).receipts)
        leases = []
    actor.stop()
    for part in range(job.num_parts):
        compact(job, part)
    finalize(job, check=None, facts=plan.facts)
    return job


def data_hash(out: Path) -> str:
    """sha256 over names and bytes of data/."""
    digest = hashlib.sha256()
    for path in sorted((out / "data").iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def flags(overrides: Mapping[str, object] | None = None) -> list[str]:
    """SMALL as the command line takes it."""
    both = {**SMALL, **(overrides or {})}
    return [arg for key, value in both.items() for arg in ("--set", f"{key}={json.dumps(value)}")]


def start(arguments: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    """spot-batch as a process group of its own, as a terminal would start it."""
    return subprocess.Popen(
        [SPOT_BATCH, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAY_ADDRESS": "10.255.255.1:6379"},
    )


def wait_until(condition: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def events(out: Path, kind: str) -> list[Mapping[str, object]]:
    if not (out / "_spot" / "fingerprint.json").exists():
        return []
    return [event for event in read_events(JobDirectory.open(out)) if event["kind"] == kind]


def actor_pids(out: Path) -> list[int]:
    return [int(str(event["pid"])) for event in events(out, "actor_ready")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def group_of(pgid: int) -> list[int]:
    """Living processes of a session's leader: its group, and the groups of its children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[3]) == pgid:
            found.append(int(stat.parent.name))
    return found


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
