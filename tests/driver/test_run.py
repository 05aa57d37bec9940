"""Whole jobs on a Ray of their own: the same bytes whatever happens on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.driver.progress import Exit
from spot_batch.store import JobDirectory
from tests.driver.jobs import (
    NUM_ROWS,
    actor_pids,
    data_hash,
    events,
    flags,
    group_of,
    is_running,
    kill_group,
    prompts,
    run,
    small_spec,
    start,
    wait_until,
    write_rows,
)

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), prompts())


@pytest.fixture(scope="module")
def undisturbed(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job as it should be: drafted, two actors, nothing in its way."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    result = run(out, small_spec(rows))
    assert result.exit_code == Exit.COMPLETE, result.message
    return out


def test_a_job_ends_with_every_row_in_order_and_checked(undisturbed: Path) -> None:
    job = JobDirectory.open(undisturbed)
    with pa.OSFile(str(job.data / job.part_name(0))) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table["id"].to_pylist() == [row["id"] for row in prompts()]
    assert table["row_index"].to_pylist() == list(range(NUM_ROWS))
    assert job.is_complete
    assert not list(job.segments.iterdir())
    assert not list(job.tmp.iterdir())
    summary = job.summary_path.read_text()
    assert '"num_compared": 4' in summary
    assert '"num_differed": 0' in summary
    assert len(set(actor_pids(undisturbed))) == 2


@pytest.mark.exact
def test_one_draft_free_actor_writes_the_same_bytes(
    rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    spec = small_spec(rows, {"speculation.budget": 0, "resources.actors": 1})
    result = run(tmp_path / "out", spec)
    assert result.exit_code == Exit.COMPLETE, result.message
    assert data_hash(tmp_path / "out") == data_hash(undisturbed)


@pytest.mark.exact
def test_a_killed_actor_costs_no_row(rows: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(["submit", "-i", str(rows), "-o", "out", *flags()], tmp_path)
    wait_until(lambda: events(out, "segment"))
    os.kill(actor_pids(out)[0], signal.SIGKILL)
    shown, wrong = process.communicate(timeout=120)
    assert process.returncode == Exit.COMPLETE, shown + wrong
    assert len(events(out, "actor_died")) == 1
    assert wrong == ""
    assert data_hash(out) == data_hash(undisturbed)


@pytest.mark.exact
def test_a_killed_driver_leaves_no_process_and_a_job_that_goes_on(
    rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["submit", "-i", str(rows), "-o", "out", *flags()]
    process = start(command, tmp_path)
    wait_until(lambda: events(out, "segment"))
    kill_group(process)
    wait_until(lambda: not group_of(process.pid), timeout_s=15)
    assert not any(is_running(pid) for pid in actor_pids(out))
    assert not (out / "_SUCCESS").exists()
    again = start(command, tmp_path)
    shown, wrong = again.communicate(timeout=120)
    assert again.returncode == Exit.COMPLETE, shown + wrong
    assert data_hash(out) == data_hash(undisturbed)


@pytest.mark.exact
def test_ctrl_c_flushes_and_stops_those_who_follow_too(
    rows: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = ["submit", "-i", str(rows), "-o", "out", *flags({"resources.actors": 1})]
    driver = start(command, tmp_path)
    wait_until(lambda: events(out, "actor_ready"))
    follower = start(command, tmp_path)
    wait_until(lambda: events(out, "segment"))
    driver.send_signal(signal.SIGINT)
    shown, wrong = driver.communicate(timeout=60)
    assert driver.returncode == Exit.RESUMABLE, shown + wrong
    assert f"spot-batch resume {out}" in shown
    followed, wrong = follower.communicate(timeout=60)
    assert "following it" in followed
    assert follower.returncode == Exit.RESUMABLE, followed + wrong
    again = start(["resume", "out"], tmp_path)
    shown, wrong = again.communicate(timeout=120)
    assert again.returncode == Exit.COMPLETE, shown + wrong
    assert data_hash(out) == data_hash(undisturbed)


def test_a_job_whose_first_rows_all_fail_stops_early(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [{"question": "" if row < 90 else "1 + 1?"} for row in range(100)])
    result = run(tmp_path / "out", small_spec(rows, {"resources.actors": 1}))
    assert result.exit_code == Exit.TOO_MANY_ERRORS
    assert "stopped early" in result.message
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_too_many_error_rows_show_in_the_exit_code(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, [*prompts(6), {"id": "empty", "question": ""}])
    out = tmp_path / "out"
    overrides = {"resources.actors": 1, "generation.max_new_tokens": 8}
    result = run(out, small_spec(rows, overrides))
    assert result.exit_code == Exit.TOO_MANY_ERRORS
    assert result.summary is not None
    assert result.summary.totals.num_completions == 6
    assert result.summary.totals.error_codes == {"empty_prompt": 1}
    assert (out / "_SUCCESS").exists()
