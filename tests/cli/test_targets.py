"""`targets list` and `targets check`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spot_batch.checkpoints.published import published_names
from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.cli.targets import size
from spot_batch.job.reading import load_spec
from tests.families import write_checkpoint

JOBS = Path(__file__).parent.parent.parent / "jobs"


class Done:
    """A command that ended."""

    def __init__(self, arguments: list[object]) -> None:
        result = CliRunner().invoke(app, list(map(str, arguments)))
        self.code, self.shown, self.wrong = result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "SDAR-tiny-Chat-b8", "sdar-moe", num_shards=2)


def test_the_list_names_families_checkpoints_and_who_is_refused() -> None:
    done = Done(["targets", "list"])
    assert done.code == 0, done.wrong
    for name in published_names():
        assert name in done.shown
    assert "DiffusionGemmaForBlockDiffusion starts from random tokens" in done.shown
    assert "  bundled " in done.shown
    assert "3.33M parameters" in done.shown
    document = json.loads(Done(["targets", "list", "--json"]).shown)
    assert [each["name"] for each in document["packaged"]] == ["bundled", "bundled-b16"]
    assert [each["name"] for each in document["families"]] == ["sdar", "sdar-moe", "llada2"]
    assert [each["name"] for each in document["published"]] == published_names()


def test_a_published_name_is_checked_by_the_table_which_is_said() -> None:
    done = Done(["targets", "check", "JetLM/SDAR-8B-Chat-b32"])
    assert done.code == 0, done.wrong
    for line in (
        "from the table of published checkpoints: no files of it are here",
        "sdar (SDARForCausalLM); exact for its family",
        "block length   32",
        "mask id        151669",
        "stop ids       151643, 151645",
        "267 of 151,936 ids",
        "temperature 0.6, top_p 0.95, top_k 20",
        "8,190,735,360 parameters in 399 tensors, 16.38 GB",
        "147,456 bytes a token",
        "for 32 sequences of 4,096 positions",
    ):
        assert line in done.shown
    unsure = Done(["targets", "check", "inclusionAI/LLaDA2.0-mini"])
    assert "not sure: the repository's own config.json could not be read" in unsure.shown


def test_a_folder_is_checked_by_its_files(folder: Path) -> None:
    done = Done(["targets", "check", folder, "--sequences", "4", "--max-context", "256"])
    assert done.code == 0, done.wrong
    assert f"from {folder}" in done.shown.replace("\n", "")
    assert "of F32 in 2 files, whole and as the config says" in done.shown
    assert "for 4 sequences of 256 positions" in done.shown
    assert "ranking: no order drafter of block length 8 is at hand" in done.shown
    document = json.loads(Done(["targets", "check", folder, "--json"]).shown)
    info = resolve_model(str(folder))
    assert document["weight_hash"] == info.weight_hash
    assert document["family"] == "sdar-moe"
    assert document["weights"]["stored"].keys() == {"F32"}
    memory = document["memory"]
    assert memory["total"] == sum(
        memory[part] for part in ("weights", "head", "prefixes", "working_set")
    )


def test_a_folder_without_weights_is_checked_by_its_config_alone(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    done = Done(["targets", "check", folder])
    assert done.code == 0, done.wrong
    assert "by the config; no files of them are here" in done.shown


def test_overrides_are_taken_and_disagreement_is_shown(folder: Path) -> None:
    done = Done(["targets", "check", folder, "--block-length", "16", "--mask-id", "261"])
    assert done.code == 0, done.wrong
    assert "block length   16" in done.shown
    assert "warning: " in done.shown
    assert "block length 16 of the spec is taken; config.json says 8" in done.shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./nowhere"], "no such folder"),
        (["{folder}", "--dtype", "int8"], "dtype must be auto or one of"),
        (["{folder}", "--sequences", "0"], "sequences must be at least 1, got 0"),
        (["{folder}", "--max-context", "2000"], "its context is 1,024 positions, got 2,000"),
        (["{folder}", "--mask-id", "9999"], "mask id 9999 is outside the vocabulary"),
        (["{folder}", "--revision", "v1"], "a folder has no revisions"),
    ],
)
def test_what_cannot_be_is_one_line(folder: Path, arguments: list[str], message: str) -> None:
    done = Done(["targets", "check", *(each.format(folder=folder) for each in arguments)])
    assert done.code == 2
    assert message in done.wrong
    assert done.wrong.count("\n") == 1


def test_a_network_that_could_not_be_loaded_is_told_by_its_field(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine", "llada2", score_function="softmax")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?"}\n')
    for command in (["targets", "check", folder], ["validate", "-i", rows, "--model", folder]):
        done = Done(command)
        assert done.code == 2
        assert "config.json: score_function 'softmax' is not supported" in done.wrong


def test_messages_want_a_chat_template_that_can_be_read(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "2 + 2?"}]}\n')
    command = ["submit", "-i", rows, "--model", folder, "-o", tmp_path / "out"]
    (folder / "chat_template.jinja").write_text("{% for x in %}")
    broken = Done(command)
    assert broken.code == 2
    assert "the target's chat template cannot be read: line 1: " in broken.wrong
    (folder / "chat_template.jinja").unlink()
    missing = Done(command)
    assert missing.code == 2
    assert "column 'messages' needs a chat template; the target's tokenizer has none" in (
        missing.wrong
    )


def test_missing_shards_are_told_by_check_and_by_validate(folder: Path, tmp_path: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?"}\n')
    for command in (["targets", "check", folder], ["validate", "-i", rows, "--model", folder]):
        done = Done(command)
        assert done.code == 2
        assert "1 of 2 weight files are missing, the first: model-00002-of-00002" in done.wrong


def test_validate_warns_once_and_says_what_it_took_from_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [258, 256]}'
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?"}\n')
    arguments = ["validate", "-i", rows, "--model", folder]
    arguments += ["--set", "model.target.block_length=16", "--set", "generation.top_k=5"]
    done = Done(arguments)
    assert done.code == 0, done.wrong
    assert done.wrong.count("warning: ") == 1
    assert "block length 16 of the spec is taken; config.json says 8" in done.wrong
    assert "temperature 0.6, top_p 0.95, top_k 5 (temperature, top_p of the checkpoint)" in (
        done.shown
    )
    document = json.loads(Done([*arguments, "--json"]).shown)
    assert len(document["warnings"]) == 1


@pytest.mark.parametrize(
    ("family", "threshold", "whose"),
    [
        ("sdar", 0.85, "the sdar family's"),
        ("sdar-moe", 0.85, "the sdar-moe family's"),
        ("llada2", 0.95, "the llada2 family's"),
        ("bundled", 0.9, "the bundled targets'"),
    ],
)
def test_an_open_threshold_is_the_familys_and_a_given_one_is_kept(
    tmp_path: Path, family: str, threshold: float, whose: str
) -> None:
    bundled = family == "bundled"
    model = "bundled" if bundled else write_checkpoint(tmp_path / "tiny", family)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?"}\n')
    arguments = ["validate", "-i", rows, "--model", model]
    arguments += ["--set", "generation.unmasking=threshold"]
    done = Done(arguments)
    assert f"threshold: all tokens above {threshold:g}, {whose}" in done.shown, done.wrong
    document = json.loads(Done([*arguments, "--json"]).shown)
    assert document["spec"]["generation"]["threshold"] == threshold
    given = Done([*arguments, "--set", "generation.threshold=0.7"])
    assert "threshold: all tokens above 0.7, the spec's" in given.shown
    checked = json.loads(Done(["targets", "check", model, "--json"]).shown)
    assert checked["threshold"] == threshold


@pytest.mark.parametrize(
    ("spec", "family"), [("sdar-8b-gsm8k", "sdar"), ("llada2-mini-humaneval", "llada2")]
)
def test_a_packaged_job_runs_on_a_tiny_checkpoint_of_its_family(
    tmp_path: Path, spec: str, family: str
) -> None:
    """As far as the first prompt: `-i` and `--model` are all that has to be given."""
    target = load_spec(JOBS / f"{spec}.yaml").model.target.path
    assert target in published_names()
    model = write_checkpoint(tmp_path / "tiny", family, block_size=32)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2 + 2?", "prompt": "def add(a, b):", "task_id": "HumanEval/0"}')
    done = Done(["validate", spec, "-i", rows, "--model", model])
    assert done.code == 0, done.wrong
    assert "first prompt, " in done.shown


def test_sizes_are_in_a_unit_that_fits() -> None:
    assert [size(number) for number in (7, 1_500, 2_000_000, 16_381_470_720)] == [
        "7 bytes",
        "1.5 kB",
        "2.0 MB",
        "16.38 GB",
    ]
