"""A sharded checkpoint of each family through the whole of `submit`: drafts change no byte.

SDAR's and LLaDA2's are the packaged jobs for GPU users, with another model, other rows and a
shorter answer as their only changes.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.service.progress import Exit
from tests.families import write_checkpoint
from tests.service.jobs import SPOT_BATCH, data_hash

pytestmark = [pytest.mark.ray, pytest.mark.exact, pytest.mark.slow]

NUM_ROWS = 6
MANY = ["--set", "generation.unmasking=threshold"]
SAMPLED = ["--prompt", "question", "--temperature", "0.8", "--set", "generation.top_p=0.9"]


def submit(arguments: list[str], cwd: Path) -> dict[str, object]:
    done = subprocess.run(
        [SPOT_BATCH, "submit", *arguments, "--json"],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == Exit.COMPLETE, done.stdout + done.stderr
    document: dict[str, object] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("sdar", ["sdar-8b-gsm8k"]),
        ("sdar-moe", [*SAMPLED, *MANY]),
        ("llada2", ["llada2-mini-humaneval"]),
        ("llada2", ["llada2-mini-humaneval", *MANY]),
    ],
)
def test_a_job_on_a_small_checkpoint_needs_no_draft(
    tmp_path: Path, family: str, what: list[str]
) -> None:
    model = write_checkpoint(tmp_path / "model", family, num_shards=3)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"question": f"{n} + {n}?", "prompt": f"def add_{n}(a):", "task_id": n})
            + "\n"
            for n in range(NUM_ROWS)
        )
    )
    command = [*what, "-i", str(rows), "--model", str(model), "--max-new-tokens", "40"]
    drafts = ["-o", "drafted", "--actors", "2", "--set", "speculation.budget=4"]
    drafted = submit([*command, *drafts], tmp_path)
    free = ["-o", "free", "--actors", "1", "--set", "speculation.budget=0"]
    submit([*command, *free], tmp_path)
    assert data_hash(tmp_path / "drafted") == data_hash(tmp_path / "free")
    summary = drafted["summary"]
    assert isinstance(summary, dict)
    assert summary["check"] == {"num_compared": NUM_ROWS, "num_differed": 0, "differing": []}
    totals = summary["totals"]
    assert (totals["num_completions"], totals["num_errors"]) == (NUM_ROWS, 0)
    assert totals["num_accepted"] > 0, "nothing was drafted"
    job = JobDirectory.open(tmp_path / "drafted")
    assert job.fields["model.family"] == family
    assert job.fields["generation.threshold"] == resolve_model(str(model)).family.threshold
    with pa.OSFile(str(job.data / job.part_name(0))) as source:
        table = pa.ipc.open_file(source).read_all()
    assert all(table["token_ids"].to_pylist()), "a sample is empty"
