"""Which drafter a job gets. `auto` always finds one, and says which and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.order import (
    bare_path,
    card_file,
    load_order,
    read_card,
    stored_shapes,
    weights_file,
)
from spot_batch.drafters.ranking import RankingDrafter

_ASSETS = Path(__file__).parent.parent / "assets" / "drafters"


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter before it is loaded. `path` is without suffix; `why` is one line for the user."""

    kind: str
    path: Path | None
    why: str

    @property
    def name(self) -> str:
        return self.path.name if self.path is not None else self.kind


def choose_drafter(wanted: str, info: ModelInfo) -> DrafterChoice:
    """`auto`, `none`, `ranking` or the path of an order drafter -> what will be used.

    `auto`: the one trained for this target's weights, else an order drafter of its block length,
    else noise-aware ranking. Raises ValueError for a path that is no drafter of this block length.
    """
    if wanted in ("none", "ranking"):
        return DrafterChoice(wanted, None, "as asked for")
    if wanted != "auto":
        path = bare_path(Path(wanted).expanduser())
        load_order(path, block_length=info.block_length, device=torch.device("cpu"))
        return DrafterChoice("order", path, "as asked for")
    fitting = []
    for path in _packaged():
        card = read_card(path)
        if card["config"].get("block_length") == info.block_length:
            if card.get("target_weights") == info.weight_hash:
                return DrafterChoice("order", path, "trained for this target")
            fitting.append(path)
    if fitting:
        why = f"trained on another target of block length {info.block_length}; speed may be less"
        return DrafterChoice("order", fitting[0], why)
    why = f"no order drafter of block length {info.block_length} is at hand"
    return DrafterChoice("ranking", None, why)


def find_drafter(wanted: str) -> Path:
    """The path, without suffix, of an order drafter by path or by its packaged name.

    Raises ValueError naming the packaged ones where it is neither.
    """
    path = bare_path(Path(wanted).expanduser())
    packaged = {each.name: each for each in _packaged()}
    if card_file(path).exists() or weights_file(path).exists():
        return path
    if wanted not in packaged:
        raise ValueError(
            f"{wanted}: no drafter: there is no file {card_file(path)}, and the packaged ones are "
            f"{', '.join(packaged)}"
        )
    return packaged[wanted]


@dataclass(frozen=True, slots=True)
class PackagedDrafter:
    """A drafter that comes with the package, without its tensors."""

    path: Path
    card: dict[str, Any]
    num_parameters: int


def packaged_drafters() -> list[PackagedDrafter]:
    """The drafters that come with the package, by name."""
    return [
        PackagedDrafter(
            path, read_card(path), sum(map(math.prod, stored_shapes(weights_file(path)).values()))
        )
        for path in _packaged()
    ]


def _packaged() -> list[Path]:
    return [bare_path(file) for file in sorted(_ASSETS.glob("*.json"))]


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
