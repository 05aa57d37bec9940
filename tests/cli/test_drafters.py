"""`train drafter`, `calibrate` and `drafters`, in one process and without ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped, unused-ignore]
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.drafters import registry
from spot_batch.drafters.order import OrderConfig, OrderModel, read_card, save_order
from spot_batch.drafters.registry import choose_drafter
from tests.learning.recorded import WIDTH, record
from tests.tiny_models import write_target

SMALL = ["--num-layers", "1", "--hidden-size", "32", "--num-heads", "2"]


class Done:
    """What a command did, its output and complaints apart."""

    def __init__(self, arguments: Sequence[str | Path]) -> None:
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        self.code, self.shown, self.wrong = result.exit_code, result.stdout, result.stderr

    @property
    def document(self) -> Any:
        assert self.code == 0, self.shown + self.wrong
        return json.loads(self.shown)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), block_length=WIDTH, scale=3.0)


@pytest.fixture(scope="module")
def recorded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("job"), target, num_rows=16)


@pytest.fixture(scope="module")
def trained(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of 100 steps, its path without suffix."""
    path = tmp_path_factory.mktemp("drafter") / "small"
    steps = ["--steps", "100", "--batch", "64", "--learning-rate", "3e-3", "--held-out", "0.4"]
    done = Done(["train", "drafter", recorded, "-o", path, *SMALL, *steps])
    assert done.code == 0, done.wrong
    assert "| depth | queries | next commit | stale confidence |" in done.shown
    assert "| temperature | depth |" in done.shown
    assert "| masks left |" in done.shown
    return path


def theirs_and_map(trained: Path, folder: Path) -> tuple[Path, Path]:
    """The trained drafter under somebody else's names, and the map back."""
    tensors = load_file(trained.with_name("small.safetensors"))
    their = {"model": {f"net.{name}": tensor for name, tensor in tensors.items()}}
    torch.save(their, folder / "spot.pt")
    config = {key: read_card(trained)["config"][key] for key in ("block_length", "num_layers")}
    tree = {
        "config": {**config, "hidden_size": 32, "num_heads": 2},
        "tensors": {name: f"model.net.{name}" for name in tensors},
    }
    (folder / "map.yaml").write_text(yaml.safe_dump(tree))
    return folder / "spot.pt", folder / "map.yaml"


def test_a_trained_drafter_is_one_that_a_job_of_its_target_takes(
    trained: Path, target: Path
) -> None:
    card = read_card(trained)
    assert card["name"] == "small"
    assert {row["temperature"] for row in card["held_out"]["by_temperature"]} <= {0, 0.5, 1, 1.5}
    choice = choose_drafter(str(trained), resolve_model(str(target)))
    assert choice.path == trained


def test_train_drafter_prints_the_figures_of_its_card_as_json(
    recorded: Path, tmp_path: Path
) -> None:
    path = tmp_path / "sdar-1.7b"
    steps = ["--steps", "1", "--batch", "8", "--json"]
    document = Done(["train", "drafter", recorded, "-o", path, *SMALL, *steps]).document
    assert document["figures"] == read_card(path)["held_out"]
    assert (tmp_path / "sdar-1.7b.safetensors").exists()


@pytest.mark.parametrize(
    "command", [["train", "drafter"], ["calibrate", "masses", "--drafter", "bundled-b32"]]
)
def test_what_holds_no_trajectories_is_refused_at_once(
    command: list[str], target: Path, tmp_path: Path
) -> None:
    output = ["-o", tmp_path / "out"]
    nowhere = Done([*command, tmp_path / "nowhere", *output])
    assert (nowhere.code, "is not a job directory" in nowhere.wrong) == (2, True)
    plain = record(tmp_path, target, num_rows=2, overrides={"output.include": ["token_ids"]})
    done = Done([*command, plain, *output])
    assert (done.code, "record them with output.include: trajectory" in done.wrong) == (2, True)
    (plain / "_SUCCESS").unlink()
    done = Done([*command, plain, *output])
    assert (done.code, "resume it first" in done.wrong) == (2, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["calibrate", "masses", "x", "--drafter", "bundled"], "bundled: no drafter: there is no"),
        (["calibrate", "masses", "x", "--drafter", "bundled"], "bundled-b16, bundled-b32"),
        (["calibrate", "masses", "x", "--drafter", "bundled-b32", "-o", "{file}/x"], "no folder"),
        (["calibrate", "spiffy", "x", "-o", "."], "--output .: is a folder"),
        (["calibrate", "spiffy", "x", "-o", "y", "--budgets", ""], "at least one number"),
        (["calibrate", "spiffy", "x", "-o", "y", "--budgets", "0"], "whole numbers from 1, got 0"),
        (["train", "drafter", "x", "-o", "{file}/x"], "there is no folder"),
        (["train", "drafter", "x", "-o", "y", "--threads", "0"], "value for '--threads'"),
        (["train", "corpus", "nowhere/x.jsonl"], "there is no folder nowhere"),
        (["train", "corpus", "{file}", "--temperatures", ""], "at least one number"),
        (["train", "corpus", "{file}", "--count", "0"], "Invalid value for '--count'"),
        (["train", "target", "{file}"], "is no folder"),
        (["train", "target", "x", "--export", "y", "--gsm8k", "nowhere"], "nowhere: cannot be"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(
    command: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = Done([each.format(file=file) for each in command])
    assert done.code == 2, done.wrong
    assert message in done.wrong


def test_calibrating_changes_the_card_alone(recorded: Path, trained: Path, tmp_path: Path) -> None:
    card = {**read_card(trained), "calibration": None}
    tensors = load_file(trained.with_name("small.safetensors"))
    path = tmp_path / "mine"
    save_file(tensors, tmp_path / "mine.safetensors")
    (tmp_path / "mine.json").write_text(json.dumps(card))
    before = (tmp_path / "mine.safetensors").read_bytes()
    done = Done(["calibrate", "masses", recorded, "--drafter", path])
    assert done.code == 0, done.wrong
    assert "| masses of | how many | error before % | after % | by chance % |" in done.shown
    assert "warning" not in done.wrong
    assert (tmp_path / "mine.safetensors").read_bytes() == before
    after = read_card(path)
    assert set(after["calibration"]) == {"order", "agreement", "offset"}
    assert after["calibrated"]["jobs"] == card["jobs"]
    share = after["calibrated"]["num_states"] / card["num_states"]
    assert share < 0.8, "states that it learned from serve the fit"
    assert after["held_out"] == card["held_out"]


def test_a_calibrated_copy_leaves_the_drafter_as_it_was(
    recorded: Path, trained: Path, tmp_path: Path
) -> None:
    before = trained.with_name("small.json").read_bytes()
    command = ["calibrate", "masses", recorded, "--drafter", trained, "-o", tmp_path / "copy"]
    document = Done([*command, "--json"]).document
    assert trained.with_name("small.json").read_bytes() == before
    card = read_card(tmp_path / "copy")
    assert card["name"] == "copy"
    assert card["calibration"] == document["calibration"]
    assert (tmp_path / "copy.safetensors").exists()


def test_a_drafter_of_another_block_length_is_refused(recorded: Path, tmp_path: Path) -> None:
    done = Done(["calibrate", "masses", recorded, "--drafter", "bundled-b32", "-o", tmp_path / "x"])
    assert done.code == 2
    assert "the drafter is for block length 32, the target's is 8" in done.wrong
    assert not list(tmp_path.iterdir())


def test_a_drafter_made_for_another_target_is_calibrated_with_a_warning(
    recorded: Path, tmp_path: Path
) -> None:
    config = OrderConfig(block_length=WIDTH, num_layers=1, hidden_size=16, num_heads=2)
    card = {"name": "other", "target": "else", "target_weights": "x"}
    save_order(OrderModel(config), tmp_path / "other", card)
    done = Done(["calibrate", "masses", recorded, "--drafter", tmp_path / "other"])
    assert done.code == 0, done.wrong
    assert "warning: the drafter was made for else, these are trajectories of target" in done.wrong


def test_a_truncated_drafter_is_refused(recorded: Path, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(json.dumps(read_card(trained)))
    data = trained.with_name("small.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-40])
    done = Done(["calibrate", "masses", recorded, "--drafter", tmp_path / "cut"])
    assert (done.code, "cut.safetensors: not a drafter" in done.wrong) == (2, True)


def test_a_file_is_taken_over_when_it_guesses_better_than_stale_confidence(
    recorded: Path, trained: Path, target: Path, tmp_path: Path
) -> None:
    their, plan = theirs_and_map(trained, tmp_path)
    command = ["drafters", "import", their, "--map", plan, "--jobs", recorded]
    done = Done([*command, "-o", tmp_path / "mine", "--min-accuracy", "0.1"])
    assert done.code == 0, done.wrong
    assert "| depth |" in done.shown
    card = read_card(tmp_path / "mine")
    assert card["imported_from"] == "spot.pt"
    assert card["held_out"]["overall"]["next_commit"] > 0.1
    ours, own = (
        load_file(path)
        for path in (tmp_path / "mine.safetensors", trained.with_name("small.safetensors"))
    )
    assert all(torch.equal(ours[name], own[name]) for name in own)
    info = resolve_model(str(target))
    assert choose_drafter(str(tmp_path / "mine.safetensors"), info).name == "mine"


def test_a_file_that_guesses_badly_is_not_taken_over_and_the_figures_are_shown(
    recorded: Path, trained: Path, tmp_path: Path
) -> None:
    their, plan = theirs_and_map(trained, tmp_path)
    tree = yaml.safe_load(plan.read_text())
    tree["tensors"]["head.weight"] = {"from": "model.net.head.weight", "scale": -1}
    plan.write_text(yaml.safe_dump(tree))
    command = ["drafters", "import", their, "--map", plan, "--jobs", recorded]
    done = Done([*command, "-o", tmp_path / "mine"])
    assert done.code == 2
    assert "not taken over: next-commit accuracy 0." in done.wrong
    assert "that of stale confidence" in done.wrong
    assert "| depth |" in done.wrong
    assert not (tmp_path / "mine.json").exists()
    again = Done([*command, "-o", tmp_path / "mine", "--json"])
    assert again.shown == ""
    document = json.loads(again.wrong.splitlines()[0])
    assert document["accepted"] is False
    assert document["min_accuracy"] == document["figures"]["overall"]["stale_confidence"]


def test_a_map_for_another_block_length_than_the_jobs_is_refused(
    recorded: Path, tmp_path: Path
) -> None:
    config = OrderConfig(block_length=4, num_layers=1, hidden_size=16, num_heads=2)
    save_order(OrderModel(config), tmp_path / "four", {})
    their = tmp_path / "four.safetensors"
    assert Done(["drafters", "inspect", their, "--write-map", tmp_path / "map.yaml"]).code == 0
    command = ["drafters", "import", their, "--map", tmp_path / "map.yaml", "--jobs", recorded]
    done = Done([*command, "-o", tmp_path / "mine"])
    assert done.code == 2
    assert "of block length 8, the map's is 4" in done.wrong


def test_inspect_names_every_tensor_and_lets_none_speak_to_the_terminal(tmp_path: Path) -> None:
    tensors = {"a\x1b[31m\nb": torch.zeros(2, 3), "c": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"note\x07": "x\u202ey\nz"})
    done = Done(["drafters", "inspect", tmp_path / "x.safetensors"])
    assert done.code == 0, done.wrong
    assert "a\\x1b[31m\\nb" in done.shown
    assert "bfloat16" in done.shown
    assert "2 of 10 parameters" in done.shown
    assert "note\\x07: x\\u202ey\\nz" in done.shown
    assert not set("\x1b\x07\u202e") & set(done.shown)
    document = Done(["drafters", "inspect", tmp_path / "x.safetensors", "--json"]).document
    assert document["kind"] == "unknown"
    shapes = {each["name"]: each["shape"] for each in document["tensors"]}
    assert shapes == {name: list(tensor.shape) for name, tensor in tensors.items()}


def test_inspect_says_of_our_own_that_it_loads(trained: Path) -> None:
    done = Done(["drafters", "inspect", trained.with_name("small.safetensors")])
    assert "loads as it is  yes" in done.shown
    assert "block length    8" in done.shown


def test_inspect_refuses_a_file_beyond_max_bytes(trained: Path) -> None:
    path = trained.with_name("small.safetensors")
    done = Done(["drafters", "inspect", path, "--max-bytes", "100"])
    assert (done.code, "more than the 100 of --max-bytes" in done.wrong) == (2, True)


def test_a_starter_map_is_never_written_over_another(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("hours of work")
    path = trained.with_name("small.safetensors")
    done = Done(["drafters", "inspect", path, "--write-map", tmp_path / "map.yaml"])
    assert done.code == 2
    assert (tmp_path / "map.yaml").read_text() == "hours of work"


def test_the_list_says_how_large_a_drafter_is_and_how_it_does(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setattr(registry, "_ASSETS", shelf)
    for suffix in (".json", ".safetensors"):
        source = trained.with_name("small" + suffix)
        (shelf / source.name).write_bytes(source.read_bytes())
    save_order(OrderModel(OrderConfig(block_length=4)), shelf / "bare", {"name": "bare"})
    done = Done(["drafters", "list"])
    bare, small = done.shown.splitlines()
    assert "no held-out figures" in bare
    accuracy = read_card(trained)["held_out"]["by_depth"][0]["next_commit"]
    assert f"next commit {accuracy:.3f} at depth 1" in small
    document = Done(["drafters", "list", "--json"]).document
    assert document[1]["num_parameters"] == read_card(trained)["num_parameters"]
    assert document[1]["config"]["block_length"] == WIDTH
