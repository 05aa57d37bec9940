"""Whole jobs on a Ray of their own: the same bytes whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock, read_driver
from spot_batch.records.progress import Heartbeat
from spot_batch.service.progress import Exit, Silent
from spot_batch.service.run import run_job
from tests.families import write_checkpoint
from tests.service.jobs import (
    NUM_ROWS,
    SPOT_BATCH,
    actor_pids,
    begin,
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
from tests.service.poisoned import POISON, PoisonedActor
from tests.service.watched import WatchedActor
from tests.tiny_models import write_target

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
    facts = json.loads(summary)["facts"]
    assert 0 < facts["drafted_per_round"] <= 4, "audits are not drafted"
    assert 0 < facts["drafting_share"] <= 1
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
    both = [start(command, tmp_path), start(command, tmp_path)]
    wait_until(lambda: events(out, "segment"))
    record = read_driver(JobDirectory.open(out))
    assert record is not None
    driver, follower = sorted(both, key=lambda process: process.pid != record.pid)
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: Ray's processes get it too
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


class Watching(Silent):
    """Keeps every heartbeat."""

    def __init__(self) -> None:
        self.seen: list[Heartbeat] = []

    def update(self, heartbeat: Heartbeat) -> None:
        self.seen.append(heartbeat)


def test_a_target_that_loads_says_how_far_it_is_actor_by_actor(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path / "model", "sdar", num_shards=2)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    monkeypatch.setattr("spot_batch.service.fleet.Actor", WatchedActor)
    monkeypatch.setattr("spot_batch.service.fleet.LOAD_REPORT_S", 0.0)
    monkeypatch.setattr("spot_batch.service.chronicle.HEARTBEAT_S", 0.0)
    overrides = {"model.target": str(model), "generation.max_new_tokens": 8}
    job, plan = begin(tmp_path / "out", small_spec(rows, overrides))
    ui = Watching()
    with acquire_driver_lock(job) as lock:
        result = run_job(job, plan.facts, ui, lock=lock)
    assert result.exit_code == Exit.COMPLETE, result.message
    for actor in range(2):
        told = [
            each.progress
            for heartbeat in ui.seen
            for each in heartbeat.loading
            if each.actor == actor and each.progress.stage == "loading"
        ]
        assert {progress.num_bytes_total for progress in told} == {size}
        assert len({progress.num_bytes for progress in told}) > 2
        assert max(progress.num_bytes for progress in told) == size
    stages = ["checking", "loading", "measuring"]
    told_once = [(event["actor"], event["stage"]) for event in events(job.root, "actor_loading")]
    assert sorted(told_once) == [(actor, stage) for actor in range(2) for stage in stages]
    assert ui.seen[-1].loading == (), "those that are ready are named"


@pytest.mark.parametrize("limit", [0, 50])
def test_an_input_that_is_edited_meanwhile_ends_in_a_refusal_or_does_not_matter(
    undisturbed: Path, tmp_path: Path, limit: int
) -> None:
    rows = write_rows(tmp_path, prompts())
    out = tmp_path / "out"
    given = flags({"input.copy_limit_gib": limit})
    process = start(["submit", "-i", str(rows), "-o", "out", *given], tmp_path)
    wait_until(lambda: events(out, "segment"))
    rows.write_text(rows.read_text().replace("figs", "kiwi"))  # as long as it was
    shown, wrong = process.communicate(timeout=120)
    if limit:
        assert process.returncode == Exit.COMPLETE, shown + wrong
        assert data_hash(out) == data_hash(undisturbed)
    else:
        assert process.returncode == Exit.BAD_INPUT, shown + wrong
        assert "rows.jsonl: changed since the job was submitted" in shown + wrong
        assert not (out / "_SUCCESS").exists()


@pytest.mark.slow
def test_a_row_that_kills_its_actor_ends_as_an_error_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = prompts(12)
    rows[5]["question"] = f"How much {POISON} is too much?"
    monkeypatch.setattr("spot_batch.service.fleet.Actor", PoisonedActor)
    overrides = {
        "resources.actors": 1,
        "generation.max_new_tokens": 8,
        "failure.max_error_fraction": 0.1,
    }
    result = run(tmp_path / "out", small_spec(write_rows(tmp_path, rows), overrides))
    assert result.exit_code == Exit.COMPLETE, result.message
    assert result.summary is not None
    assert result.summary.totals.error_codes == {"actor_crash": 1}
    assert result.summary.totals.num_completions == 11


@pytest.mark.slow
@pytest.mark.exact
def test_greedy_bytes_survive_a_killed_actor_and_need_no_draft(rows: Path, tmp_path: Path) -> None:
    greedy = {"generation.temperature": 0.0}
    free = {**greedy, "speculation.budget": 0, "resources.actors": 1, "engine.max_sequences": 7}
    assert run(tmp_path / "free", small_spec(rows, free)).exit_code == Exit.COMPLETE
    out = tmp_path / "out"
    process = start(["submit", "-i", str(rows), "-o", "out", *flags(greedy)], tmp_path)
    wait_until(lambda: events(out, "segment"))
    os.kill(actor_pids(out)[-1], signal.SIGKILL)
    shown, wrong = process.communicate(timeout=200)
    assert process.returncode == Exit.COMPLETE, shown + wrong
    assert data_hash(out) == data_hash(tmp_path / "free")


@pytest.mark.slow
def test_a_second_signal_stops_at_once(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(["submit", "-i", str(rows), "-o", "out", *flags()], tmp_path)
    wait_until(lambda: events(out, "actor_ready"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    shown, wrong = process.communicate(timeout=30)
    assert process.returncode == Exit.RESUMABLE, shown + wrong
    assert not group_of(process.pid)


@pytest.mark.slow
def test_a_target_that_is_gone_is_said_once(rows: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    spec = small_spec(rows, {"model.target": str(target), "resources.actors": 1})
    job, plan = begin(tmp_path / "out", spec)
    (target / "model.safetensors").unlink()
    with acquire_driver_lock(job) as lock:
        result = run_job(job, plan.facts, Silent(), lock=lock)
    assert result.exit_code == Exit.BAD_INPUT
    assert "no .safetensors file" in result.message


@pytest.mark.slow
def test_a_full_disk_stops_the_job_and_more_room_ends_it(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, prompts(60))
    (tmp_path / "disk").mkdir()
    submit = [SPOT_BATCH, "submit", "-i", str(rows), "-o", "disk/out", "--max-new-tokens", "8"]
    submit += ["--actors", "1", "--set", "scheduling.publish_seconds=0.1"]
    script = (
        "mount -t tmpfs -o size=100k tmpfs disk && "
        '{ "$@"; test $? -eq 75 || exit 9; } && mount -o remount,size=10m disk && exec "$@"'
    )
    apart = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "--mount", "true"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting needs privileges that this process lacks")
    done = subprocess.run(
        [*apart, *submit], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == Exit.COMPLETE, done.stdout + done.stderr
    assert "no space left" in done.stdout
