"""`status`: how far a job is, from its directory alone; ray and torch may be gone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from spot_batch.cli.job_screen import resume_command
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import is_alive, read_driver
from spot_batch.jobdir.events import read_heartbeat
from spot_batch.jobdir.mirror import address_of
from spot_batch.jobdir.scan import fault_of_parts, scan
from spot_batch.records.progress import Heartbeat
from spot_batch.service.progress import describe, describe_drafting, describe_load
from spot_batch.terminal.screen import Screen


def show_status(out: Path, *, as_json: bool) -> int:
    job = JobDirectory.open(out)
    record = read_driver(job)
    alive = record is not None and is_alive(record)
    published = scan(job)
    last = read_heartbeat(job) or Heartbeat(
        state="starting", num_samples=job.num_samples, num_durable=0
    )
    damage = fault_of_parts(job, verify=False) if job.is_complete else None
    state = last.state if alive else "not running"
    if job.is_complete:
        state = "complete" if damage is None else "damaged"
    heartbeat = replace(
        last,
        state=state,
        num_durable=len(published.data),
        num_errors=published.totals.num_errors,
        num_audited=len(published.audits),
    )
    if not alive:
        heartbeat = replace(
            heartbeat,
            num_in_flight=0,
            num_actors=0,
            loading=(),
            silent=(),
            eta_s=None,
            tokens_per_s=0.0,
        )
    if as_json:
        tree: dict[str, object] = {"out": address_of(job.root), "name": job.spec.name}
        tree |= {"fingerprint": job.fingerprint, "driver_alive": alive, "damage": damage}
        print(json.dumps({**tree, **asdict(heartbeat)}))
        return 0
    screen = Screen()
    shown = state if damage is None else f"{state}: {damage}"
    facts = [("job", f"{job.spec.name} ({job.fingerprint[:12]})"), ("state", shown)]
    if alive and record is not None:
        facts.append(("driver", f"process {record.pid} on {record.host.partition('/')[0]}"))
    facts.append(("progress", describe(heartbeat)))
    drafting = describe_drafting(heartbeat.drafted_per_round, heartbeat.drafting_share)
    facts.append(("drafting", f"{drafting}; budget {job.spec.speculation.budget}"))
    facts += [(f"actor {each.actor}", describe_load(each.progress)) for each in heartbeat.loading]
    facts.append(("parts", f"{len(published.parts)} of {job.num_parts} written"))
    if last.message and not alive:
        facts.append(("last run", last.message))
    screen.facts(facts)
    if not alive and state != "complete":
        screen.line(f"to go on: {resume_command(job.root)}", style="bold")
    return 0
