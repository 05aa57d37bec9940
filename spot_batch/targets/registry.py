"""What a model folder or hub id is: family, block length, mask and stop ids, from its small files.

Nothing here loads weights, and code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

from spot_batch.records import Confidence

BUNDLED = "bundled"
_ASSETS = Path(__file__).parent.parent / "assets"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


class ModelError(ValueError):
    """A target that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Family:
    """What the published checkpoints of one architecture have in common.

    `block_length` and `mask_id` are what to take where neither the spec, nor the config, nor the
    repository's name says; `confidence` is the rule of the family's own reference decoder.
    """

    name: str
    architecture: str
    confidence: Confidence
    block_length: int
    mask_id: int


FAMILIES = {
    family.architecture: family
    for family in (Family("sdar", "SDARForCausalLM", "sampled_tempered", 4, 151669),)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A target before it is loaded.

    `forbidden_ids` are never written: the mask, and rows of the head that have no text.
    `weight_hash` and `tokenizer_hash` are sha256 over the files' bytes.
    """

    name: str
    path: Path
    family: Family
    block_length: int
    mask_id: int
    stop_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    has_chat_template: bool
    temperature: float
    top_p: float
    top_k: int
    weight_hash: str
    tokenizer_hash: str

    def identity(self) -> dict[str, object]:
        """What of the target decides a job's output, for the fingerprint."""
        return {
            "weights": self.weight_hash,
            "tokenizer": self.tokenizer_hash,
            "family": self.family.name,
            "block_length": self.block_length,
            "mask_id": self.mask_id,
            "stop_ids": list(self.stop_ids),
        }


def resolve_model(
    target: str,
    *,
    revision: str | None = None,
    block_length: int | None = None,
    mask_id: int | None = None,
) -> ModelInfo:
    """Look a target up: "bundled", a local folder or a hub id.

    Raises ModelError where it is not there, not of a known family, or a fact is missing.
    """
    path = locate(target, revision=revision)
    config = read_json(path / "config.json")
    family = _family(target, config)
    tokenizer = load_tokenizer(path)
    width = _block_length(target, config, family, block_length)
    mask = _mask_id(target, config, tokenizer, family, mask_id)
    vocab_size = _field(path, config, "vocab_size", int)
    if not 0 <= mask < vocab_size:
        raise ModelError(f"{target}: mask id {mask} is outside the vocabulary of {vocab_size}")
    generation = _generation_config(path)
    stop_ids = _stop_ids(generation, config, tokenizer)
    named = len(tokenizer)
    pad = tokenizer.pad_token_id
    forbidden = {mask, *range(named, vocab_size)}
    if pad is not None and pad not in stop_ids:
        forbidden.add(pad)
    return ModelInfo(
        name=target,
        path=path,
        family=family,
        block_length=width,
        mask_id=mask,
        stop_ids=stop_ids,
        forbidden_ids=tuple(sorted(forbidden)),
        vocab_size=vocab_size,
        max_context=_field(path, config, "max_position_embeddings", int),
        has_chat_template=tokenizer.chat_template is not None,
        temperature=_number(generation, "temperature", 1.0),
        top_p=_number(generation, "top_p", 1.0),
        top_k=int(_number(generation, "top_k", 0)),
        weight_hash=_hash_files(path, _weight_files(path)),
        tokenizer_hash=_hash_files(
            path, [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
        ),
    )


def locate(target: str, *, revision: str | None = None) -> Path:
    """The local folder of a target; a hub id is downloaded (or found in the cache)."""
    if target == BUNDLED:
        return _ASSETS / "target"
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{target}: the folder has no config.json")
        return path
    if (
        path.is_absolute()
        or target.startswith((".", "~"))
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", target)
    ):
        raise ModelError(
            f"{target}: no such folder. Give a folder with config.json, a hub id such as "
            f"JetLM/SDAR-1.7B-Chat-b32, or {BUNDLED!r}"
        )
    return _download(target, revision)


def _download(target: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                target, revision=revision, allow_patterns=[*_SMALL_FILES, "*.safetensors"]
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{target}: the repository is gated; accept its terms on the hub and log in"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{target}: not a local folder, and the hub could not give it ({type(error).__name__})"
        ) from error


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The folder's tokenizer. Its own class name is not looked at: published SDAR tokenizers name
    one of their own over plain Qwen2 files, and code that a checkpoint brings is never run."""
    kind: type[PreTrainedTokenizerFast]
    if (path / "tokenizer.json").is_file():
        kind = PreTrainedTokenizerFast
    elif (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        kind = Qwen2TokenizerFast
    else:
        raise ModelError(f"{path}: no tokenizer.json, and no vocab.json with merges.txt")
    try:
        return kind.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: the tokenizer cannot be loaded ({error})") from error


def _weight_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path}: no .safetensors file")
    return files


def _hash_files(path: Path, files: Sequence[Path]) -> str:
    """sha256 over the names below `path` and the bytes of the files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: want a JSON object, got {type(value).__name__}")
    return value


def _family(target: str, config: Mapping[str, Any]) -> Family:
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(
        f"{target}: architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"known: {', '.join(sorted(FAMILIES))}"
    )


def _block_length(target: str, config: Mapping[str, Any], family: Family, given: int | None) -> int:
    suffix = re.search(r"-b(\d+)$", target.rstrip(os.sep))
    found = [
        given,
        config.get("block_size"),
        int(suffix.group(1)) if suffix else None,
        family.block_length,
    ]
    width = next(value for value in found if value is not None)
    if not isinstance(width, int) or width < 1:
        raise ModelError(f"{target}: block length must be a whole number above 0, got {width!r}")
    return width


def _mask_id(
    target: str,
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    family: Family,
    given: int | None,
) -> int:
    for value in (given, config.get("mask_token_id"), tokenizer.mask_token_id, family.mask_id):
        if isinstance(value, int):
            return value
    raise ModelError(f"{target}: no mask id in the spec, the config or the tokenizer")


def _generation_config(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _stop_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (
        generation.get("eos_token_id"),
        config.get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        if isinstance(value, int):
            found.add(value)
        elif isinstance(value, list):
            found.update(int(one) for one in value)
    return tuple(sorted(found))


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    return default if value is None else float(value)


def _field(path: Path, config: Mapping[str, Any], name: str, kind: type[int]) -> int:
    value = config.get(name)
    if not isinstance(value, kind):
        raise ModelError(f"{path / 'config.json'}: {name} must be a whole number, got {value!r}")
    return value
