"""One document of what `gpu.sh` measured, and how much of the device draft-free decoding used.

`python -m spot_batch.lab.bench.gpu FOLDER OUT`, where FOLDER holds what the benchmarks wrote.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.checkpoints.shapes import tensor_shapes
from spot_batch.engine.clock import device_clock
from spot_batch.engine.latency import LatencyTable
from spot_batch.lab.bench.loading import Models, device_name, find_models
from spot_batch.lab.bench.throughput import BASELINE
from spot_batch.models.block import dtype_on
from spot_batch.version import __version__

_PEAKS = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12}
"""Dense 16-bit products a second, by NVIDIA's data sheets; found by a part of the device's name."""

_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
_PRODUCTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a device can do: products a second of large matrices, measured; and on paper."""

    name: str
    dtype: str
    products_per_s: float
    peak_per_s: float | None

    def shares(self, flops_per_s: float) -> dict[str, float | None]:
        peak = self.peak_per_s
        return {
            "flops_per_s": flops_per_s,
            "share_of_products": flops_per_s / self.products_per_s,
            "share_of_peak": flops_per_s / peak if peak is not None else None,
        }


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """The fastest of a few products of square matrices, in a body's dtype."""
    size = _PRODUCT_SIZE[device.type]
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    clock = device_clock(device)
    taken = []
    for _ in range(_PRODUCTS + 1):
        before_s = clock()
        torch.mm(left, right)
        taken.append(clock() - before_s)
    name = device_name(device)
    on_paper = (peak for part, peak in _PEAKS.items() if part in name)
    return Device(
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        products_per_s=2 * size**3 / min(taken[1:]),
        peak_per_s=next(on_paper, None) if dtype.itemsize == 2 else None,
    )


def slot_flops(info: ModelInfo, num_keys: int) -> float:
    """Operations that a body takes for one slot that reads so many keys; the head is left out.

    Raises ValueError for mixtures of experts: of their weights a row meets a few.
    """
    sizes = info.sizes
    if sizes.experts is not None:
        raise ValueError(f"{info.name}: the share of peak is known of dense bodies alone")
    weights = sum(
        math.prod(shape)
        for shape in tensor_shapes(sizes, info.family).values()
        if len(shape) == 2 and shape[0] != sizes.vocab_size
    )
    attention = 2 * num_keys * sizes.num_heads * sizes.head_dim * sizes.num_layers
    return 2.0 * info.block_length * (weights + attention)


def of_table(table: LatencyTable, info: ModelInfo, device: Device) -> Iterator[dict[str, Any]]:
    """What draft-free rounds of so many samples use: a forward over their current states alone, and
    with the visits behind it."""
    for num_keys, row in zip(table.num_keys, table.forward_s, strict=True):
        for num_slots, forward_s in zip(table.slots, row, strict=True):
            flops = num_slots * slot_flops(info, num_keys)
            round_s = forward_s + table.visit(num_slots, 0.0)
            yield {
                "num_keys": num_keys,
                "slots": num_slots,
                "forward": device.shares(flops / forward_s),
                "round": device.shares(flops / round_s),
            }


def of_rows(
    rows: Sequence[dict[str, Any]], info: ModelInfo, device: Device
) -> Iterator[dict[str, Any]]:
    """What the fastest draft-free build used, host and head and all; attention is not counted."""
    for row in rows:
        if row["budget"] == BASELINE:
            flops_per_s = row["slots_per_s"] * slot_flops(info, 0)
            yield {"sequences": row["sequences"], **device.shares(flops_per_s)}


def merged(folder: Path, small: Models, large: Models) -> dict[str, Any]:
    """The files of a folder, side by side. Raises ValueError naming one that is none of ours."""
    read = {
        name: (folder / f"{name}.json").read_text(encoding="utf-8")
        for name in ("exact", "throughput", "latency", "latency-large")
    }
    exact, throughput = json.loads(read["exact"]), json.loads(read["throughput"])
    bodies: dict[str, Any] = {}
    devices = {}
    for name, models in (("latency", small), ("latency-large", large)):
        table = LatencyTable.from_json(read[name], name)
        dtype = dtype_on(models.device, models.info, wanted=models.dtype)
        if dtype not in devices:
            devices[dtype] = measure_device(models.device, dtype)
        bodies[name] = {
            "model": models.info.name,
            "random_weights": models.config is not None,
            "device": asdict(devices[dtype]),
            "table": asdict(table),
            "draft_free": list(of_table(table, models.info, devices[dtype])),
        }
    dtype = dtype_on(small.device, small.info, wanted=small.dtype)
    return {
        "command": "bench/gpu.sh",
        "version": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda if small.device.type == "cuda" else None,
        "device": device_name(small.device),
        "num_differ": sum(r["num_differ"] for r in exact["rows"] if r["numerics"] == "canonical"),
        "exact": exact,
        "throughput": throughput,
        "draft_free": list(of_rows(throughput["rows"], small.info, devices[dtype])),
        **bodies,
    }


def _commit() -> str | None:
    """The commit of the checkout that this runs from; None where the package is installed."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spot_batch.lab.bench.gpu", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--large", default="JetLM/SDAR-8B-Chat-b32")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    small = find_models(given.model, "none", device=given.device)
    large = find_models(given.large, "none", device=given.device, random_weights=True)
    document = merged(given.folder, small, large)
    partial = given.out.with_name(given.out.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(given.out)


if __name__ == "__main__":
    main()
