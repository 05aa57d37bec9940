"""Which dtype a target's body is loaded in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from spot_batch.checkpoints.errors import ModelError

Dtype = Literal["float32", "bfloat16", "float16"]

ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHARE_OF_WEIGHTS = 0.7
"""Float32 weights may fill so much of a device; the rest is for prefixes and the forward."""


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype, and one line for the user that says why."""

    name: Dtype
    why: str


def choose_dtype(
    wanted: str,
    *,
    device: str,
    has_bfloat16: bool,
    memory_bytes: int | None,
    num_parameters: int,
) -> DtypeChoice:
    """The dtype for a `device` type (cpu, cuda, ...).

    `auto`: float32 on a CPU; bfloat16 where the device has it; else float32 if that fits, else
    float16. `memory_bytes` is all that the device has, not what happens to be free: actors of a job
    must choose alike, since the dtype decides bits. Raises ModelError for an unknown name, and for
    weights that cannot fit.
    """
    for name in get_args(Dtype):
        if wanted == name:
            return DtypeChoice(name, "as asked for")
    if wanted != "auto":
        known = ", ".join(get_args(Dtype))
        raise ModelError(f"dtype must be auto or one of {known}, got {wanted!r}")
    if device == "cpu":
        return DtypeChoice("float32", "on a CPU")
    if has_bfloat16:
        choice = DtypeChoice("bfloat16", "the device has it")
    elif memory_bytes is None or 4 * num_parameters <= _SHARE_OF_WEIGHTS * memory_bytes:
        choice = DtypeChoice("float32", "the device has no bfloat16, and float32 weights fit")
    else:
        choice = DtypeChoice(
            "float16",
            "the device has no bfloat16, and float32 weights of "
            f"{_gb(4 * num_parameters)} leave too little of its {_gb(memory_bytes)}",
        )
    needed = ELEMENT_BYTES[choice.name] * num_parameters
    if memory_bytes is not None and needed > memory_bytes:
        raise ModelError(
            f"the weights take {_gb(needed)} in {choice.name}, the device has {_gb(memory_bytes)}"
        )
    return choice


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
