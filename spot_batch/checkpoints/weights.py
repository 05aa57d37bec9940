"""A checkpoint's safetensors files, checked by their headers before anything is loaded."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.json_files import read_json
from spot_batch.records.progress import LoadProgress, LoadReport, unreported

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}

_HASHED_BYTES = 2**23  # at a time
_MOST_SAID = 120  # characters of what safetensors says, which may quote the file
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file's header has it."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def weight_files(path: Path) -> list[Path]:
    """The files that loading reads, by name. Raises ModelError naming those that are missing."""
    single, index = path / SINGLE, path / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} of {len(names)} weight files are missing, the first: "
                f"{missing[0]} ({INDEX} lists it)"
            )
        return [path / name for name in names]
    there = sorted(file.name for file in path.glob("*.safetensors"))
    if not there:
        raise ModelError(f"{path}: no .safetensors file")
    raise ModelError(f"{path}: {there[0]} is there, but neither {SINGLE} nor {INDEX}")


def has_weights(path: Path) -> bool:
    """Whether there is any weight file to check: a folder may hold config and tokenizer alone."""
    return any(path.glob("*.safetensors")) or (path / INDEX).is_file()


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every stored tensor of a folder; no weight is read.

    Raises ModelError in one sentence for a missing, truncated or damaged file, and for an index
    that does not agree with its files.
    """
    tensors: dict[str, StoredTensor] = {}
    of_file: dict[str, set[str]] = {}
    for file in weight_files(path):
        header = _read_header(file)
        twice = tensors.keys() & header.keys()
        if twice:
            raise ModelError(f"{file}: holds {min(twice)}, which another file holds too")
        tensors |= header
        of_file[file.name] = set(header)
    if (path / SINGLE).is_file():
        return tensors
    for name, file_name in _weight_map(path / INDEX).items():
        if name not in of_file[file_name]:
            raise ModelError(f"{path / file_name}: {name} is not in it, though {INDEX} says so")
    return tensors


def hash_weights(path: Path, *, report: LoadReport = unreported) -> str:
    """sha256 over the names and bytes of the weight files."""
    return hash_files(path, weight_files(path), report=report)


def hash_files(path: Path, files: Sequence[Path], *, report: LoadReport = unreported) -> str:
    """sha256 over the names below `path` and the sha256 of the files."""
    digest = hashlib.sha256()
    total = sum(file.stat().st_size for file in files if _blob_sha256(file) is None)
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(LoadProgress("checking", done, total))

    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        digest.update(_blob_sha256(file) or _sha256(file, count))
    return digest.hexdigest()


def hash_is_free(path: Path) -> bool:
    """Whether the weights' hash is known without reading them."""
    return all(_blob_sha256(file) is not None for file in weight_files(path))


def _sha256(file: Path, count: Callable[[int], None]) -> bytes:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_HASHED_BYTES):
            digest.update(piece)
            count(len(piece))
    return digest.digest()


def _blob_sha256(file: Path) -> bytes | None:
    """The sha256 that the hub's cache calls a large file by; sizes are checked when it comes."""
    if not file.is_symlink():
        return None
    blob = file.resolve()
    is_blob = blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name)
    return bytes.fromhex(blob.name) if is_blob else None


def _weight_map(index: Path) -> dict[str, str]:
    given = read_json(index).get("weight_map")
    if not isinstance(given, Mapping) or not given:
        raise ModelError(f"{index}: has no weight_map")
    for name in given.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ModelError(f"{index}: want names of .safetensors files beside it, got {name!r}")
    return dict(given)


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        if _is_pointer(file):
            raise ModelError(f"{file}: is a Git LFS pointer, not the weights: run `git lfs pull`")
        with safe_open(file, framework="numpy") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error})") from error
    except SafetensorError as error:
        why = str(error).splitlines()[0][:_MOST_SAID]
        raise ModelError(
            f"{file}: truncated or damaged ({why}); its {file.stat().st_size:,} bytes are not what "
            "was published: fetch the file again"
        ) from error
    tensors = {}
    for name, stored_slice in slices.items():
        dtype, shape = stored_slice.get_dtype(), tuple(stored_slice.get_shape())
        if dtype not in ELEMENT_BYTES:
            raise ModelError(
                f"{file}: {name} is stored as {dtype}; want one of {', '.join(ELEMENT_BYTES)}"
            )
        tensors[name] = StoredTensor(dtype, shape, math.prod(shape) * ELEMENT_BYTES[dtype])
    return tensors


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_LFS_POINTER)) == _LFS_POINTER
