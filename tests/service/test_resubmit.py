"""What a job settled when it was submitted holds for the same command later and for `resume`."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from spot_batch.cli.running import new_job
from spot_batch.inputs.errors import InputError
from spot_batch.job.reading import load_spec
from spot_batch.jobdir.directory import JobDirectory, SpecConflict
from spot_batch.service.plan import plan_job, plan_of
from spot_batch.service.progress import Exit
from spot_batch.terminal.screen import Screen
from tests.checkpoints.hub import MAIN, OLD, OPEN, Hub, environment, files_of, serving
from tests.families import write_checkpoint
from tests.service.jobs import SPOT_BATCH, begin, data_hash, prompts, small_spec, write_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path, prompts(3))


def test_a_job_keeps_the_threshold_that_it_was_begun_with(rows: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "sdar")
    open_spec = load_spec(None, {"input.source": str(rows), "model.target": str(model)})
    job, plan = begin(tmp_path / "out", open_spec)
    assert job.fields["generation.threshold"] == 0.85
    assert plan.threshold_of == "the sdar family's"
    resumed = plan_of(JobDirectory.open(job.root))
    assert (resumed.spec.generation.threshold, resumed.threshold_of) == (0.85, "the job's own")


def test_a_job_of_another_default_goes_on_with_its_own(rows: Path, tmp_path: Path) -> None:
    """0.9 was everybody's once, and was written into the directories of that time."""
    model = write_checkpoint(tmp_path / "model", "llada2")
    given = {"input.source": str(rows), "model.target": str(model)}
    job, _ = begin(tmp_path / "out", load_spec(None, {**given, "generation.threshold": 0.9}))
    again = plan_job(load_spec(None, given), job.root)
    assert (again.spec.generation.threshold, again.threshold_of) == (0.9, "the job's own")
    assert again.fingerprint == plan_of(job).fingerprint == job.fingerprint
    other = load_spec(None, {**given, "generation.threshold": 0.95})
    with pytest.raises(SpecConflict, match=r"generation\.threshold: 0\.9 \(directory\) != 0\.95"):
        begin(job.root, other)
    elsewhere = write_checkpoint(tmp_path / "elsewhere", "llada2")
    moved = plan_job(load_spec(None, {**given, "model.target": str(elsewhere)}), job.root)
    assert moved.spec.generation.threshold == 0.95, "another target's job is none of its own"


def test_a_job_needs_its_directory_alone(rows: Path, tmp_path: Path) -> None:
    job, plan = begin(tmp_path / "out", small_spec(rows))
    asked = [sample.prompt_text for sample in plan.first(3)]
    rows.write_text(rows.read_text().replace("figs", "kiwi"))
    moved = Path(shutil.move(job.root, tmp_path / "elsewhere"))
    for _ in range(2):
        resumed = plan_of(JobDirectory.open(moved))
        assert [sample.prompt_text for sample in resumed.first(3)] == asked
        rows.unlink(missing_ok=True)


def test_the_same_command_without_its_input_names_the_one_that_goes_on(
    rows: Path, tmp_path: Path
) -> None:
    spec = small_spec(rows, {"output.path": str(tmp_path / "out")})
    begin(tmp_path / "out", spec)
    rows.unlink()
    with pytest.raises(InputError, match=r"no such file: .*\n`spot-batch resume .*/out` goes on"):
        new_job(spec).plan(Screen())


def test_the_same_command_goes_on_with_the_rows_that_it_copied(rows: Path, tmp_path: Path) -> None:
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    job, _ = begin(tmp_path / "out", small_spec(packed))
    copy = Path(job.pinned.copy)
    before = copy.stat()
    again, plan = begin(job.root, small_spec(packed))
    assert plan.pinned == again.pinned == job.pinned
    assert list(job.hub_input.iterdir()) == [copy]
    assert copy.stat() == before
    packed.write_bytes(gzip.compress(rows.read_bytes().replace(b"figs", b"kiwi")))
    with pytest.raises(SpecConflict, match=r"input\.digest"):
        begin(job.root, small_spec(packed))
    assert JobDirectory.open(job.root).pinned == job.pinned


def test_an_input_that_is_not_copied_must_stay(rows: Path, tmp_path: Path) -> None:
    job, _ = begin(tmp_path / "out", small_spec(rows, {"input.copy_limit_gib": 0}))
    assert begin(job.root, small_spec(rows))[0].fingerprint == job.fingerprint
    assert not JobDirectory.open(job.root).pinned.copy
    rows.unlink()
    with pytest.raises(InputError, match=r"rows\.jsonl: gone since the job was submitted"):
        plan_of(JobDirectory.open(job.root))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.exact
def test_a_branch_that_moved_on_the_hub_moves_no_job(rows: Path, tmp_path: Path) -> None:
    old, new = (
        files_of(write_checkpoint(tmp_path / name, "sdar", num_shards=2, seed=seed))
        for seed, name in enumerate(("old", "new"))
    )
    hub = Hub({OLD: old, MAIN: new}, main=OLD)
    out, command = tmp_path / "out", ["-i", str(rows), "--model", OPEN, "-o", "out", "--json"]
    command += ["--max-new-tokens", "8", "--actors", "1", "--temperature", "0"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SPOT_BATCH, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path / "home", endpoint),
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    with serving(hub) as endpoint:
        first = run("submit", *command)
        assert first.returncode == Exit.COMPLETE, first.stderr
        assert JobDirectory.open(out).spec.model.target.revision == OLD
        assert f"{OPEN} at {OLD[:12]}: sdar" in first.stderr
        before = data_hash(out)
        hub.main = MAIN
        shutil.rmtree(out / "data")  # what is damaged is made again
        again = run("submit", *command)
        assert again.returncode == Exit.COMPLETE, again.stderr
        assert data_hash(out) == before
        resumed = run("resume", "out", "--json")
        assert json.loads(resumed.stdout)["message"] == "complete already"
        assert hub.downloads == dict.fromkeys(old, 1), "the new commit was asked for"
        named = run("submit", *command, "--set", "model.target.revision=main", "--dry-run")
        assert named.returncode == Exit.BAD_INPUT, "a dry run refuses what the run would"
        assert "model.weights: " in named.stderr
        conflict = run("submit", *command, "--set", "model.target.revision=main")
        assert conflict.returncode == Exit.BAD_INPUT
        assert "model.weights: " in conflict.stderr
        assert "`spot-batch resume` takes it as it was begun" in conflict.stderr
