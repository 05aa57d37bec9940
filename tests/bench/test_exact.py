"""`bench exact` on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.bench.prompts import read_questions
from spot_batch.cli import app
from tests.models import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "exact", *arguments])
    return result.exit_code, result.output


def test_canonical_runs_differ_nowhere_and_save_forwards(target: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    code, output = bench(
        *("--model", str(target), "--drafter", "ranking", "--limit", "4"),
        *("--max-new-tokens", "24", "--sequences", "1,3", "--budgets", "6", "--gammas", "0.1"),
        *("--crossing", "both", "--json", str(rows)),
    )
    assert code == 0, output
    cells = json.loads(rows.read_text())["rows"]
    assert len(cells) == 2 * 2 * 2 * 2 * 2  # numerics, temperatures, in flight, floors, crossing
    canonical = [cell for cell in cells if cell["numerics"] == "canonical"]
    assert all(cell["num_differ"] == 0 and cell["num_compared"] == 4 for cell in canonical)
    assert all(cell["nfe"] <= cell["draft_free_nfe"] for cell in canonical)
    assert max(cell["nfe_ratio"] for cell in canonical) > 1.2
    assert "64 sequences compared, 0 differ" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "many"], "--budgets wants ints by comma, got 'many'"),
        (["--temperatures", "warm"], "--temperatures wants floats by comma"),
        (["--numerics", "exact"], "--numerics must be canonical, fast"),
        (["--crossing", "maybe"], "--crossing must be on, off or both"),
        (["--drafter", "none"], "nothing to compare"),
        (["-i", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
        (["--model", "./nowhere"], "no such folder"),
    ],
)
def test_a_wrong_option_is_named(target: Path, arguments: list[str], message: str) -> None:
    model = [] if "--model" in arguments else ["--model", str(target)]
    code, output = bench(*model, *arguments)
    assert code == 2
    assert message in output


def test_prompt_files_with_a_bad_line_name_it(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "1"}\n{"quest\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: not JSON"):
        read_questions(path, limit=10)
    path.write_text('{"answer": "1"}\n')
    with pytest.raises(ValueError, match="line 1: none of question, prompt"):
        read_questions(path, limit=10)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_questions(path, limit=10)
