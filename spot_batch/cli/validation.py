"""`validate`: everything that can be known of a job without a device."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa

from spot_batch.cli.screen import LoadLines, Screen, show_plan
from spot_batch.driver.plan import plan_job
from spot_batch.job import JobSpec
from spot_batch.store import completion_schema

NUM_SHOWN = 3
NUM_MEASURED = 1_000


def show_validation(spec: JobSpec, *, as_json: bool) -> int:
    """Resolve, pin, render; raises ValueError with what is wrong."""
    from spot_batch.targets.block import check_network

    screen = Screen(to_stderr=as_json)
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_job(spec, Path(scratch), report=LoadLines(screen))
        check_network(plan.info)
        schema = completion_schema(pa.ipc.read_schema(pa.py_buffer(plan.pinned.schema)), plan.spec)
        samples = plan.first(NUM_MEASURED * plan.spec.generation.n)
    rows = samples[:: plan.spec.generation.n]
    lengths = sorted(len(row.request.prompt_ids) for row in rows if row.request is not None)
    faults = Counter(row.error.code for row in rows if row.error is not None)
    if as_json:
        document = {
            "fingerprint": plan.fingerprint,
            "num_rows": plan.pinned.num_rows,
            "num_samples": plan.num_samples,
            "drafter": plan.drafter.name,
            "columns": {field.name: str(field.type) for field in schema},
            "measured_rows": len(rows),
            "faults": dict(faults),
            "warnings": list(plan.info.warnings),
            "prompt_tokens": lengths,
            "spec": plan.spec.model_dump(mode="json"),
        }
        print(json.dumps(document))
        return 0
    show_plan(screen, plan, plan.spec.directory)
    for row in rows[1:NUM_SHOWN]:
        if row.request is not None:
            screen.line(f"next prompt, {len(row.request.prompt_ids)} tokens:", style="bold")
            screen.quoted(row.prompt_text, num_lines=4, num_chars=300)
    screen.line("columns: " + ", ".join(f"{field.name} {field.type}" for field in schema))
    if lengths:
        screen.line(
            f"prompt tokens of {len(rows):,} rows: least {lengths[0]}, "
            f"median {statistics.median(lengths):g}, most {lengths[-1]}"
        )
    for code, count in faults.items():
        screen.line(f"{count:,} of {len(rows):,} rows cannot be used: {code}", style="yellow")
    return 0
