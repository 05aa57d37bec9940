"""`--device`, `--random-weights` and `gpu.sh` on a tiny body; no figure is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.cli.main import app
from spot_batch.engine.latency import LatencyTable
from spot_batch.lab.bench.gpu import Device, measure_device, of_rows, of_table, slot_flops
from spot_batch.lab.bench.loading import find_models
from spot_batch.lab.bench.throughput import BASELINE, CANONICAL
from tests.families import write_checkpoint
from tests.slots import letters, seeded, slots_of
from tests.tiny_models import write_target

SCRIPT = Path(__file__).parents[3] / "spot_batch" / "lab" / "bench" / "gpu.sh"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), scale=3.0)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights."""
    folder = write_target(tmp_path_factory.mktemp("shape"))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("device", ["tpu", "cuda:1", ""])
def test_a_device_is_one_of_three(target: Path, device: str) -> None:
    with pytest.raises(ValueError, match="--device must be auto, cpu, cuda, got"):
        find_models(str(target), "ranking", device=device)


@pytest.mark.parametrize("is_there", [False, True])
def test_auto_is_a_gpu_where_there_is_one(
    target: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the {device}")
    models = find_models(str(target), "ranking")
    assert models.device.type == ("cuda" if is_there else "cpu")
    assert models.facts()["device"] == ("the cuda" if is_there else "cpu")
    assert find_models(str(target), "ranking", device="cpu").device == CPU
    if not is_there:
        with pytest.raises(ValueError, match="--device cuda: there is no CUDA device here"):
            find_models(str(target), "ranking", device="cuda")


def test_random_weights_need_a_shape_alone(shape: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    timed = ("latency", "--model", str(shape), "--max-slots", "2", "--seconds", "0.1")
    code, output = bench(*timed, "--json", str(table))
    assert code == 2
    assert "safetensors" in output
    code, output = bench(*timed, "--random-weights", "--device", "cpu", "--json", str(table))
    assert code == 0, output
    assert LatencyTable.from_json(table.read_text()).slots[0] == 1


def test_random_weights_are_the_same_every_time_and_neither_vanish_nor_explode(
    shape: Path,
) -> None:
    models = find_models(str(shape), "ranking", random_weights=True)
    ids = letters(2, models.info.block_length, seeded(0))
    slots = slots_of(ids, start=torch.zeros(2).long(), row=torch.arange(2))
    logits = []
    for _ in range(2):
        body = models.target()
        logits.append(body.head(body.forward(slots, body.allocate(2, 128)).rows))
    assert torch.equal(*logits)
    spread = logits[0][logits[0].isfinite()].std()
    assert 0.1 < spread < 10.0


def test_a_published_name_is_a_shape_and_an_unknown_one_is_not() -> None:
    models = find_models("JetLM/SDAR-8B-Chat-b32", "ranking", random_weights=True)
    assert (models.info.sizes.hidden_size, models.info.block_length) == (4096, 32)
    with pytest.raises(ValueError, match="neither a folder nor a published checkpoint"):
        find_models("nobody/nothing", "ranking", random_weights=True)


def test_products_of_a_slot_are_those_that_a_forward_runs(target: Path) -> None:
    models = find_models(str(target), "none")
    body = models.target(canonical=False)
    ids = letters(3, models.info.block_length, seeded(0))
    slots = slots_of(ids, start=torch.zeros(3).long(), row=torch.arange(3))
    cache = body.allocate(3, 128)
    with FlopCounterMode(display=False) as counter:
        body.forward(slots, cache)
    linear = sum(
        flops
        for operation, flops in counter.get_flop_counts()["Global"].items()
        if "mm" in str(operation)
    )
    assert linear == 3 * slot_flops(models.info, 0)
    sizes = models.info.sizes
    more = slot_flops(models.info, 128) - slot_flops(models.info, 0)
    # Queries by keys and weights by values, two operations each.
    heads = sizes.num_layers * sizes.num_heads * sizes.head_dim
    assert more == 4 * models.info.block_length * 128 * heads


def test_shares_are_of_what_was_measured_and_of_what_is_on_paper(target: Path) -> None:
    info = resolve_model(str(target))
    device = Device(name="one", dtype="bfloat16", products_per_s=1e9, peak_per_s=4e9)
    table = LatencyTable(
        slots=(1, 2),
        num_keys=(128,),
        forward_s=((0.5, 0.5),),
        queries=(),
        draft_s=(),
        states=(1, 2),
        visit_s=(0.5, 1.5),
        noisy_visit_s=(0.5, 1.5),
    )
    one, two = of_table(table, info, device)
    flops = slot_flops(info, 128)
    assert one["forward"]["flops_per_s"] == pytest.approx(2 * flops)
    assert one["round"]["flops_per_s"] == pytest.approx(flops)
    assert two["forward"]["share_of_products"] == pytest.approx(4 * flops / 1e9)
    assert two["round"]["share_of_peak"] == pytest.approx(flops / 4e9)
    rows = [
        {"budget": BASELINE, "sequences": 4, "slots_per_s": 10.0},
        {"budget": CANONICAL, "sequences": 4, "slots_per_s": 9.0},
    ]
    (row,) = of_rows(rows, info, device)
    assert row["sequences"] == 4
    assert row["flops_per_s"] == pytest.approx(10 * slot_flops(info, 0))


def test_no_share_is_made_up(tmp_path: Path) -> None:
    device = measure_device(CPU, torch.float32)
    assert device.products_per_s > 0
    assert device.shares(1.0)["share_of_peak"] is None
    folder = write_checkpoint(tmp_path / "moe", "sdar-moe")
    with pytest.raises(ValueError, match="dense bodies alone"):
        slot_flops(resolve_model(str(folder)), 128)


def test_the_script_names_its_options() -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), "out.json", "--speed", "9"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no option --speed; there are:" in done.stderr


@pytest.mark.slow
def test_the_script_writes_one_document_of_everything(
    target: Path, shape: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    small = {
        "device": "cpu",
        "model": target,
        "drafter": "ranking",
        "large": shape,
        "prompts": 3,
        "tokens": 8,
        "flights": 2,
        "sequences": "1,3",
        "slots": 4,
        "seconds": 0.2,
        "passes": 2,
        "turn": 0.01,
    }
    options = [text for name, value in small.items() for text in (f"--{name}", str(value))]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SCRIPT.parents[3]),
    }
    done = subprocess.run(
        ["bash", str(SCRIPT), str(out), *options], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["num_differ"] == 0
    assert {row["num_compared"] for row in found["exact"]["rows"]} == {3}
    assert {row["drafting"] for row in found["exact"]["rows"]} == {"D 8", "D 8, gamma 0.1"}
    ways = [BASELINE, CANONICAL, "8", "auto", "8, gamma 0.1"]
    assert [(row["sequences"], row["budget"]) for row in found["throughput"]["rows"]] == [
        (number, way) for number in (1, 3) for way in ways
    ]
    assert [row["sequences"] for row in found["draft_free"]] == [1, 3]
    assert found["device"].startswith("cpu")
    for name, is_random in (("latency", False), ("latency-large", True)):
        assert found[name]["random_weights"] is is_random
        assert LatencyTable.from_json(json.dumps(found[name]["table"]))
        assert all(row["forward"]["share_of_products"] > 0 for row in found[name]["draft_free"])
