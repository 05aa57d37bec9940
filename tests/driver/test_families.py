"""The job specs of the published families, as a user runs them, on tiny checkpoints of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.driver.jobs import data_hash, start, write_rows
from tests.families import write_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

JOBS = Path(__file__).parent.parent.parent / "jobs"
ROWS = {
    "sdar-8b-gsm8k": [{"question": f"Ann has {n} figs and eats {n // 2}."} for n in range(4)],
    "llada2-mini-humaneval": [
        {"task_id": f"t/{n}", "prompt": f"def f{n}(x):\n    return x + {n}\n"} for n in range(4)
    ],
}


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("sdar", "sdar-8b-gsm8k"),
        ("sdar-moe", "sdar-8b-gsm8k"),
        ("llada2", "llada2-mini-humaneval"),
    ],
)
def test_a_families_spec_runs_drafted_and_is_draft_free_decoding(
    tmp_path: Path, family: str, spec: str
) -> None:
    model = write_checkpoint(tmp_path / family, family, num_shards=2)
    rows = write_rows(tmp_path, ROWS[spec])
    hashes = []
    for budget in (6, 0):
        out = tmp_path / f"out-{budget}"
        process = start(
            [
                *("submit", str(JOBS / f"{spec}.yaml"), "--model", str(model), "-i", str(rows)),
                *("-o", str(out), "--max-new-tokens", "24", "--temperature", "1", "--actors", "1"),
                *("--set", f"speculation.budget={budget}", "--set", "equivalence.min_rows=4"),
            ],
            tmp_path,
        )
        _, errors = process.communicate(timeout=540)
        assert process.returncode == 0, errors
        found = json.loads((out / "summary.json").read_text())
        totals = found["totals"]
        assert (totals["num_samples"], totals["num_errors"]) == (len(ROWS[spec]), 0)
        assert found["check"]["num_compared"] >= 4
        assert found["check"]["num_differed"] == 0
        hashes.append(data_hash(out))
        if budget:
            assert totals["num_forwards"] < totals["num_draft_free_forwards"]
    assert hashes[0] == hashes[1]
