"""`bench exact` on a tiny target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.exact import ExactCell, decode_all, exact_row
from spot_batch.lab.bench.questions import make_requests, params_of, read_questions
from spot_batch.models.block import load_target
from tests.tiny_models import write_target


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
        (["--budgets", ""], "--budgets wants at least one number, got ''"),
        (["--budgets", "0"], "--budgets wants whole numbers from 1, got 0"),
        (["--temperatures", ""], "--temperatures wants at least one number"),
        (["--sequences", ","], "--sequences wants at least one number"),
        (["--sequences", "0"], "--sequences wants whole numbers from 1, got 0"),
        (["--seeds", "-1"], "--seeds wants whole numbers from 0 to"),
        (["--gammas", "2"], "--gammas wants numbers from 0.0 to 1.0, got 2.0"),
        (["--threads", "0"], "--threads must be a whole number from 1, got 0"),
        (["--json", "nowhere/rows.json"], "--json nowhere/rows.json: there is no folder nowhere"),
        (["--temperatures", "warm"], "--temperatures wants floats by comma"),
        (["--numerics", "exact"], "--numerics must be canonical, fast"),
        (["--crossing", "maybe"], "--crossing must be on or off or both, got 'maybe'"),
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


def test_a_way_to_draft_that_is_named_twice_is_one(target: Path, tmp_path: Path) -> None:
    arguments = [
        *("--model", str(target), "--drafter", "ranking", "--limit", "2", "--max-new-tokens"),
        *("16", "--sequences", "2,2", "--budgets", "4,4", "--gammas", "0", "--seeds", "0,3"),
        *("--numerics", "canonical,canonical", "--temperatures", "1", "--out"),
        *(str(tmp_path / "cells"), "--json", str(tmp_path / "rows.json")),
    ]
    code, output = bench(*arguments)
    assert code == 0, output
    assert "4 sequences compared, 0 differ" in output
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["drafting"], row["seed"]) for row in rows] == [("D 4", 0), ("D 4", 3)]
    kept = (tmp_path / "cells" / "cells.jsonl").read_text()
    code, output = bench(*arguments)
    assert (code, (tmp_path / "cells" / "cells.jsonl").read_text()) == (0, kept)
    # No mass floor at all is a choice, and another one of the same cells.
    code, output = bench(*arguments[:-4], "--gammas", "", *arguments[-4:])
    assert (code, (tmp_path / "cells" / "cells.jsonl").read_text()) == (0, kept)
    code, output = bench(*arguments, "--max-new-tokens", "8")
    assert code == 2
    assert "holds cells of another run: max_new_tokens 16, now 8" in output


def test_samples_that_differ_are_named_once_with_their_cell(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = resolve_model(str(target))
    params = params_of(info, temperature=0.0, max_new_tokens=8)
    requests = make_requests(info, ["a", "b", "c", "d", "e"], params)
    base = decode_all(load_target(info), None, requests, EngineSettings(budget=0))
    other = {at: replace(done, token_ids=(*done.token_ids, 0)) for at, done in base.items()}
    cell = ExactCell(numerics="fast", temperature=0.0, seed=0, sequences=7, drafting="D 8")
    assert exact_row(cell, base, other).num_differ == 5
    assert len(caplog.messages) == 1
    assert "D 8" in caplog.text
    assert "5 samples are not the draft-free ones: 0, 1, 2, ..." in caplog.text


def test_prompt_files_with_a_bad_line_name_it(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "1"}\n{"quest\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: not JSON"):
        read_questions(path, limit=10)
    path.write_text('{"answer": "1"}\n')
    with pytest.raises(ValueError, match="line 1: none of question, prompt"):
        read_questions(path, limit=10)
    path.write_text('\n{"question": "1"}\n\n3\n')
    assert read_questions(path, limit=1) == ["1"]
    with pytest.raises(ValueError, match=r"line 4: want an object, got int"):
        read_questions(path, limit=2)
    path.write_bytes(b'{"question": "1"}\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2: not UTF-8"):
        read_questions(path, limit=2)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_questions(path, limit=10)
