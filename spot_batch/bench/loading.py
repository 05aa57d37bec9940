"""The models of a benchmark, named once and loaded where cells are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spot_batch.bench.cells import digest_of_files
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.order import card_file, weights_file
from spot_batch.drafters.registry import DrafterChoice, choose_drafter, load_drafter
from spot_batch.targets.block import BlockTarget, load_target
from spot_batch.targets.registry import ModelInfo, resolve_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """A target and a drafter of a benchmark, as the command line names them."""

    info: ModelInfo
    choice: DrafterChoice
    dtype: str = "auto"
    threads: int = 1

    def target(self, *, canonical: bool = True) -> BlockTarget:
        """Loads the target, and sets the process' CPU threads."""
        torch.set_num_threads(self.threads)
        return load_target(self.info, dtype=self.dtype, canonical=canonical)

    def drafter(self) -> Drafter | None:
        """Loads the drafter; None for `none`."""
        return load_drafter(self.choice, block_length=self.info.block_length)

    def some_drafter(self) -> Drafter:
        """Loads the drafter. Raises ValueError for `none`."""
        drafter = self.drafter()
        if drafter is None:
            raise ValueError("--drafter none drafts nothing; there is nothing to compare")
        return drafter

    def facts(self) -> dict[str, object]:
        """What of them decides a figure."""
        from spot_batch import __version__

        path = self.choice.path
        files = (weights_file(path), card_file(path)) if path is not None else ()
        return {
            "version": __version__,
            "model": self.info.identity(),
            "dtype": self.dtype,
            "drafter": self.choice.name,
            "drafter_files": digest_of_files(*files) if files else None,
            "threads": self.threads,
        }


def find_models(model: str, drafter: str, *, dtype: str = "auto", threads: int = 1) -> Models:
    """Looks both up without loading a weight. Raises ValueError naming what is not there."""
    info = resolve_model(model)
    return Models(info=info, choice=choose_drafter(drafter, info), dtype=dtype, threads=threads)
