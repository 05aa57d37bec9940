"""Which drafter a job gets. `auto` always finds one, and says which and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spot_batch.drafters.base import Drafter
from spot_batch.drafters.order import load_order, read_card
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.targets.registry import ModelInfo

_ASSETS = Path(__file__).parent.parent / "assets" / "drafters"


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter before it is loaded. `path` is without suffix; `why` is one line for the user."""

    kind: str
    path: Path | None
    why: str

    @property
    def name(self) -> str:
        return self.path.stem if self.path is not None else self.kind


def choose_drafter(wanted: str, info: ModelInfo) -> DrafterChoice:
    """`auto`, `none`, `ranking` or the path of an order drafter -> what will be used.

    `auto`: the one trained for this target's weights, else an order drafter of its block length,
    else noise-aware ranking. Raises ValueError for a path that is no drafter of this block length.
    """
    if wanted in ("none", "ranking"):
        return DrafterChoice(wanted, None, "as asked for")
    if wanted != "auto":
        path = Path(wanted).expanduser()
        path = path.with_suffix("") if path.suffix in (".safetensors", ".json") else path
        load_order(path, block_length=info.block_length, device=torch.device("cpu"))
        return DrafterChoice("order", path, "as asked for")
    fitting = []
    for file in sorted(_ASSETS.glob("*.json")):
        card = read_card(file)
        if card["config"]["block_length"] == info.block_length:
            if card.get("target_weights") == info.weight_hash:
                return DrafterChoice("order", file.with_suffix(""), "trained for this target")
            fitting.append(file.with_suffix(""))
    if fitting:
        why = f"trained on another target of block length {info.block_length}; speed may be less"
        return DrafterChoice("order", fitting[0], why)
    why = f"no order drafter of block length {info.block_length} is at hand"
    return DrafterChoice("ranking", None, why)


def packaged_drafters() -> list[dict[str, Any]]:
    """The cards of the drafters that come with the package, by name."""
    return [read_card(file) for file in sorted(_ASSETS.glob("*.json"))]


def load_drafter(
    choice: DrafterChoice, *, block_length: int, device: str | torch.device = "cpu"
) -> Drafter | None:
    """The drafter itself; None for draft-free decoding."""
    if choice.kind == "none":
        return None
    if choice.kind == "ranking":
        return RankingDrafter()
    assert choice.path is not None
    return load_order(choice.path, block_length=block_length, device=torch.device(device))
