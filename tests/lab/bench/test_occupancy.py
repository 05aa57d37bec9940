"""`bench occupancy`: a job through the pool of leases, and what its tail shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import EngineSettings
from spot_batch.lab.bench.clocks import BODIES
from spot_batch.lab.bench.occupancy import mixed_lengths, run_job
from spot_batch.lab.bench.simulate import Recording, simulated_engine
from spot_batch.models.block import load_target
from spot_batch.records.sampling import Request, SamplingParams
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


def requests() -> list[Request]:
    params = SamplingParams(max_new_tokens=20, stop_at="never")
    return [
        Request(sample_id=at, prompt_ids=tuple(range(at)), noise_key=at, params=params)
        for at in range(5)
    ]


def test_lengths_are_spread_evenly_and_no_two_runs_differ() -> None:
    samples = mixed_lengths(requests(), num_samples=100, least=3, most=12)
    lengths = [each.params.max_new_tokens for each in samples]
    assert set(lengths) == set(range(3, 13))
    assert max(lengths.count(length) for length in set(lengths)) <= 12
    assert samples == mixed_lengths(requests(), num_samples=100, least=3, most=12)
    assert [each.sample_id for each in samples] == list(range(100))


@pytest.mark.parametrize("num_actors", [1, 3])
def test_slots_are_busy_until_the_tail_and_drafts_fill_it(target: Path, num_actors: int) -> None:
    recording = Recording(load_target(resolve_model(str(target))))
    recording.record(requests())
    table = BODIES["h200-8b"].table()
    samples = mixed_lengths(requests(), num_samples=120, least=3, most=20)
    runs = []
    for budget in (0, 3):
        settings = EngineSettings(max_sequences=6, budget=budget, longest_first=True)
        run = run_job(
            samples,
            lambda settings=settings: (  # type: ignore[misc]
                simulated_engine(recording, RankingDrafter(), table, settings),
                lambda: recording.clock_s,
            ),
            budget=budget,
            num_actors=num_actors,
            max_sequences=6,
        )
        runs.append(run)
        assert 0.9 < run.busy_share <= 1.0
        assert [row.in_flight for row in run.tail] == sorted(
            {row.in_flight for row in run.tail}, reverse=True
        )
        assert max(row.in_flight for row in run.tail) < 6
    free, drafted = runs
    assert all(row.drafted_slots == 0 for row in free.tail)
    assert max(row.drafted_slots for row in drafted.tail) > 0


def test_the_command_prints_the_curve_and_writes_it(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    result = CliRunner().invoke(
        app,
        [
            *("bench", "occupancy", "--model", str(target), "--drafter", "ranking", "--plot"),
            *("--samples", "30", "--sequences", "4", "--max-new-tokens", "12", "--limit", "3"),
            *("--clock", "h200-1.7b", "--json", str(path), "--out", str(tmp_path / "cells")),
        ],
    )
    assert result.exit_code == 0, result.output
    kept = (tmp_path / "cells" / "cells.jsonl").read_text()
    assert "of the slots busy until the tail" in result.output
    assert "#" in result.output
    document = json.loads(path.read_text())
    assert [run["budget"] for run in document["rows"]] == ["0", "auto"]
    assert all(run["tail"] for run in document["rows"])
    before = path.read_text()
    same = CliRunner().invoke(
        app,
        [
            *("bench", "occupancy", "--model", str(target), "--drafter", "ranking", "--plot"),
            *("--samples", "30", "--sequences", "4", "--max-new-tokens", "12", "--limit", "3"),
            *("--clock", "h200-1.7b", "--json", str(path), "--out", str(tmp_path / "cells")),
        ],
    )
    assert same.exit_code == 0, same.output
    assert "of the slots busy" not in same.output, "nothing is measured twice"
    assert path.read_text() == before
    assert (tmp_path / "cells" / "cells.jsonl").read_text() == kept
    again = CliRunner().invoke(
        app,
        [
            *("bench", "occupancy", "--model", str(target), "--drafter", "ranking"),
            *("--samples", "9", "--sequences", "4", "--max-new-tokens", "6", "--limit", "3"),
            *("--budgets", "2", "--order", "input"),
        ],
    )
    assert again.exit_code == 0, again.output
    assert "#" not in again.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "shortest"], "--order must be longest_first or input"),
        (["--samples", "0"], "--samples must be a whole number from 1"),
        (["--sequences", "0"], "--sequences must be a whole number from 1"),
        (["--actors", "0"], "--actors must be a whole number from 1"),
        (["--min-new-tokens", "40"], "min_new_tokens must be from 1 to max_new_tokens, 32, got 40"),
        (["--clock", "h100"], "h100 is none of h200-1.7b, h200-8b and no file"),
        (["--budgets", "x"], "--budgets wants whole numbers or auto"),
        (["--drafter", "none"], "nothing to compare"),
    ],
)
def test_a_wrong_option_is_named(target: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "occupancy", "--model", str(target), *arguments])
    assert result.exit_code == 2
    assert message in result.output
