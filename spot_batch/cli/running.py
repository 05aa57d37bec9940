"""Submitting and resuming: plan, show, run, and say how it ended."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spot_batch.cli.job_screen import (
    JobScreen,
    LoadLines,
    resume_command,
    show_commands,
    show_plan,
    show_results,
)
from spot_batch.cli.output import check_output, check_planned, check_same, file_format
from spot_batch.inputs.errors import InputError
from spot_batch.job.reading import dump_spec, load_spec
from spot_batch.job.remote import is_url
from spot_batch.job.spec import JobSpec, SpecError
from spot_batch.jobdir.creation import as_it_was_if_refused, check_usable, create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import DriverAlive, DriverWatch, acquire_driver_lock, read_driver
from spot_batch.jobdir.events import read_heartbeat
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.mirror import Mirror, address_of, folder_of, is_driven_from, mirrored
from spot_batch.jobdir.retry import begin_retry, retried_parts
from spot_batch.records.progress import Heartbeat
from spot_batch.results.export import ExportSpec, export
from spot_batch.service.plan import JobPlan, plan_job, plan_of
from spot_batch.service.progress import ENDED, Exit
from spot_batch.service.run import JobResult, run_job
from spot_batch.terminal.screen import Screen

FOLLOW_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCommand:
    """What a command asks to be run: a directory, how its job is planned, and how it is begun once
    this process holds the directory's lock."""

    directory: Layout
    plan: Callable[[Screen], JobPlan]
    begin: Callable[[Screen, JobPlan], JobDirectory]


def new_job(spec: JobSpec, *, save_spec: Path | None = None) -> JobCommand:
    """A job by its spec: begun in its directory, or gone on with there where it is the same."""
    if spec.output.path is not None and is_url(spec.output.path):
        folder_of(spec.output.path)
    directory = check_output(spec)

    def plan(screen: Screen) -> JobPlan:
        check_usable(directory)
        try:
            planned = plan_job(spec, directory.root, report=LoadLines(screen))
        except InputError as error:
            if not directory.exists:
                raise
            go_on = resume_command(directory.root)
            raise InputError(f"{error}\n`{go_on}` goes on with the job that is there") from error
        check_planned(directory, planned)
        _show_planned(screen, planned, save_spec)
        return planned

    def begin(screen: Screen, plan: JobPlan) -> JobDirectory:
        del screen
        return create_or_open(
            directory.root,
            plan.spec,
            fingerprint=plan.fingerprint,
            fields=plan.fields,
            pinned=plan.pinned,
        )

    return JobCommand(directory=directory, plan=plan, begin=begin)


def begun_job(out: Path) -> JobCommand:
    """The job in a directory, to go on with; nothing but the directory is needed."""
    job = JobDirectory.open(out)

    def plan(screen: Screen) -> JobPlan:
        planned = plan_of(job, report=LoadLines(screen))
        show_plan(screen, planned, out)
        return planned

    return JobCommand(directory=job, plan=plan, begin=lambda screen, plan: job)


def retried_job(out: Path, codes: Sequence[str]) -> JobCommand:
    """A complete job whose error rows are made again; its parts are republished whole."""
    job = JobDirectory.open(out)
    retried_parts(job, codes)  # what cannot be is said before anything is started

    def begin(screen: Screen, plan: JobPlan) -> JobDirectory:
        del plan
        screen.line(f"{begin_retry(job, codes):,} error rows are made again")
        return job

    return JobCommand(directory=job, plan=lambda screen: plan_of(job), begin=begin)


def show_dry_run(spec: JobSpec, *, save_spec: Path | None = None, as_json: bool = False) -> int:
    """What a job would be; nothing is started or left behind."""
    screen = Screen(to_stderr=as_json)
    directory = check_output(spec)
    with tempfile.TemporaryDirectory() as kept:
        plan = plan_job(spec, directory.root, kept=Path(kept), report=LoadLines(screen))
        check_planned(directory, plan)
        _show_planned(screen, plan, save_spec)
    screen.line("dry run: nothing was started")
    if as_json:
        head = {"out": spec.output.path or str(directory.root), "fingerprint": plan.fingerprint}
        print(json.dumps({**head, **plan.fields}))
    return Exit.COMPLETE


def run_or_follow(asked: JobCommand, *, as_json: bool = False) -> int:
    """Run a job in this process to its end, or follow the process that runs it already."""
    screen = Screen(to_stderr=as_json)
    with as_it_was_if_refused(asked.directory):
        plan = asked.plan(screen)
        show_commands(screen, asked.directory.root)
        watch, mirror = DriverWatch(), Mirror.of(asked.directory.root)
        look_again = mirror.pull if mirror is not None else lambda: None
        while True:
            try:
                with acquire_driver_lock(
                    asked.directory, watch=watch, look_again=look_again
                ) as lock:
                    job = asked.begin(screen, plan)
                    with JobScreen(screen, job) as progress, mirrored(job.root):
                        result = run_job(job, plan.facts, progress, lock=lock)
                return _say_end(screen, job, result, progress.last, as_json=as_json)
            except DriverAlive as alive:
                exit_code = _attend(screen, asked.directory, plan, alive, watch, as_json=as_json)
                if exit_code is not None:
                    return exit_code
                screen.line("its driver is gone: going on with the job here")


def _show_planned(screen: Screen, plan: JobPlan, save_spec: Path | None) -> None:
    if save_spec is not None:
        if save_spec.exists():
            try:
                load_spec(save_spec)
            except SpecError:
                raise ValueError(
                    f"--save-spec: {save_spec} is there already, and is no spec"
                ) from None
        save_spec.write_text(dump_spec(plan.spec), encoding="utf-8")
        screen.line(f"spec written to {save_spec}")
    show_plan(screen, plan, plan.spec.directory)


def _attend(
    screen: Screen,
    directory: Layout,
    plan: JobPlan,
    alive: DriverAlive,
    watch: DriverWatch,
    *,
    as_json: bool,
) -> int | None:
    """Follow the job's driver: the exit code that it ends with, None where it dies without one."""
    mirror = Mirror.of(directory.root)
    if mirror is not None and not is_driven_from(mirror):  # what it does is not seen here
        raise OutputError(f"{alive}: let it end there, or stop it") from None
    check_same(directory, plan)
    screen.line(f"{alive}: following it (Ctrl-C leaves it running)")
    try:
        heartbeat = follow(screen, directory, watch)
    except KeyboardInterrupt:
        screen.line("it goes on without this command")
        return Exit.RESUMABLE
    check_same(directory, plan)  # it may not have said what it is when following began
    if heartbeat is None:
        return None
    return _say_followed(screen, directory, heartbeat, as_json=as_json)


def follow(screen: Screen, directory: Layout, watch: DriverWatch) -> Heartbeat | None:
    """Show another driver's progress; its last word, or None where it died without one."""
    began = time.time()
    with JobScreen(screen) as progress:
        while True:
            record = read_driver(directory)
            if record is not None:
                began = record.began  # by the clock that its heartbeats are written by
            alive = record is not None and watch.is_alive(record)
            heartbeat = read_heartbeat(directory)
            if heartbeat is not None and heartbeat.state not in ENDED:
                progress.update(heartbeat)
            if not alive:
                if heartbeat is None or heartbeat.state not in ENDED:
                    return None
                # An older one is the last word of a run before the one followed.
                return heartbeat if heartbeat.time >= began else None
            time.sleep(FOLLOW_S)


def _say_end(
    screen: Screen,
    job: JobDirectory,
    result: JobResult,
    heartbeat: Heartbeat | None,
    *,
    as_json: bool,
) -> int:
    if result.summary is not None:
        show_results(screen, job, result.summary, heartbeat)
        _publish_file(screen, job)
    style = "" if result.exit_code == Exit.COMPLETE else "bold yellow"
    screen.line(result.message, style=style)
    if result.exit_code == Exit.RESUMABLE:
        screen.line(f"to go on: {resume_command(job.root)}", style="bold")
    if as_json:
        _print_json(job, result.exit_code, result.message, heartbeat)
    return result.exit_code


def _publish_file(screen: Screen, job: JobDirectory) -> None:
    """The one file that `output.path` may name; of requests it holds their responses."""
    file = job.spec.output.file
    if file is None or not job.is_complete:
        return
    num_rows = export(job, file, ExportSpec(format=file_format(job.spec)))
    screen.line(f"{file}: {num_rows:,} rows")


def _say_followed(screen: Screen, directory: Layout, heartbeat: Heartbeat, *, as_json: bool) -> int:
    code = Exit.BUG if heartbeat.exit_code is None else heartbeat.exit_code
    screen.line(heartbeat.message)
    if code == Exit.RESUMABLE:
        screen.line(f"to go on: {resume_command(directory.root)}", style="bold")
    if as_json:
        _print_json(directory, code, heartbeat.message, heartbeat)
    return code


def _print_json(job: Layout, exit_code: int, message: str, heartbeat: Heartbeat | None) -> None:
    document: dict[str, object] = {
        "out": address_of(job.root),
        "exit_code": int(exit_code),
        "message": message,
        "state": heartbeat.state if heartbeat is not None else "complete",
        "tokens_per_s": round(heartbeat.tokens_per_s, 1) if heartbeat is not None else None,
        "summary": None,
    }
    with suppress(FileNotFoundError):
        document["summary"] = json.loads(job.summary_path.read_text(encoding="utf-8"))
    print(json.dumps(document, ensure_ascii=True))
