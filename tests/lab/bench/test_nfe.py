"""`bench nfe` and its files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import spot_batch
from spot_batch.cli.main import app
from spot_batch.lab.bench.grids import NfeGrid, read_grid
from spot_batch.lab.bench.tasks import TASKS, load_task
from tests.tiny_models import write_target

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
    # Cells that were not run live are run live when that is asked for, and no other again.
    code, output = run("--live", "1")
    assert code == 0, output
    assert "32 of 32 cells run live too, 0 differ" in output
    num_lines = len((tmp_path / "cells" / "cells.jsonl").read_text().splitlines())
    code, output = run("--live", "1")
    assert code == 0, output
    assert len((tmp_path / "cells" / "cells.jsonl").read_text().splitlines()) == num_lines


class Small:
    """A grid of one cell of one method, kept in a folder."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.folder = folder / "cells"
        self.file = self.folder / "cells.jsonl"
        self.arguments = (
            *("nfe", "--model", str(target), "--methods", "ranking", "--limit", "2", "--live", "0"),
            *("--budgets", "4", "--temperatures", "0", "--max-new-tokens", "16"),
            *("--calibrate-on", "4", "--out", str(self.folder)),
        )

    def run(self, *more: str) -> tuple[int, str]:
        return bench(*self.arguments, *more)


@pytest.fixture
def small(target: Path, tmp_path: Path) -> Small:
    return Small(target, tmp_path)


def test_cells_of_other_prompts_files_or_threads_are_refused(
    small: Small, target: Path, data: Path, tmp_path: Path
) -> None:
    given = ("--tasks", "gsm8k", "--data", str(data))
    code, output = small.run(*given)
    assert code == 0, output
    rows = data / "gsm8k_test.jsonl"
    rows.write_text(rows.read_text().replace("What is", "How much is"))
    code, output = small.run(*given)
    assert code == 2
    assert "holds cells of other prompts of gsm8k; give another --out" in output
    code, output = small.run("--threads", "2")
    assert code == 2
    assert "holds cells of another run: threads 1, now 2" in output
    other = tmp_path / "prompts.jsonl"
    other.write_text('{"question": "Why?"}\n' * 8)
    code, output = small.run("--calibration", str(other))
    assert code == 2
    assert "holds cells of another run: calibration" in output
    small.folder.rename(tmp_path / "before")
    graph = {
        "block_length": 8,
        "temperature": 0.0,
        "budget": 4,
        "num_states": 2,
        "counts": [[[[0, 0]], 2]],
    }
    file = tmp_path / "spiffy.json"
    file.write_text(json.dumps({"kind": "spiffy", "graphs": [graph]}))
    spiffy = ("--spiffy", str(file), "--methods", "spiffy")
    code, output = small.run(*spiffy)
    assert code == 0, output
    file.write_text(json.dumps({"kind": "spiffy", "graphs": [{**graph, "num_states": 3}]}))
    code, output = small.run(*spiffy)
    assert code == 2
    assert "holds cells of another run: spiffy" in output
    code, output = small.run(*spiffy, "--budgets", "4,8")
    assert code == 2
    assert "spiffy.json: no graph for T 0, D 8; there are T 0, D 4" in output


def test_cells_of_another_drafter_file_are_refused(tmp_path: Path) -> None:
    assets = Path(spot_batch.__file__).parent / "assets" / "drafters"
    for suffix in (".json", ".safetensors"):
        shutil.copy(assets / f"bundled-b32{suffix}", tmp_path / f"mine{suffix}")
    small = Small(Path("bundled"), tmp_path)
    given = ("--methods", "spot", "--drafter", str(tmp_path / "mine"), "--limit", "1")
    code, output = small.run(*given)
    assert code == 0, output
    card = json.loads((tmp_path / "mine.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps({**card, "name": "other"}))
    code, output = small.run(*given)
    assert code == 2
    assert "holds cells of another run: drafter_files" in output


@pytest.mark.parametrize("torn", [b"", b'{"comm'])
def test_a_file_without_a_whole_first_line_begins_anew(small: Small, torn: bytes) -> None:
    small.folder.mkdir()
    small.file.write_bytes(torn)
    code, output = small.run()
    assert code == 0, output
    header, row = map(json.loads, small.file.read_text().splitlines())
    assert header["command"] == "bench nfe"
    assert row["method"] == "ranking"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("[]\n", "cells.jsonl, line 1: want an object, got list"),
        ("\n", "cells.jsonl, line 1: not JSON"),
        ("{}\n", "holds cells of another run: command None, now 'bench nfe'"),
        ("HEADER3\n", "cells.jsonl, line 2: want an object, got int"),
        ('HEADER{"task": 1}\n', "cells.jsonl, line 2: no row of this"),
        ("HEADER\\xff\n", "cells.jsonl, line 2: not JSON"),
    ],
)
def test_a_file_of_other_things_is_named(small: Small, found: str, message: str) -> None:
    small.run()
    header = small.file.read_text().splitlines(keepends=True)[0]
    small.file.write_text(found.replace("HEADER", header))
    code, output = small.run()
    assert code == 2, output
    assert message in output


def test_one_process_at_a_time_measures_into_a_folder(small: Small) -> None:
    small.folder.mkdir()
    with small.file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code, output = small.run()
    assert code == 2
    assert "cells.jsonl: another process measures into it" in output


@pytest.mark.ray
def test_cells_on_a_cluster_are_those_measured_here(small: Small, tmp_path: Path) -> None:
    grid = ("--seeds", "0,1", "--temperatures", "0,1", "--methods", "ranking,spiffy")
    code, output = small.run(*grid, "--address", "local")
    assert code == 0, output
    small.folder.rename(tmp_path / "there")
    code, output = small.run(*grid)
    assert code == 0, output
    there = (tmp_path / "there" / "cells.jsonl").read_text().splitlines()
    assert sorted(there[1:]) == sorted(small.file.read_text().splitlines()[1:])
    assert len(there) == 1 + 8


def test_an_address_without_a_cluster_is_named(small: Small) -> None:
    code, output = small.run("--address", "127.0.0.1:1")
    assert code == 2
    assert "--address 127.0.0.1:1: no Ray cluster there" in output


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
        (["--budgets", "0"], "--budgets wants whole numbers from 1, got 0"),
        (["--budgets", ""], "--budgets wants at least one number, got ''"),
        (["--seeds", ""], "--seeds wants at least one number, got ''"),
        (["--seeds", "-1"], "--seeds wants whole numbers from 0 to 18446744073709551615, got -1"),
        (["--seeds", f"{2**64}"], "--seeds wants whole numbers from 0 to"),
        (["--temperatures", ","], "--temperatures wants at least one number, got ','"),
        (["--temperatures", "nan"], "--temperatures wants numbers, got nan"),
        (["--temperatures", "-1"], "--temperatures: must be 0 or from"),
        (["--lengths", ""], "--lengths wants `end` and numbers of tokens, got ''"),
        (["--threads", "0"], "--threads must be a whole number from 1, got 0"),
        (["--live", "-1"], "--live must be a whole number from 0, got -1"),
        (["--json", "nowhere/rows.json"], "--json nowhere/rows.json: there is no folder nowhere"),
        (["--json", "."], "--json .: is a folder; name a file"),
        (["--methods", ""], "unknown method ''"),
        (["--tasks", ""], "unknown task ''"),
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


GOOD = '{"question": "why", "answer": "3"}'


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
    assert read_grid(NfeGrid, spec, {}).published == (entry,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "gsm8k_test.jsonl, line 1: not JSON"),
        ("3", "gsm8k_test.jsonl, line 1: want an object, got int"),
        ('{"question": "why"}', "gsm8k_test.jsonl, line 1: gsm8k wants a column 'answer'"),
        ("", "gsm8k holds no rows"),
        (GOOD + "\n\n[]", "gsm8k_test.jsonl, line 3: want an object, got list"),
        (GOOD + "\n\xff", "gsm8k_test.jsonl, line 2: not UTF-8"),
        ('{"question": "why", "answer": null}', "line 1: gsm8k wants a column 'answer'"),
        ("[" * 100_000, "gsm8k_test.jsonl, line 1: nested too deeply"),
    ],
)
def test_a_bad_row_of_a_task_is_named(data: Path, line: str, message: str) -> None:
    (data / "gsm8k_test.jsonl").write_text(line, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        load_task(TASKS["gsm8k"], data=data, limit=5)


def test_mbpp_rows_that_train_others_are_left_out(tmp_path: Path) -> None:
    rows = [{"task_id": n, "text": f"Add {n}.", "test_list": ["assert True"]} for n in (3, 11, 601)]
    (tmp_path / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_task(TASKS["mbpp"], data=tmp_path, limit=5)
    assert [row.fields["task_id"] for row in found] == [11]
    assert "Add 11." in found[0].prompt
    assert "assert True" in found[0].prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task_id": None, "test_list": []}, "line 1: task_id must be a whole number, got None"),
        ({"task_id": "x", "test_list": []}, "line 1: task_id must be a whole number, got 'x'"),
        ({"task_id": 11, "test_list": None}, "line 1: mbpp wants a column 'test_list'"),
        ({"task_id": 11, "test_list": "assert"}, "line 1: test_list must be a list, got str"),
    ],
)
def test_an_mbpp_row_that_cannot_be_graded_is_named(
    tmp_path: Path, row: dict[str, object], message: str
) -> None:
    (tmp_path / "mbpp.jsonl").write_text(json.dumps({"text": "Add.", **row}))
    with pytest.raises(ValueError, match=message):
        load_task(TASKS["mbpp"], data=tmp_path, limit=5)


def test_blank_lines_between_rows_are_skipped(data: Path) -> None:
    (data / "gsm8k_test.jsonl").write_text(f"\n{GOOD}\n \n{GOOD}\n\n")
    assert len(load_task(TASKS["gsm8k"], data=data, limit=5)) == 2


@pytest.mark.parametrize(
    ("offline", "message"),
    [("0", "cannot be had from http://127.0.0.1:1"), ("1", "openai/gsm8k cannot be had (")],
)
def test_a_hub_that_cannot_be_reached_is_one_clear_line(
    tmp_path: Path, offline: str, message: str
) -> None:
    hub = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path)}
    script = "from spot_batch.cli.main import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", script, "bench", "prompts", "--tasks", "gsm8k"],
        env={**os.environ, **hub},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "give --data FOLDER with gsm8k_test.jsonl" in done.stderr
    assert len(done.stderr.splitlines()) == 1


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
    assert {(each["task"], each["temperature"], each["seed"]) for each in blocks} == {
        ("synthetic", 0.0, 0)
    }
    ratio = {(each["knows"], each["budget"]): each["nfe_ratio"] for each in found["oracles"]}
    assert ratio["full", 8] >= max(ratio["position", 8], ratio["token", 8])


def test_commit_order_of_several_recordings_is_kept(
    target: Path, data: Path, tmp_path: Path
) -> None:
    cells, rows = tmp_path / "cells", tmp_path / "order.json"
    arguments = (
        *("commit-order", "--model", str(target), "--drafter", "ranking", "--limit", "3"),
        *("--max-new-tokens", "16", "--budgets", "4", "--tasks", "synthetic,gsm8k"),
        *("--data", str(data), "--temperatures", "0,1", "--seeds", "0,1", "--out", str(cells)),
        *("--json", str(rows)),
    )
    code, output = bench(*arguments)
    assert code == 0, output
    assert "| nothing (ranking) |" in output
    before, kept = rows.read_text(), (cells / "cells.jsonl").read_text()
    assert len(kept.splitlines()) == 1 + 2 * 2 * 2
    oracles = json.loads(before)["oracles"]
    assert len(oracles) == 8 * 4
    assert {each["knows"] for each in oracles} == {"nothing", "position", "token", "full"}
    code, output = bench(*arguments)
    assert code == 0, output
    assert (rows.read_text(), (cells / "cells.jsonl").read_text()) == (before, kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperatures", "0,1", "--plot", "x.png"], "--plot wants one task, temperature and"),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png: there is no folder nowhere"),
        (["--budgets", ""], "--budgets wants at least one number"),
        (["--budgets", "0"], "--budgets wants whole numbers from 1, got 0"),
        (["--limit", "0"], "--limit must be a whole number from 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be a whole number from 1"),
        (["--seeds", "-3"], "--seeds wants whole numbers from 0"),
        (["--drafter", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_option_of_commit_order_is_named(
    target: Path, arguments: list[str], message: str
) -> None:
    code, output = bench("commit-order", "--model", str(target), *arguments)
    assert code == 2, output
    assert message in output
