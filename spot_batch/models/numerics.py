"""What decides the last bits of an actor, and whether another actor computes the same ones."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import transformers
from torch.nn import functional

from spot_batch.checkpoints.errors import ModelError
from spot_batch.models.block import BlockTarget
from spot_batch.models.slots import SlotBatch

_PROBE_SLOTS = 7
"""A number that no tile has, so that the probe is cut into several calls."""


class NumericsMismatch(ValueError):
    """This actor's arithmetic is not that of the actor that began the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """The arithmetic of an actor. `probe` is a sha256 over the bits of a fixed forward.

    Only `probe` has to agree; the other fields say why it may not.
    """

    numerics: str
    tiles: tuple[int, ...]
    expert_tiles: tuple[int, ...]
    dtype: str
    threads: int
    device: str
    instructions: str
    torch: str
    transformers: str
    compiled: bool
    probe: str

    def require(self, first: Mapping[str, object]) -> None:
        """Raise NumericsMismatch unless the actor that began the job computes the same bits."""
        if first.get("probe") == self.probe:
            return
        mine = asdict(self)
        different = [
            f"{name} {first.get(name)!r} then, {mine[name]!r} here"
            for name in mine
            if name != "probe" and _plain(first.get(name)) != _plain(mine[name])
        ]
        raise NumericsMismatch(
            "hardware differs: the job was begun with other arithmetic "
            f"({'; '.join(different) or 'the same settings, other bits'}). "
            "Go on with it on a machine of the first kind, or begin a new one here."
        )


def measure_numerics(target: BlockTarget) -> Numerics:
    """Describe this process's arithmetic by a fixed forward through the whole target.

    Raises ModelError where that forward is not finite: no row of any job would be.
    """
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return Numerics(
        numerics="fast" if target.tiles.sizes is None else "canonical",
        tiles=target.tiles.sizes or (),
        expert_tiles=target.expert_tiles.sizes or (),
        dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        device=f"{device.type} {name}",
        instructions=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        compiled=False,
        probe=_probe(target),
    )


@torch.inference_mode()
def _probe(target: BlockTarget) -> str:
    """A chain of blocks, the last of them a drafted one and the block behind it."""
    width = target.block_length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (_PROBE_SLOTS, width), generator=generator)
    ids[-1] = target.mask_id
    index = torch.arange(_PROBE_SLOTS)
    sees = functional.pad(index[:, None], (0, 1), value=-1)
    sees[-1] = index[-2:]
    slots = SlotBatch(
        ids,
        index * width,
        torch.zeros_like(index),
        sees,
        index < _PROBE_SLOTS - 2,
        index == _PROBE_SLOTS - 2,
    )
    hidden = target.forward(slots, target.allocate(1, _PROBE_SLOTS * width))
    logits = target.head(hidden.rows)
    if not bool(hidden.rows.isfinite().all() & logits.amax(dim=2).isfinite().all()):
        dtype = str(target.dtype).removeprefix("torch.")
        wider = "" if target.dtype == torch.float32 else "; model.target.dtype must be wider"
        raise ModelError(f"the target's forward is not finite in {dtype}: it overflows{wider}")
    digest = hashlib.sha256()
    for tensor in (hidden.rows.float(), logits):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
