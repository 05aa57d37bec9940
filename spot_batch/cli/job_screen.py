"""What a person sees of a job: what will run, how far it is, and how it ended."""

from __future__ import annotations

import logging
import shlex
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spot_batch.job.remote import is_url
from spot_batch.jobdir.card import describe_check
from spot_batch.jobdir.mirror import address_of
from spot_batch.jobdir.schema import opens_in_datasets
from spot_batch.records.lending import Receipt
from spot_batch.records.progress import Heartbeat, LoadProgress
from spot_batch.service.progress import (
    describe,
    describe_drafting,
    describe_load,
    describe_loads,
    describe_saved,
)
from spot_batch.terminal.screen import Screen

if TYPE_CHECKING:
    from spot_batch.jobdir.directory import JobDirectory
    from spot_batch.jobdir.summary import Summary
    from spot_batch.service.plan import JobPlan

PLAIN_LINE_S = 30.0
LOAD_QUIET_S, LOAD_LINE_S = 3.0, 10.0
NUM_FIRST_SAMPLES = 3
NUM_LAST_SAMPLES = 5


class LoadLines:
    """How a target comes to this machine, a line now and then; none where it is here already."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._next_s = time.monotonic() + LOAD_QUIET_S

    def __call__(self, progress: LoadProgress) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or progress.stage == "waiting":  # which is told but once
            self._next_s = now_s + LOAD_LINE_S
            self._screen.line(f"{describe_load(progress)} …")


class JobScreen:
    """The progress of one job: a live display on a terminal, plain lines elsewhere.

    Samples are shown of a `job` that runs in this process.
    """

    def __init__(self, screen: Screen, job: JobDirectory | None = None) -> None:
        self.last: Heartbeat | None = None
        self._screen = screen
        self._job = job
        self._live: Live | None = None
        self._num_shown = 0
        self._next_line_s = 0.0
        self._state = ""

    def __enter__(self) -> JobScreen:
        if self._screen.console.is_terminal:
            self._live = Live(console=self._screen.console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        logger = logging.getLogger("spot_batch")
        self._handlers, logger.handlers = logger.handlers, [_LogLines(self._screen)]
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("spot_batch").handlers = self._handlers
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.last is not None and self.last.state != "complete":
            self._screen.line(describe(self.last))

    def update(self, heartbeat: Heartbeat) -> None:
        self.last = heartbeat
        if self._live is not None:
            self._live.update(_display(heartbeat, width=self._screen.console.width))
            return
        now_s = time.monotonic()
        if heartbeat.state != self._state and heartbeat.exit_code is None:
            self._state = heartbeat.state
            self._screen.line(f"{heartbeat.state} …")
            self._next_line_s = now_s + PLAIN_LINE_S
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + PLAIN_LINE_S
            if heartbeat.num_actors or not heartbeat.loading:
                self._screen.line(describe(heartbeat))
            for line in describe_loads(heartbeat):
                self._screen.line(line)

    def note(self, message: str) -> None:
        self._screen.line(message)

    def published(self, receipt: Receipt) -> None:
        """Show the first samples that land."""
        if self._job is None or self._num_shown >= NUM_FIRST_SAMPLES:
            return
        from spot_batch.cli.answers import pairs_of_segment

        for prompt, answer in pairs_of_segment(self._job, receipt.name):
            if self._num_shown < NUM_FIRST_SAMPLES:
                self._num_shown += 1
                self._screen.pair(prompt, answer)


_BESIDE_INSTRUCTION = ("input", "context")  # what Alpaca's and Dolly's rows ask about


class _LogLines(logging.Handler):
    """Warnings of the package, above the live display instead of through it."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.line(f"{record.levelname.lower()}: {record.getMessage()}", style="yellow")


def _display(heartbeat: Heartbeat, *, width: int) -> Group:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text(heartbeat.state),
        ProgressBar(total=max(1, heartbeat.num_samples), completed=heartbeat.num_durable, width=40),
        Text(f"{heartbeat.num_durable:,}/{heartbeat.num_samples:,}"),
    )
    lines = textwrap.wrap(describe(heartbeat), width=max(20, width - 1))
    return Group(bar, Text("\n".join((*lines, *describe_loads(heartbeat))), style="dim"))


def show_plan(screen: Screen, plan: JobPlan, out: Path) -> None:
    """What will run and where, before any model loads."""
    spec, info = plan.spec, plan.info
    generation = spec.generation
    how = "greedy"
    if generation.temperature:
        how = f"temperature {generation.temperature:g}"
        how += f", top_p {generation.top_p:g}" if generation.top_p != 1.0 else ""
        how += f", top_k {generation.top_k}" if generation.top_k else ""
    taken = [
        name for name in plan.from_checkpoint if generation.temperature or name == "temperature"
    ]
    how += f" ({', '.join(taken)} of the checkpoint)" if taken else ""
    budget = spec.speculation.budget
    commit = f" at {info.commit[:12]}" if info.commit is not None else ""
    screen.facts(
        [
            ("job", f"{spec.name} ({plan.fingerprint[:12]})"),
            ("output", _output(out)),
            (
                "input",
                f"{_rows(plan)}, {_prompts(plan)}{_faults(plan)}",
            ),
            (
                "target",
                f"{info.name}{commit}: {info.family.name}, blocks of {info.block_length}",
            ),
            ("drafter", f"{plan.drafter.name}: {plan.drafter.why}; budget {budget}"),
            (
                "generation",
                f"{how}, at most {generation.max_new_tokens} new tokens, n {generation.n}, "
                f"seed {generation.seed}",
            ),
            ("unmasking", _unmasking(plan)),
        ]
    )
    for sample in plan.first(1):
        if sample.request is None:
            reason = sample.error.message if sample.error is not None else "unknown"
            screen.line(f"first prompt: cannot be used: {reason}", style="yellow")
        else:
            screen.line(f"first prompt, {len(sample.request.prompt_ids)} tokens:", style="bold")
            screen.quoted(sample.prompt_text)


def _output(out: Path) -> str:
    address = address_of(out)
    return address if address == str(out) else f"{address}, worked in {out}"


def _unmasking(plan: JobPlan) -> str:
    given = plan.spec.generation
    if given.unmasking == "threshold":
        return f"threshold: all tokens above {given.threshold:g}, {plan.threshold_of}"
    text = "single: one token a forward"
    if given.threshold != plan.info.threshold:
        text += f" (the threshold, {given.threshold:g}, {plan.threshold_of}, is not in use)"
    return text


def _rows(plan: JobPlan) -> str:
    pinned = plan.pinned
    of = f" of {len(pinned.files):,} files" if len(pinned.files) > 1 else ""
    return f"{pinned.num_rows:,} rows{of}"


def _prompts(plan: JobPlan) -> str:
    import pyarrow as pa

    pinned = plan.pinned
    if pinned.prompt_column:
        names = pa.ipc.read_schema(pa.py_buffer(pinned.schema)).names
        beside = [name for name in _BESIDE_INSTRUCTION if name in names]
        hint = ""
        if pinned.prompt_column == "instruction" and beside:
            hint = (
                f" ({beside[0]!r} is left out of them; --template "
                f"'{{{{ instruction }}}} {{{{ {beside[0]} }}}}' takes both)"
            )
        return f"prompts in column {pinned.prompt_column!r}{hint}"
    columns = ", ".join(map(repr, pinned.template_columns)) or "none"
    return f"prompts by input.template, of columns: {columns}"


def _faults(plan: JobPlan) -> str:
    pinned = plan.pinned
    as_json = "".join(
        f"; column {name!r} is kept as JSON text, for its objects have too many keys to be fields"
        for name in pinned.json_columns
    )
    if not pinned.num_faults:
        return as_json
    are = "row is" if pinned.num_faults == 1 else "rows are"
    return f"{as_json}; {pinned.num_faults:,} {are} unreadable, the first: {pinned.faults[0]}"


def resume_command(out: Path) -> str:
    return f"spot-batch resume {shlex.quote(address_of(out))}"


def show_commands(screen: Screen, out: Path) -> None:
    """What is worth typing next."""
    screen.facts(
        [
            ("meanwhile", f"spot-batch status {shlex.quote(address_of(out))}"),
            ("stop", "Ctrl-C flushes and stops; twice stops at once"),
            ("go on", resume_command(out)),
        ]
    )


def show_results(
    screen: Screen, job: JobDirectory, summary: Summary, heartbeat: Heartbeat | None
) -> None:
    """The end of a job: samples, savings, the check, and how to load the data."""
    from spot_batch.cli.answers import first_pairs

    for prompt, answer in first_pairs(job, NUM_LAST_SAMPLES):
        screen.pair(prompt, answer)
    screen.line()
    totals = summary.totals
    rows = f"{totals.num_completions:,} in data/"
    if totals.num_errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in totals.error_codes.items())
        rows += f", {totals.num_errors:,} in errors/ ({codes})"
    tokens = f"{totals.num_tokens:,}"
    if heartbeat is not None and heartbeat.tokens_per_s > 0:
        tokens += f", {heartbeat.tokens_per_s:,.0f} a second"
    num_saved = totals.num_draft_free_forwards - totals.num_forwards
    saved = describe_saved(num_saved, f"{num_saved:,} saved ({100 * totals.forwards_saved:.1f} %)")
    facts = [
        ("rows", rows),
        ("tokens", tokens),
        (
            "forwards",
            f"{totals.num_forwards:,} where draft-free decoding takes "
            f"{totals.num_draft_free_forwards:,}: {saved}",
        ),
    ]
    run = summary.facts
    if run is not None:
        drafting = describe_drafting(run.drafted_per_round, run.drafting_share)
        facts.append(("drafting", f"{drafting}; budget {job.spec.speculation.budget}"))
    if summary.check is not None:
        check = summary.check
        compared = (
            f"{check.num_compared:,} samples decoded again draft-free, "
            f"{check.num_differed:,} differ"
        )
        facts.append(("check", compared if check.num_compared else describe_check(check)))
    where = address_of(job.root)
    ways = [
        f"spot_batch.load({where!r})",
        f"datasets.load_dataset({where!r}, split='train')",
        f"pyarrow.dataset.dataset({where + '/data'!r}, format='ipc').to_table()",
        f"polars.scan_ipc({where + '/data/*.arrow'!r}).collect()",
    ]
    if not totals.num_completions or is_url(where) or not opens_in_datasets(job.schema):
        del ways[1]  # it refuses a split without rows, s3:// without s3fs, and columns of maps
    facts.append(("load it", "\n".join(ways)))
    if totals.num_errors:
        facts.append(("errors", f"spot_batch.load({where!r}, 'errors')"))
    screen.facts(facts)
