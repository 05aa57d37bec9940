"""`validate`: everything that can be known of a job without a device."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from spot_batch.cli.job_screen import LoadLines, show_plan
from spot_batch.cli.output import check_output, check_planned, columns_of
from spot_batch.inputs.prepare import PreparedSample
from spot_batch.inputs.reader import InputReader
from spot_batch.job.spec import JobSpec
from spot_batch.records.results import SKIP_CODES
from spot_batch.service.plan import JobPlan, plan_job
from spot_batch.service.progress import Exit
from spot_batch.terminal.screen import Screen

NUM_SHOWN = 3
NUM_MEASURED = 1_000


def show_validation(spec: JobSpec, *, as_json: bool) -> int:
    """Resolve, pin, render; raises ValueError with what is wrong.

    The exit code is that of a job whose rows fail as those seen here do: rows that cannot be read
    are known of the whole input, prompts of its first NUM_MEASURED rows.
    """
    from spot_batch.models.block import check_network

    screen = Screen(to_stderr=as_json)
    directory = check_output(spec)
    with tempfile.TemporaryDirectory() as scratch:
        plan = plan_job(spec, directory.root, kept=Path(scratch), report=LoadLines(screen))
        check_planned(directory, plan)
        check_network(plan.info)
        samples = plan.first(NUM_MEASURED * plan.spec.generation.n)
        unreadable = _unreadable(plan)
        if not as_json:
            show_plan(screen, plan, plan.spec.directory)
    rows = samples[:: plan.spec.generation.n]
    lengths = sorted(len(row.request.prompt_ids) for row in rows if row.request is not None)
    faults = _prompt_faults(plan, rows)
    code = _exit_code(plan, faults)
    if as_json:
        document = {
            "fingerprint": plan.fingerprint,
            "num_rows": plan.pinned.num_rows,
            "num_samples": plan.num_samples,
            "drafter": plan.drafter.name,
            "columns": {field.name: str(field.type) for field in columns_of(plan)},
            "num_unreadable": plan.pinned.num_faults,
            "unreadable_codes": unreadable,
            "unreadable": plan.pinned.faults,
            "measured_rows": len(rows),
            "faults": {each: len(messages) for each, messages in faults.items()},
            "first_faults": {each: messages[0] for each, messages in faults.items()},
            "warnings": list(plan.info.warnings),
            "prompt_tokens": lengths,
            "exit_code": int(code),
            "spec": plan.spec.model_dump(mode="json"),
        }
        print(json.dumps(document))
        return code
    for row in rows[1:NUM_SHOWN]:
        if row.request is not None:
            screen.line(f"next prompt, {len(row.request.prompt_ids)} tokens:", style="bold")
            screen.quoted(row.prompt_text, num_lines=4, num_chars=300)
    screen.line("columns: " + ", ".join(f"{field.name} {field.type}" for field in columns_of(plan)))
    if lengths:
        screen.line(
            f"prompt tokens of {len(lengths):,} rows: least {lengths[0]}, "
            f"median {statistics.median(lengths):g}, most {lengths[-1]}"
        )
    for fault in plan.pinned.faults:
        screen.line(f"unreadable: {fault}", style="yellow")
    if unreadable:
        codes = ", ".join(f"{each} {count:,}" for each, count in unreadable.items())
        screen.line(
            f"{plan.pinned.num_faults:,} of {plan.pinned.num_rows:,} rows are unreadable: {codes}",
            style="yellow",
        )
    for each, messages in faults.items():
        screen.line(
            f"{len(messages):,} of {len(rows):,} rows cannot be used: {each}, "
            f"the first: {messages[0]}",
            style="yellow",
        )
    if code != Exit.COMPLETE:
        screen.line(
            f"too many rows fail: a job ends with exit code {code} "
            f"(failure.max_error_fraction is {plan.spec.failure.max_error_fraction:g})",
            style="bold yellow",
        )
    return code


def _unreadable(plan: JobPlan) -> dict[str, int]:
    """How many rows of the whole input cannot be read, by code; the most frequent comes first."""
    if not plan.pinned.num_faults:
        return {}
    reader = InputReader(plan.pinned, columns=[])
    faults = (fault for chunk in reader.chunks() for fault in chunk.faults.values())
    return dict(Counter(fault.code for fault in faults).most_common())


def _prompt_faults(plan: JobPlan, rows: Sequence[PreparedSample]) -> dict[str, list[str]]:
    """Messages by code, of rows that can be read and have no prompt for the engine."""
    faults: dict[str, list[str]] = {}
    for row in rows:
        error = row.error
        if error is None or (error.stage == "input" and plan.pinned.num_faults):
            continue  # counted over the whole input already
        faults.setdefault(error.code, []).append(error.message)
    return faults


def _exit_code(plan: JobPlan, faults: Mapping[str, Sequence[str]]) -> Exit:
    """The exit code with which `submit` ends where no other row fails."""
    failed = sum(len(messages) for code, messages in faults.items() if code not in SKIP_CODES)
    failed += plan.pinned.num_faults
    share = failed / plan.pinned.num_rows if failed else 0.0
    too_many = share > plan.spec.failure.max_error_fraction
    return Exit.TOO_MANY_ERRORS if too_many else Exit.COMPLETE
