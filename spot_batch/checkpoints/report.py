"""What is known of a target without loading a weight, and the memory that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spot_batch.checkpoints.dtypes import ELEMENT_BYTES, Dtype, choose_dtype
from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.hub import download, find_cached, find_folder
from spot_batch.checkpoints.published import published
from spot_batch.checkpoints.registry import (
    ModelInfo,
    check_weights,
    describe_folder,
    describe_published,
    with_weight_hash,
)
from spot_batch.checkpoints.shapes import (
    LOGITS_FILTERED,
    VISIT_BYTES,
    Sizes,
    num_parameters,
    padded_length,
    tensor_shapes,
)
from spot_batch.checkpoints.weights import (
    StoredTensor,
    has_weights,
    hash_is_free,
    read_headers,
    weight_files,
)

FoundIn = Literal["folder", "cache", "hub", "table"]

MEMORY_FORMULA = (
    "weights + float32 head + N prefixes of M positions + working set: 16 float32 logits for the "
    "blocks of N sequences (at most 4 GiB of them, or one block's), and of 5 N slots (at most "
    "1,024) the keys and values of one layer and the activations"
)
_SLOTS_A_SEQUENCE = 5  # its current state and the drafted ones of the automatic budget
_MOST_SLOTS = 1024
_HASHED_BYTES = 2_000_000_000
"""Larger weights are not read for their hash: it only says which drafter was trained for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on a device for so many sequences of so many positions."""

    dtype: Dtype
    num_sequences: int
    num_positions: int
    weights: int
    head: int
    prefixes: int
    working_set: int

    @property
    def total(self) -> int:
        return self.weights + self.head + self.prefixes + self.working_set


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The tensors that a config asks for. `stored` is what the files hold, by dtype; None where
    they are not here."""

    num_tensors: int
    num_parameters: int
    num_bytes: int
    num_files: int
    stored: Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A target, where what is known of it comes from, and what is not known."""

    info: ModelInfo
    source: FoundIn
    weights: Weights
    unsure: str | None


def describe_target(
    target: str,
    *,
    revision: str | None = None,
    block_length: int | None = None,
    mask_id: int | None = None,
    check: Callable[[ModelInfo], None],
) -> Description:
    """Look a target up by its small files, or by name where it is a published one.

    A folder's weights are checked by their headers, if there are any; a hub id's only once they are
    in the cache: nothing but small files is ever downloaded. `check` raises ModelError for a config
    that what runs the model would refuse (`models.block.check_network`). Raises ModelError with
    the reason for a target that cannot be used.
    """
    path = find_folder(target, revision=revision)
    source: FoundIn = "folder"
    if path is None:
        path, source = find_cached(target, revision=revision), "cache"
        entry = published(target) if revision is None else None
        if path is None and entry is not None:
            info = describe_published(entry, block_length=block_length, mask_id=mask_id)
            return Description(
                info=info, source="table", weights=_wanted(info), unsure=entry.unsure
            )
        if path is None:
            path, source = download(target, revision=revision, with_weights=False), "hub"
    info = describe_folder(target, path, block_length=block_length, mask_id=mask_id)
    check(info)
    weights = _wanted(info)
    if has_weights(path) if source == "folder" else _is_complete(path):
        check_weights(info)
        weights = _stored(info, read_headers(path))
        if hash_is_free(path) or weights.num_bytes <= _HASHED_BYTES:
            info = with_weight_hash(info)
    return Description(info=info, source=source, weights=weights, unsure=None)


def memory_of(
    info: ModelInfo, *, dtype: str = "auto", num_sequences: int, num_positions: int
) -> Memory:
    """What a device must hold, by `MEMORY_FORMULA`; `auto` is a device that has bfloat16."""
    for name, value in (("sequences", num_sequences), ("positions", num_positions)):
        if value < 1:
            raise ModelError(f"{name} must be at least 1, got {value}")
    if num_positions > info.max_context:
        raise ModelError(
            f"{info.name}: its context is {info.max_context:,} positions, got {num_positions:,}"
        )
    sizes = info.sizes
    name = choose_dtype(
        dtype, device="cuda", has_bfloat16=True, memory_bytes=None, num_parameters=0
    ).name
    element = ELEMENT_BYTES[name]
    head = sizes.vocab_size * sizes.hidden_size
    shapes = tensor_shapes(sizes, info.family)
    in_body = num_parameters(shapes) - (0 if sizes.is_tied else head)
    padded = padded_length(num_positions)
    return Memory(
        dtype=name,
        num_sequences=num_sequences,
        num_positions=num_positions,
        weights=in_body * element,
        head=head * 4,
        prefixes=num_sequences * padded * sizes.kv_bytes(element),
        working_set=_working_set(info, num_sequences, padded, element),
    )


def _working_set(info: ModelInfo, num_sequences: int, num_positions: int, element: int) -> int:
    sizes, width = info.sizes, info.block_length
    num_slots = min(num_sequences * _SLOTS_A_SEQUENCE, _MOST_SLOTS)
    state = LOGITS_FILTERED * 4 * width * sizes.vocab_size
    logits = min(num_sequences * state, max(VISIT_BYTES, state))
    keys = num_slots * num_positions * sizes.kv_bytes(element) // sizes.num_layers
    activations = num_slots * width * _activations_a_row(sizes) * element
    return logits + keys + activations


def _activations_a_row(sizes: Sizes) -> int:
    """Elements of a layer that live at once: residual, normed, queries and output; gate and up."""
    return 2 * sizes.hidden_size + 2 * sizes.num_heads * sizes.head_dim + 3 * sizes.inner_size


def _wanted(info: ModelInfo) -> Weights:
    """By the config alone, in bfloat16, as all published checkpoints are."""
    shapes = tensor_shapes(info.sizes, info.family)
    count = num_parameters(shapes)
    return Weights(
        num_tensors=len(shapes),
        num_parameters=count,
        num_bytes=2 * count,
        num_files=0,
        stored=None,
    )


def _stored(info: ModelInfo, tensors: Mapping[str, StoredTensor]) -> Weights:
    by_dtype: Counter[str] = Counter()
    for tensor in tensors.values():
        by_dtype[tensor.dtype] += tensor.num_bytes
    return Weights(
        num_tensors=len(tensors),
        num_parameters=num_parameters({name: each.shape for name, each in tensors.items()}),
        num_bytes=by_dtype.total(),
        num_files=len(weight_files(info.path)),
        stored=dict(by_dtype),
    )


def _is_complete(path: Path) -> bool:
    """Whether a cached repository's weights are all here; a download goes on where it was."""
    try:
        return bool(weight_files(path))
    except ModelError:
        return False
