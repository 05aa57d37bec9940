"""Files of unknown origin: what tensors they hold, read without running anything of theirs.

A .safetensors file is read by its header, tensors only when asked for. A .pt or .bin file is a zip
archive with a pickle: its directory is looked at first, then torch reads it with `weights_only`, so
that code in it is refused, and memory-mapped, so that no tensor is read before its turn.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - the name of what torch.load raises; nothing is unpickled here
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spot_batch.drafters.order import (
    OrderConfig,
    OrderModel,
    bare_path,
    card_file,
    config_of,
    load_order,
    read_card,
)

MAX_BYTES = 2_000_000_000
_MAX_ENTRIES = 100_000  # values of a checkpoint that are looked at
_MAX_DEPTH = 16
_MAX_METADATA = 200
_LONGEST_VALUE = 200
_WIDEST_BLOCK = 512  # a matrix of more rows, outside the layers, passes for one of a vocabulary

# What reading a damaged or hostile archive may raise.
_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

Kind = Literal[
    "order", "order-like transformer", "transformer with a vocabulary", "transformer", "unknown"
]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor by its header; `dtype` as torch names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_parameters(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """What a file holds. `metadata` is whatever it says beside its tensors, as text."""

    path: Path
    format: Literal["safetensors", "torch"]
    tensors: tuple[ForeignTensor, ...]
    metadata: Mapping[str, str]
    _loaded: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> ForeignTensor:
        return {tensor.name: tensor for tensor in self.tensors}[name]

    def load(self, name: str) -> Tensor:
        """One of its tensors, as float32."""
        if self.format == "torch":
            return self._loaded[name].float()
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.float()


def open_foreign(path: Path, *, max_bytes: int = MAX_BYTES) -> ForeignFile:
    """Look into a .safetensors, .pt, .pth or .bin file.

    Raises ValueError with one sentence where it is truncated, too large or holds code.
    """
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path}: {size:,} bytes, more than the {max_bytes:,} of --max-bytes")
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        return _open_torch(path, max_bytes=max_bytes)
    raise ValueError(f"{path}: want a .safetensors, .pt, .pth or .bin file")


def _open_safetensors(path: Path) -> ForeignFile:
    tensors = []
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                tensors.append(
                    ForeignTensor(name, tuple(part.get_shape()), _torch_dtype(part.get_dtype()))
                )
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole .safetensors file ({error})") from error
    return ForeignFile(path, "safetensors", tuple(tensors), _shortened(metadata.items()))


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def _torch_dtype(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype.lower())


def _open_torch(path: Path, *, max_bytes: int) -> ForeignFile:
    _check_archive(path, max_bytes=max_bytes)
    try:
        refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a whole torch file ({_first_line(error)})") from error
    if refused:
        raise ValueError(
            f"{path}: refused, its pickle wants to run or build {refused[0]}, "
            "and a drafter is tensors alone"
        )
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors: dict[str, Tensor] = {}
        metadata: list[tuple[str, str]] = []
        for name, value in _leaves(tree):
            if not isinstance(value, Tensor):
                metadata.append((name, str(value)))
            elif name in tensors:
                raise ValueError(f"two tensors are named {name}")
            elif value.layout is torch.strided and not value.is_quantized and not value.is_meta:
                tensors[name] = value.detach()
    except _UNREADABLE as error:
        raise ValueError(f"{path}: not a whole torch file ({_first_line(error)})") from error
    found = tuple(
        ForeignTensor(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
    return ForeignFile(path, "torch", found, _shortened(metadata), tensors)


def _check_archive(path: Path, *, max_bytes: int) -> None:
    """ValueError unless the zip directory is that of a checkpoint: stored, not compressed, and no
    larger unpacked than the file is."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    # zipfile raises NotImplementedError for a zip version that it does not read
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{path}: not a whole torch file ({_first_line(error)}); "
            "torch has written zip archives since version 1.6"
        ) from error
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > max_bytes:
        raise ValueError(
            f"{path}: {unpacked:,} bytes unpacked, more than the {max_bytes:,} of --max-bytes"
        )
    packed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
    if packed or unpacked > path.stat().st_size:
        raise ValueError(f"{path}: refused, its entries are compressed, which torch never writes")


def _leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Dotted names and values of nested dicts and lists."""
    left = _MAX_ENTRIES

    def walk(value: object, name: str, depth: int) -> Iterator[tuple[str, object]]:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise ValueError("nested too deeply, or of too many values")
        if isinstance(value, Mapping):
            parts: Iterator[tuple[object, object]] = iter(value.items())
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            parts = iter(enumerate(value))
        else:
            yield name, value
            return
        for key, inner in parts:
            if not isinstance(key, str | int):
                raise ValueError(f"a key that is a {type(key).__name__}")
            yield from walk(inner, f"{name}.{key}" if name else str(key), depth + 1)

    return walk(tree, "", 0)


def _shortened(entries: Any) -> dict[str, str]:
    return {
        str(name)[:_LONGEST_VALUE]: str(value)[:_LONGEST_VALUE]
        for name, value in list(entries)[:_MAX_METADATA]
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# -- what it looks like ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """What a file's tensors look like, where they tell. `refusal` is why our loader would not take
    the file as it is; "" where it would."""

    kind: Kind
    refusal: str
    num_parameters: int
    num_layers: int | None = None
    hidden_size: int | None = None
    feed_forward: int | None = None
    num_features: int | None = None
    block_length: int | None = None
    vocabulary: tuple[str, ...] = ()


def looks_like(file: ForeignFile) -> Looks:
    """Guess from names and shapes what the file is."""
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    num_parameters = sum(tensor.num_parameters for tensor in file.tensors)
    refusal = _refusal(file)
    config = config_by_shapes(shapes)
    if config is not None:
        return Looks(
            kind="order",
            refusal=refusal,
            num_parameters=num_parameters,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            feed_forward=4 * config.hidden_size,
            num_features=config.num_features,
            block_length=config.block_length,
        )
    layers = layers_of(shapes)
    width = _width(shapes, layers)
    if not layers or width is None:
        return Looks(kind="unknown", refusal=refusal, num_parameters=num_parameters)
    inside = {name for names in layers.values() for name in names.values()}
    outside = {name: shape for name, shape in shapes.items() if name not in inside}
    vocabulary = tuple(name for name, shape in _matrices(outside) if max(shape) > _WIDEST_BLOCK)
    num_features = _num_features(outside, width)
    kind: Kind = "transformer" if num_features is None else "order-like transformer"
    return Looks(
        kind="transformer with a vocabulary" if vocabulary else kind,
        refusal=refusal,
        num_parameters=num_parameters,
        num_layers=len(layers),
        hidden_size=width,
        feed_forward=_feed_forward(shapes, layers, width),
        num_features=num_features,
        block_length=_block_length(outside, width),
        vocabulary=vocabulary,
    )


def _matrices(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    return ((name, shape) for name, shape in shapes.items() if len(shape) == 2)


def _num_features(outside: Mapping[str, Sequence[int]], width: int) -> int | None:
    """What a matrix outside the layers makes hidden rows of, where it is no embedding."""
    for name, shape in _matrices(outside):
        side = sum(shape) - width  # what the other side is
        is_embedding = re.search(r"pos|emb", name, re.I) is not None
        if width in shape and not is_embedding and 4 < side <= _WIDEST_BLOCK and side != width:
            return side
    return None


def _block_length(outside: Mapping[str, Sequence[int]], width: int) -> int | None:
    """How many positions an embedding of them has."""
    for name, shape in outside.items():
        is_of_positions = re.search(r"pos", name, re.I) is not None and len(shape) in (2, 3)
        if is_of_positions and shape[-1] == width and 2 <= shape[-2] <= _WIDEST_BLOCK:
            return shape[-2]
    return None


def config_by_shapes(shapes: Mapping[str, Sequence[int]]) -> OrderConfig | None:
    """The config of an order drafter of ours with these tensors, heads aside; None for others."""
    try:
        (block_length, size), (_, num_features) = (
            shapes["position.weight"],
            shapes["features.weight"],
        )
        numbers = {int(name.split(".")[1]) for name in shapes if name.startswith("layers.")}
        config = OrderConfig(
            block_length=block_length,
            num_layers=max(numbers) + 1,
            hidden_size=size,
            num_heads=1,
            top_k=num_features - 4,
        )
    except (KeyError, ValueError, IndexError):
        return None
    wanted = wanted_shapes(config)
    if wanted != {name: tuple(shape) for name, shape in shapes.items()}:
        return None
    return config


def wanted_shapes(config: OrderConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of an order model and their shapes; none is made."""
    with torch.device("meta"):
        model = OrderModel(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def layers_of(shapes: Mapping[str, Sequence[int]]) -> dict[int, dict[str, str]]:
    """Finds the longest run of alike numbered parts: number -> name in the part -> full name."""
    runs: dict[str, dict[int, dict[str, str]]] = {}
    for name in shapes:
        for match in re.finditer(r"(?:^|\.)(\d{1,3})\.", name):
            prefix, rest = name[: match.start(1)], name[match.end() :]
            runs.setdefault(prefix, {}).setdefault(int(match[1]), {})[rest] = name
            break
    alike = []
    for parts in runs.values():
        kinds = Counter(tuple(sorted(part)) for part in parts.values())
        most, _ = kinds.most_common(1)[0]
        alike.append({at: part for at, part in parts.items() if tuple(sorted(part)) == most})
    alike = [parts for parts in alike if len(next(iter(parts.values()))) >= 4]
    best = max(alike, key=lambda parts: sum(map(len, parts.values())), default={})
    return dict(sorted(best.items()))


def _width(
    shapes: Mapping[str, Sequence[int]], layers: Mapping[int, Mapping[str, str]]
) -> int | None:
    """The size that most matrices of a layer share."""
    sizes: Counter[int] = Counter()
    for name in next(iter(layers.values()), {}).values():
        if len(shapes[name]) == 2:
            sizes.update(set(shapes[name]))
    return sizes.most_common(1)[0][0] if sizes else None


def _feed_forward(
    shapes: Mapping[str, Sequence[int]], layers: Mapping[int, Mapping[str, str]], width: int
) -> int | None:
    inner = [
        max(shapes[name])
        for rest, name in next(iter(layers.values())).items()
        if len(shapes[name]) == 2
        and min(shapes[name]) == width
        and max(shapes[name]) != width
        and not re.search(r"qkv|in_proj|attn", rest, re.I)
    ]
    return max(inner, default=None)


def _refusal(file: ForeignFile) -> str:
    if file.format != "safetensors":
        return "it is not .safetensors"
    path = bare_path(file.path)
    if not card_file(path).exists():
        return f"{card_file(path).name} is not beside it"
    try:
        config = config_of(path, read_card(path))
        load_order(path, block_length=config.block_length, device=torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""
