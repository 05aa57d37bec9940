"""What the networks of all families have in common, and where published tensors go in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spot_batch.checkpoints.shapes import Sizes

HEAD = "lm_head.weight"


class Network(nn.Module):
    """A body and the head above it, in float32; named as published checkpoints name them.

    Every family's body is called as transformers' own are, with `slot_attention` besides: its
    `last_hidden_state` is (1, N, d) for (1, N) `input_ids` and `position_ids`.
    """

    def __init__(self, model: nn.Module, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.model = model
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False, dtype=torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A family's network, without memory until `materialise`.

    `rotary` makes the one part whose numbers stand in no checkpoint. `embedding` is the published
    name of the tensor that a tied head copies.
    """

    network: Network
    sizes: Sizes
    rotary: Callable[[], nn.Module]
    embedding: str

    def materialise(self, device: torch.device) -> None:
        """Give the network memory. What is in it is junk until it has been copied to its place."""
        self.network.to_empty(device=device).requires_grad_(False).eval()
        with torch.device(device):
            self.network.model.rotary_emb = self.rotary()

    def published(self) -> dict[str, Tensor]:
        """The tensors of a published checkpoint by name: views of the network's."""
        return dict(_published(self._tensors()))

    def stacked(self) -> dict[str, Tensor]:
        """More names: all experts of a layer in one tensor, as other programs store them."""
        return dict(_stacked(self._tensors()))

    def tie_head(self) -> None:
        """Make the head a copy of the embedding."""
        self.network.lm_head.weight.copy_(self._tensors()[self.embedding])

    def _tensors(self) -> dict[str, Tensor]:
        tensors = dict(self.network.state_dict())
        if self.sizes.is_tied:
            del tensors[HEAD]
        return tensors


@contextmanager
def without_memory(dtype: torch.dtype) -> Iterator[None]:
    """Modules made in here are on the meta device, of this dtype where they name no other."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def _published(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Experts apart, and routers by the name of what holds their linear."""
    for name, tensor in tensors.items():
        if name.endswith((_GATE_UP, _DOWN)):
            at = name.rpartition(".")[0]
            for part, stack in _parts(name, tensor):
                for expert, weight in enumerate(stack):
                    yield f"{at}.{expert}.{part}.weight", weight
        else:
            yield name.replace(".gate.proj.", ".gate."), tensor


def _stacked(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if name.endswith((_GATE_UP, _DOWN)):
            at = name.rpartition(".")[0]
            for stored, stack in (
                (name, tensor),
                *((f"{at}.{part}", stack) for part, stack in _parts(name, tensor)),
            ):
                yield stored, stack
                yield f"{stored}.weight", stack


def _parts(name: str, tensor: Tensor) -> tuple[tuple[str, Tensor], ...]:
    """(E, rows, columns) views of a stack, by what they are."""
    if name.endswith(_DOWN):
        return (("down_proj", tensor),)
    gate, up = tensor.chunk(2, dim=1)
    return (("gate_proj", gate), ("up_proj", up))
