"""Grading of answers: right is right in every form, wrong is wrong, and code runs in its limits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spot_batch.cli.main import app
from spot_batch.lab.bench.cells import TaskCell
from spot_batch.lab.bench.grading import (
    code_of,
    find_grader,
    grade_humaneval,
    grade_math,
    grade_mbpp,
    grade_synthetic,
    mcnemar,
    passes,
    score_row,
)
from spot_batch.lab.bundled.corpus import held_out_problems
from tests.tiny_models import write_target


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("She has 3.\n#### 18", "It makes 9 * 2 = 18. The answer is 18.", True),
        ("She has 3.\n#### 18", "So \\boxed{18}", True),
        ("#### 1,234", "The answer is $1{,}234$ dollars: 1234", True),
        ("#### 18", "The answer is 19.", False),
        ("#### 18", "", False),
        ("\\frac{1}{2}", "We get \\boxed{0.5}.", True),
        ("$\\frac{1}{2}$", "We get $\\frac{2}{4}$.", True),
        ("(3, \\frac{\\pi}{2})", "\\boxed{(3, \\pi/2)}", True),
        ("\\frac{1}{2}", "\\boxed{\\frac{1}{3}}", False),
    ],
)
def test_numbers_and_formulas_are_compared_by_value(answer: str, text: str, right: bool) -> None:
    assert grade_math({"answer": answer}, text) == right


def test_synthetic_answers_are_checked_by_their_program() -> None:
    for problem in held_out_problems(12, seed=3):
        assert grade_synthetic({"id": problem.id}, problem.response)
        assert not grade_synthetic({"id": problem.id}, problem.response + " not")


def test_code_is_taken_from_its_fence() -> None:
    assert code_of("Here:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
    assert code_of("x = 2") == "x = 2"
    assert code_of("```\nx = 3") == "x = 3"


MBPP: dict[str, Any] = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


def test_mbpp_runs_the_tests() -> None:
    assert grade_mbpp(MBPP, "```python\ndef add(a, b):\n    return a + b\n```")
    assert not grade_mbpp(MBPP, "def add(a, b):\n    return a - b\n")
    assert not grade_mbpp(MBPP, "I do not know.")


HUMANEVAL: dict[str, Any] = {
    "prompt": 'from typing import List\n\n\ndef total(x: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
}


def test_humaneval_takes_a_whole_function_or_a_body() -> None:
    assert grade_humaneval(HUMANEVAL, "```python\ndef total(x):\n    return sum(x)\n```")
    assert grade_humaneval(HUMANEVAL, "    return sum(x)\n")
    assert not grade_humaneval(HUMANEVAL, "    return 4\n")
    assert not grade_humaneval(HUMANEVAL, "")


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "x = ' ' * (4 << 30)",
        "open('big', 'w').write('x' * (4 << 20))",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import sys; print('passed'); sys.stdout.flush(); import os; os._exit(0)",
        "import os; assert 'OURS_ALONE' in os.environ",
        "(",
        "x = '\\ud800'; print(x)",
    ],
)
def test_a_program_that_asks_too_much_fails_and_nothing_else(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS_ALONE", "a secret")
    assert not passes(program)


def test_who_leaves_before_the_tests_has_not_passed_them() -> None:
    assert passes("x = 1")
    assert not grade_mbpp(MBPP, "import sys\ndef add(a, b):\n    return a - b\nsys.exit(0)\n")
    assert not grade_mbpp(MBPP, "import os\ndef add(a, b):\n    os._exit(0)\n")
    assert not grade_humaneval(HUMANEVAL, "def total(x):\n    raise SystemExit(0)\n")


def test_what_a_program_starts_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, time\n"
        "try:\n    pid = os.fork()\nexcept OSError:\n    pid = 1\n"  # not allowed: not root
        f"if not pid:\n    open({str(note)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
        "time.sleep(0.5)\n"
    )
    assert passes(program)
    if note.exists():
        stat, end_s = Path(f"/proc/{note.read_text()}/stat"), time.monotonic() + 10
        while stat.exists() and stat.read_text().split()[2] != "Z":
            assert time.monotonic() < end_s, "it lives on"
            time.sleep(0.05)


def test_a_folder_deeper_than_any_path_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import os\n"
        "for n in range(1500):\n    os.mkdir('deep' * 5)\n    os.chdir('deep' * 5)\n"
        "open('file', 'w').write('x')\nos.mkdir('closed')\nos.chmod('closed', 0)\n"
        "os.symlink('/', 'root')\n"
    )
    assert passes(program)
    assert not list(tmp_path.iterdir())


def test_running_code_is_asked_for() -> None:
    with pytest.raises(ValueError, match="mbpp is graded by running what the model wrote"):
        find_grader("mbpp", run_code=False)
    assert find_grader("humaneval", run_code=True) is grade_humaneval


def test_mcnemar_is_a_fair_coin_over_the_pairs_that_differ() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(1, 7) == pytest.approx(2 * (1 + 8) / 256)
    assert mcnemar(3000, 3000) == 1.0
    assert mcnemar(0, 1024) == 0.5**1023
    assert mcnemar(0, 5000) == 0.0
    assert mcnemar(500, 600) == pytest.approx(0.00282, abs=2e-5)


def test_a_row_counts_what_differs() -> None:
    row = score_row(
        TaskCell("t", 0.0, 0), "m", prompts="",
        texts=(["a", "b", "c", "d"], ["a", "B", "c", "d"]),
        right=([True, False, False, True], [True, True, False, True]),
    )  # fmt: skip
    assert (row.score, row.draft_free_score) == (0.75, 0.5)
    assert (row.num_differ, row.only_drafted, row.only_draft_free) == (1, 1, 0)


def test_drafted_scores_are_the_draft_free_ones(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    target = write_target(tmp_path / "target", scale=3.0)
    result = CliRunner().invoke(
        app,
        [
            *("bench", "scores", "--model", str(target), "--drafter", "ranking", "--limit", "4"),
            *("--temperatures", "0,1", "--max-new-tokens", "24", "--json", str(rows)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "0 of 4 texts differ" in result.output
    assert [row["num_differ"] for row in json.loads(rows.read_text())["rows"]] == [0, 0]


def test_scores_are_kept_by_task_temperature_and_seed(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", scale=3.0)
    arguments = [
        *("bench", "scores", "--model", str(target), "--drafter", "ranking", "--limit", "2"),
        *("--temperatures", "0,1", "--seeds", "0,7", "--max-new-tokens", "16"),
        *("--out", str(tmp_path / "cells"), "--json", str(tmp_path / "rows.json")),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    kept = (tmp_path / "cells" / "cells.jsonl").read_text()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["temperature"], row["seed"]) for row in rows] == [(0, 0), (0, 7), (1, 0), (1, 7)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "cells" / "cells.jsonl").read_text() == kept
    result = CliRunner().invoke(app, [*arguments, "--budget", "4"])
    assert result.exit_code == 2
    assert "holds cells of another run: budget 8, now 4" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget must be a whole number from 1, got 0"),
        (["--temperatures", ""], "--temperatures wants at least one number"),
        (["--seeds", "x"], "--seeds wants ints by comma"),
        (["--drafter", "none"], "there is nothing to compare"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["--tasks", "mbpp"], "give --run-code"),
        (["--threads", "0"], "--threads must be a whole number from 1, got 0"),
    ],
)
def test_a_wrong_option_of_scores_is_named(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    target = write_target(tmp_path / "target", scale=3.0)
    result = CliRunner().invoke(app, ["bench", "scores", "--model", str(target), *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
