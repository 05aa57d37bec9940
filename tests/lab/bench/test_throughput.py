"""`bench latency`, `throughput` and `simulate` on a tiny target; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.latency import LatencyTable
from spot_batch.lab.bench.clocks import BODIES
from spot_batch.lab.bench.questions import make_requests, read_questions
from spot_batch.lab.bench.simulate import Recording, SimulatedCell, simulate
from spot_batch.lab.bench.throughput import PLAIN, mean_ratio
from spot_batch.models.block import load_target
from spot_batch.records.sampling import SamplingParams, Unmasking
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


def test_latency_writes_a_table_that_the_others_read(target: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    model = ("--model", str(target), "--drafter", "ranking")
    code, output = bench(
        *("latency", *model, "--max-slots", "4", "--seconds", "0.2", "--json", str(table))
    )
    assert code == 0, output
    assert "#" in output
    assert LatencyTable.from_json(table.read_text()).slots[-1] <= 4
    rows = tmp_path / "rows.json"
    code, output = bench(
        *("throughput", *model, "--table", str(table), "--sequences", "1,3", "--budgets"),
        *("0,2,auto", "--gammas", "0.2", "--passes", "2", "--turn-seconds", "0.01", "--limit", "4"),
        *("--max-new-tokens", "8", "--unmasking", "threshold", "--json", str(rows)),
    )
    assert code == 0, output
    document = json.loads(rows.read_text())
    cells = document["rows"]
    assert [(cell["sequences"], cell["budget"]) for cell in cells] == [
        (number, budget)
        for number in (1, 3)
        for budget in ("none, fast", "none, canonical", "0", "2", "auto", "2, gamma 0.2", PLAIN)
    ]
    assert all(cell["ratio_to_draft_free"] == 1.0 for cell in cells[::7])
    ours = [cell for cell in cells if cell["budget"] != PLAIN]
    assert all(cell["tokens_per_s"] > 0 and 0 < cell["host_share"] < 1 for cell in ours)
    assert all(cell["slots_per_s"] > 0 for cell in ours)
    assert all(cell["low"] <= cell["ratio_to_draft_free"] <= cell["high"] for cell in cells)
    assert all(cell["steps_per_forward"] >= 0.99 for cell in cells)
    plain = [cell for cell in cells if cell["budget"] == PLAIN]
    assert [cell["sequences"] for cell in plain] == [1, 3]
    assert all(cell["tokens_per_s"] > 0 and cell["num_passes"] == 2 for cell in plain)
    assert "plain loop" in output
    code, output = bench(
        *("simulate", *model, "--tables", f"{table},h200-8b", "--sequences", "2", "--budgets", "2"),
        *("--rounds", "4", "--limit", "2", "--max-new-tokens", "12", "--json", str(rows)),
    )
    assert code == 0, output
    assert [row["table"] for row in json.loads(rows.read_text())["rows"]] == [str(table), "h200-8b"]


def test_cells_that_were_measured_are_kept(target: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(BODIES["h200-8b"].table().to_json())
    model = (
        "--model",
        str(target),
        "--drafter",
        "ranking",
        "--limit",
        "2",
        "--max-new-tokens",
        "8",
    )
    for command, more, num_cells in (
        ("throughput", ("--passes", "2", "--turn-seconds", "0.01", "--table", str(table)), 2 * 5),
        ("simulate", ("--rounds", "4", "--temperature", "1", "--tables", str(table)), 2),
    ):
        cells, rows = tmp_path / command, tmp_path / "rows.json"
        arguments = (
            *(command, *model, "--sequences", "2", "--budgets", "0,2", "--seeds", "0,1", *more),
            *("--out", str(cells), "--json", str(rows)),
        )
        code, output = bench(*arguments)
        assert code == 0, output
        before, kept = rows.read_text(), (cells / "cells.jsonl").read_text()
        assert len(kept.splitlines()) == 1 + num_cells
        assert len(json.loads(before)["rows"]) == num_cells
        code, output = bench(*arguments)
        assert code == 0, output
        assert (rows.read_text(), (cells / "cells.jsonl").read_text()) == (before, kept)
        code, output = bench(*arguments, "--budgets", "0,4")
        assert code == 2
        assert "holds cells of another run: budgets" in output


@pytest.mark.parametrize("unmasking", ["single", "threshold"])
def test_the_clock_is_the_tables_alone(target: Path, unmasking: Unmasking) -> None:
    info = resolve_model(str(target))
    params = SamplingParams(
        max_new_tokens=20,
        unmasking=unmasking,
        threshold=0.5,
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
    requests = make_requests(info, read_questions(None, limit=3), params)
    recording = Recording(load_target(info))
    recording.record(requests)
    rows = [
        simulate(
            recording,
            RankingDrafter(),
            BODIES["h200-8b"].table(),
            requests,
            cell=SimulatedCell("h200-8b", "", 0, 2),
            budgets=(1, 3),
            num_rounds=12,
        )
        for _ in range(2)
    ]
    assert rows[0] == rows[1]
    assert set(rows[0].fixed) == {0, 1, 3}
    assert rows[0].best_ratio >= 1.0


def test_a_ratio_is_between_turns_of_one_pass() -> None:
    mean, low, high = mean_ratio([2.0, 8.0, 1.0], [1.0, 4.0, 0.5])
    assert mean == pytest.approx(2.0)
    assert low == pytest.approx(high)
    assert mean_ratio([1.0, 3.0], [1.0, 1.0])[1] < 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--budgets", "few"], "--budgets wants whole numbers or auto"),
        (["throughput", "--budgets", "-1"], "--budgets wants whole numbers or auto"),
        (["throughput", "--unmasking", "all"], "--unmasking must be single or threshold"),
        (["throughput", "--gammas", "1.5"], "--gammas wants numbers from 0.0 to 1.0"),
        (["throughput", "--gammas", "0.1", "--budgets", "0,auto"], "gammas want a fixed budget"),
        (["throughput", "--device", "gpu"], "--device must be auto, cpu, cuda, got 'gpu'"),
        (["throughput", "--passes", "1"], "--passes must be a whole number from 2"),
        (["throughput", "--plain-passes", "11"], "must be 0, or from 2 to passes, 10, got 11"),
        (["throughput", "--plain-passes", "-1"], "--plain-passes must be a whole number from 0"),
        (["throughput", "--plain-passes", "1"], "must be 0, or from 2 to passes, 10, got 1"),
        (["throughput", "--budgets", ""], "--budgets wants whole numbers or auto"),
        (["throughput", "--sequences", ""], "--sequences wants at least one number"),
        (["throughput", "--turn-seconds", "0"], "--turn-seconds must be a number above 0"),
        (["throughput", "--threads", "0"], "--threads must be a whole number from 1"),
        (["throughput", "--table", "nowhere.json"], "nowhere.json: cannot be read"),
        (["throughput", "--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["simulate", "--budgets", ""], "--budgets wants at least one number"),
        (["simulate", "--seeds", ""], "--seeds wants at least one number"),
        (["simulate", "--json", "."], "--json .: is a folder"),
        (["latency", "--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["latency", "--threads", "0"], "--threads must be a whole number from 1"),
        (["throughput", "--sequences", "a"], "--sequences wants ints by comma"),
        (["throughput", "--drafter", "none"], "nothing to compare"),
        (["simulate", "--drafter", "none"], "nothing to compare"),
        (["simulate", "--tables", "h100"], "h100 is none of h200-1.7b, h200-8b and no file"),
        (["simulate", "--rounds", "0"], "--rounds must be a whole number from 1"),
        (["simulate", "--unmasking", "all"], "--unmasking must be single or threshold"),
        (["latency", "--max-slots", "0"], "--max-slots must be a whole number from 1"),
        (["latency", "--seconds", "0"], "--seconds must be a number above 0"),
        (["latency", "--numerics", "exact"], "--numerics must be canonical or fast"),
    ],
)
def test_a_wrong_option_is_named(target: Path, arguments: list[str], message: str) -> None:
    code, output = bench(*arguments, "--model", str(target))
    assert code == 2
    assert message in output


def test_every_benchmark_reads_its_keys_from_a_file_and_options_come_first(
    target: Path, tmp_path: Path
) -> None:
    grid, rows = tmp_path / "grid.yaml", tmp_path / "rows.json"
    grid.write_text(
        f"model: {target}\ndrafter: ranking\ntables: h200-8b\nsequences: [2, 4]\nbudgets: 2\n"
        "rounds: 4\nlimit: 9\nmax_new_tokens: 12\n"
    )
    code, output = bench("simulate", str(grid), "--limit", "2", "--json", str(rows))
    assert code == 0, output
    assert "2 prompts" in output
    found = json.loads(rows.read_text())["rows"]
    assert [(row["sequences"], list(row["fixed"])) for row in found] == [
        (2, ["0", "2"]),
        (4, ["0", "2"]),
    ]


@pytest.mark.parametrize("command", ["exact", "throughput", "simulate", "occupancy", "latency"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget_s: 3", "grid.yaml: unknown key 'budget_s'; there are model, drafter,"),
        ("threads: two", "grid.yaml: threads must be a whole number from 1, got 'two'"),
        ("model: [a, b]", "grid.yaml: model must be a text, got ['a', 'b']"),
        ("- model", "grid.yaml: want keys and values"),
        ("model: {", "grid.yaml: cannot be read (while parsing"),
    ],
)
def test_a_wrong_key_of_a_file_is_one_clear_sentence(
    tmp_path: Path, command: str, text: str, message: str
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(text)
    code, output = bench(command, str(grid))
    assert code == 2
    assert message in output
    assert len(output.splitlines()) == 1


def test_help_shows_the_few_options_and_the_others_can_be_typed(target: Path) -> None:
    code, output = bench("throughput", "--help")
    assert code == 0
    assert "--budgets" in output
    assert "--turn-seconds" not in output
    code, output = bench("throughput", "--model", str(target), "--turn-seconds", "0")
    assert "--turn-seconds must be a number above 0, got 0.0" in output
