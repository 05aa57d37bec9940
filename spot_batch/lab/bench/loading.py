"""The models of a benchmark, named once and loaded where cells are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.hub import find_folder
from spot_batch.checkpoints.json_files import read_json
from spot_batch.checkpoints.published import published
from spot_batch.checkpoints.registry import (
    ModelInfo,
    describe_folder,
    describe_published,
    resolve_model,
)
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.order import card_file, weights_file
from spot_batch.drafters.registry import DrafterChoice, choose_drafter, load_drafter
from spot_batch.lab.bench.cells import digest_of_files
from spot_batch.models.block import BlockTarget, load_target, random_target
from spot_batch.models.device import CPU, choose_device

_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """A target and a drafter of a benchmark, as the command line names them.

    `config`: of a body with random weights, instead of stored ones.
    """

    info: ModelInfo
    choice: DrafterChoice
    dtype: str = "auto"
    threads: int = 1
    device: torch.device = CPU
    config: Mapping[str, Any] | None = None

    def target(self, *, canonical: bool = True) -> BlockTarget:
        """Loads the target, and sets the process' CPU threads."""
        torch.set_num_threads(self.threads)
        if self.config is not None:
            return random_target(
                self.info, self.config, dtype=self.dtype, device=self.device, canonical=canonical
            )
        return load_target(self.info, dtype=self.dtype, device=self.device, canonical=canonical)

    def drafter(self) -> Drafter | None:
        """Loads the drafter; None for `none`."""
        return load_drafter(self.choice, block_length=self.info.block_length, device=self.device)

    def some_drafter(self) -> Drafter:
        """Loads the drafter. Raises ValueError for `none`."""
        drafter = self.drafter()
        if drafter is None:
            raise ValueError("--drafter none drafts nothing; there is nothing to compare")
        return drafter

    def facts(self) -> dict[str, object]:
        """The facts about them that decide a figure."""
        from spot_batch.version import __version__

        path = self.choice.path
        files = (weights_file(path), card_file(path)) if path is not None else ()
        return {
            "version": __version__,
            "model": self.info.identity(),
            "dtype": self.dtype,
            "device": device_name(self.device) if self.device.type == "cuda" else "cpu",
            "drafter": self.choice.name,
            "drafter_files": digest_of_files(*files) if files else None,
            "threads": self.threads,
        }


def find_models(
    model: str,
    drafter: str,
    *,
    dtype: str = "auto",
    threads: int = 1,
    device: str = "auto",
    random_weights: bool = False,
) -> Models:
    """Looks both up without loading a weight. Raises ValueError naming what is not there.

    `random_weights`: a published name or a folder gives the shape alone; nothing is downloaded.
    """
    if device not in _DEVICES:
        raise ValueError(f"--device must be {', '.join(_DEVICES)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here")
    info, config = _shape(model) if random_weights else (resolve_model(model), None)
    return Models(
        info=info,
        choice=choose_drafter(drafter, info),
        dtype=dtype,
        threads=threads,
        device=choose_device(device),
        config=config,
    )


def _shape(model: str) -> tuple[ModelInfo, Mapping[str, Any]]:
    """What is known of a model without its weights, and its config.json."""
    entry = published(model)
    if entry is not None:
        return describe_published(entry), entry.config
    path = find_folder(model)
    if path is None:
        raise ModelError(f"{model}: neither a folder nor a published checkpoint that is known")
    return describe_folder(model, path), read_json(path / "config.json")


def device_name(device: torch.device) -> str:
    """The name of the device that figures are measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"
