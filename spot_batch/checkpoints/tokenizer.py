"""A checkpoint's tokenizer, made of its files by a class of ours, never by code it brings along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2TokenizerFast

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.json_files import read_json

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
# Files of one published checkpoint spell its mask in two ways.
_MASK_TEXTS = ("<|MASK|>", "<MASK>", "<|mask|>", "<mask>", "<|mdm_mask|>")


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
    mask = _mask_spelled_right(path)
    try:
        return kind.from_pretrained(path, local_files_only=True, **mask)
    except Exception as error:  # of a damaged file its library raises just that
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"{path}: the tokenizer cannot be loaded ({said})") from error


def ids_of_texts(path: Path) -> dict[str, int]:
    """Every id that the folder's files give a text to; a row of the head without one means nothing.

    The tokenizer itself is not asked: it makes up ids for special tokens that no file knows.
    """
    try:
        ids = _ids_of_texts(path)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: the tokenizer's files cannot be read ({error!r})") from error
    wrong = next((text for text, number in ids.items() if type(number) is not int), None)
    if wrong is not None:
        raise ModelError(f"{path}: the tokenizer's files give {wrong!r} the id {ids[wrong]!r}")
    return ids


def _ids_of_texts(path: Path) -> dict[str, int]:
    ids = dict(_vocabulary(path))
    for added in _json(path, "tokenizer.json").get("added_tokens") or ():
        ids[str(added["content"])] = int(added["id"])
    ids |= {text: number for text, number in _json(path, "added_tokens.json").items()}
    decoder = _json(path, "tokenizer_config.json").get("added_tokens_decoder") or {}
    for number, added in decoder.items():
        ids[str(added["content"])] = int(number)
    return ids


def _vocabulary(path: Path) -> Iterator[tuple[str, int]]:
    model = _json(path, "tokenizer.json").get("model") or {}
    vocabulary = model.get("vocab", _json(path, "vocab.json"))
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.items()
    else:
        yield from ((entry[0], number) for number, entry in enumerate(vocabulary))


def _mask_spelled_right(path: Path) -> dict[str, Any]:
    """The mask's text where the tokenizer's config names one that no file has an id for."""
    said = _text(_json(path, "tokenizer_config.json").get("mask_token"))
    if said is None:
        return {}
    ids = ids_of_texts(path)
    if said in ids:
        return {}
    other = _text(_json(path, "special_tokens_map.json").get("mask_token"))
    return {"mask_token": next((text for text in (other, *_MASK_TEXTS) if text in ids), None)}


def _text(token: Any) -> str | None:
    """A special token as it stands in a file: a text, or an object that has one."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _json(path: Path, name: str) -> dict[str, Any]:
    return read_json(path / name) if (path / name).is_file() else {}
