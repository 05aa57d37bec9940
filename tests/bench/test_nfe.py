"""`bench nfe` and its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.bench.tasks import TASKS, load_task
from spot_batch.cli import app
from spot_batch.cli.comparing import read_grid
from tests.models import write_target

METHODS = "spiffy,ssd,blockspec,ranking,random,position-oracle,token-oracle,full-oracle"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(3)]
    (folder / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


def test_a_grid_is_measured_once_and_goes_on_where_it_was(
    target: Path, data: Path, tmp_path: Path
) -> None:
    def run(*more: str) -> tuple[int, str]:
        return bench(
            *("nfe", "--model", str(target), "--methods", METHODS, "--tasks", "synthetic,gsm8k"),
            *("--data", str(data), "--limit", "3", "--max-new-tokens", "24", "--budgets", "4"),
            *("--calibrate-on", "6", "--live", "2", "--out", str(tmp_path / "cells"), *more),
        )

    code, output = run("--temperatures", "0")
    assert code == 0, output
    assert "fewer forwards" in output
    assert "0 differ" in output
    cells = (tmp_path / "cells" / "cells.jsonl").read_text()
    assert len(cells.splitlines()) == 1 + 2 * 8
    # A torn last line is measured again, what is there is not.
    (tmp_path / "cells" / "cells.jsonl").write_text(cells[:-20])
    code, output = run("--temperatures", "0,1", "--json", str(tmp_path / "rows.json"))
    assert code == 0, output
    assert (tmp_path / "cells" / "cells.jsonl").read_text()[: len(cells)] == cells
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 8
    assert {"task", "method", "budget", "temperature", "nfe", "nfe_ratio", "identical"} <= set(
        rows[0]
    )
    assert any(row["live_agrees"] for row in rows)
    by_method = {row["method"]: row for row in rows if row["task"] == "gsm8k"}
    assert by_method["full-oracle"]["nfe"] <= by_method["position-oracle"]["nfe"]
    code, output = run("--limit", "2")
    assert code == 2
    assert "holds cells of another run: limit 3, now 2" in output


def test_fixed_lengths_are_columns_of_their_own(target: Path, tmp_path: Path) -> None:
    code, output = bench(
        *("nfe", "--model", str(target), "--methods", "ranking", "--limit", "2"),
        *("--lengths", "end,16", "--budgets", "4", "--temperatures", "0", "--calibrate-on", "4"),
        *("--max-new-tokens", "24", "--json", str(tmp_path / "rows.json")),
    )
    assert code == 0, output
    fixed = json.loads((tmp_path / "rows.json").read_text())["rows"][1]
    assert fixed["length"] == 16
    assert fixed["draft_free_nfe"] >= 16


def test_a_yaml_file_is_the_grid_and_options_override_it(target: Path, tmp_path: Path) -> None:
    spec = tmp_path / "grid.yaml"
    spec.write_text(
        f"model: {target}\nmethods: [ranking, ssd]\nbudgets: [2, 4]\ntemperatures: 0\nlimit: 50\n"
        "max_new_tokens: 16\ncalibrate_on: 4\n"
        "published:\n"
        "  - {task: synthetic, method: ssd, budget: 4, temperature: 0, nfe_ratio: 3.5}\n"
    )
    code, output = bench("nfe", str(spec), "--limit", "2")
    assert code == 0, output
    assert "2 prompts" in output
    assert "published 3.5" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "unknown method 'magic'; there are spot,"),
        (["--tasks", "chess"], "unknown task 'chess'; there are synthetic"),
        (["--budgets", "0"], "--budgets wants whole numbers from 1"),
        (["--lengths", "long"], "--lengths wants `end` and numbers of tokens, got 'long'"),
        (["--limit", "0"], "limit must be a whole number from 1"),
        (["--methods", "spot"], "has no order drafter"),
        (["--tasks", "gsm8k", "--data", "nowhere"], "nowhere: no gsm8k_test.jsonl or gsm8k.jsonl"),
        (["--spiffy", "nowhere.json"], "nowhere.json: cannot be read"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_a_wrong_option_is_named(target: Path, arguments: list[str], message: str) -> None:
    methods = [] if "--methods" in arguments else ["--methods", "ranking"]
    code, output = bench("nfe", "--model", str(target), *methods, *arguments)
    assert code == 2, output
    assert message in output


def test_an_unknown_key_of_a_grid_is_named(tmp_path: Path) -> None:
    spec = tmp_path / "grid.yaml"
    spec.write_text("budget: 8\n")
    code, output = bench("nfe", str(spec))
    assert code == 2
    assert "grid.yaml: unknown key 'budget'; there are model" in output


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ("3", "published must be a list, got 3"),
        ("[spot]", "published[0] must have task, method, budget, temperature, nfe_ratio"),
        ("[{task: x}]", "published[0] must have task"),
        (
            "[{task: x, method: spot, budget: much, temperature: 0, nfe_ratio: 2}]",
            "published[0].budget must be a number, got 'much'",
        ),
    ],
)
def test_published_figures_that_are_none_are_named(
    tmp_path: Path, published: str, message: str
) -> None:
    spec = tmp_path / "grid.yaml"
    spec.write_text(f"published: {published}\n")
    code, output = bench("nfe", str(spec))
    assert code == 2
    assert message in output


def test_published_figures_are_taken_as_they_are(tmp_path: Path) -> None:
    entry = {"task": "x", "method": "spot", "budget": 8, "temperature": 0, "nfe_ratio": "3 to 4"}
    spec = tmp_path / "grid.yaml"
    spec.write_text(json.dumps({"published": [entry]}))
    assert read_grid(spec, {}).published == (entry,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "gsm8k_test.jsonl, line 1: not JSON"),
        ("3", "gsm8k_test.jsonl, line 1: want an object, got int"),
        ('{"question": "why"}', "gsm8k_test.jsonl, line 1: gsm8k wants a column 'answer'"),
        ("", "gsm8k holds no rows"),
    ],
)
def test_a_bad_row_of_a_task_is_named(data: Path, line: str, message: str) -> None:
    (data / "gsm8k_test.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        load_task(TASKS["gsm8k"], data=data, limit=5)


def test_mbpp_rows_that_train_others_are_left_out(tmp_path: Path) -> None:
    rows = [{"task_id": n, "text": f"Add {n}.", "test_list": ["assert True"]} for n in (3, 11, 601)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_task(TASKS["mbpp"], data=tmp_path, limit=5)
    assert [row.fields["task_id"] for row in found] == [11]
    assert "Add 11." in found[0].prompt
    assert "assert True" in found[0].prompt


def test_prompts_are_printed_as_the_model_is_given_them(data: Path) -> None:
    code, output = bench("prompts", "--tasks", "gsm8k", "--data", str(data))
    assert code == 0, output
    assert "What is 0 + 0?" in output
    assert "<|im_start|>" in output
    code, output = bench("prompts", "--tasks", "gsm8k", "--template")
    assert "{{ question }}" in output


def test_commit_order_has_a_row_a_block_and_a_picture(target: Path, tmp_path: Path) -> None:
    picture, rows = tmp_path / "order.png", tmp_path / "order.json"
    code, output = bench(
        *("commit-order", "--model", str(target), "--limit", "4", "--max-new-tokens", "40"),
        *("--plot", str(picture), "--json", str(rows)),
    )
    assert code == 0, output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(rows.read_text())
    blocks = found["blocks"]
    assert [row["block"] for row in blocks] == list(range(1, len(blocks) + 1))
    assert all(0.0 <= row["stale_argmax"] <= 1.0 for row in blocks)
    ratio = {(each["knows"], each["budget"]): each["nfe_ratio"] for each in found["oracles"]}
    assert ratio["full", 8] >= max(ratio["position", 8], ratio["token", 8])
    code, output = bench("commit-order", "--model", str(target), "--task", "synthetic,gsm8k")
    assert code == 2
    assert "--task wants one task" in output
