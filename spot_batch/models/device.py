"""Between host and device. What decides shapes and indices stays on the host, so that a round waits
for the device once: where it reads what was committed."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = torch.device("cpu")

GRAPH_BYTES = 2 << 30
"""What the graphs over one cache may hold of inputs, rows and KV between their replays."""


def choose_device(wanted: str) -> torch.device:
    """`auto` is a GPU where there is one; anything else is taken by its word."""
    if wanted != "auto":
        return torch.device(wanted)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device does; itself on a CPU."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """What the host decides on next: waits until the device has come so far."""
    return tensor.cpu()
