"""What a model folder or hub id is: family, block length, mask and stop ids, from its small files.

Nothing here loads weights, and code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from spot_batch.records import LoadReport, unreported
from spot_batch.targets.errors import ModelError
from spot_batch.targets.families import Family, family_of
from spot_batch.targets.files import read_json
from spot_batch.targets.hub import commit_of, locate, names_of, packaged_targets
from spot_batch.targets.published import Published, published
from spot_batch.targets.shapes import Sizes, misfits, read_sizes
from spot_batch.targets.tokenizer import TOKENIZER_FILES, ids_of_texts, load_tokenizer
from spot_batch.targets.weights import hash_files, hash_weights, read_headers

__all__ = [
    "ModelError",
    "ModelInfo",
    "describe_folder",
    "describe_published",
    "load_tokenizer",
    "locate",
    "packaged_targets",
    "read_json",
    "resolve_model",
]

logger = logging.getLogger(__name__)

_BUNDLED_THRESHOLD = 0.9  # the bundled targets are no release of SDAR's authors: their own
_SUFFIX = re.compile(r"-b(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """A target before it is loaded.

    `forbidden_ids` are never written: the mask, and rows of the head that have no text.
    `weight_hash` and `tokenizer_hash` are sha256 over the files' bytes, "" where these were not
    read. `threshold` is what a spec that names none gets. `commit` is the hub's; `warnings` are
    sentences about facts that contradict one another.
    """

    name: str
    path: Path
    commit: str | None
    family: Family
    sizes: Sizes
    block_length: int
    mask_id: int
    stop_ids: tuple[int, ...]
    forbidden_ids: tuple[int, ...]
    has_chat_template: bool
    temperature: float
    top_p: float
    top_k: int
    threshold: float
    weight_hash: str
    tokenizer_hash: str
    warnings: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return self.sizes.vocab_size

    @property
    def max_context(self) -> int:
        return self.sizes.max_context

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
    report: LoadReport = unreported,
) -> ModelInfo:
    """Look a target up: packaged, in a local folder or on the hub; its weights are here afterwards.

    Raises ModelError where it is not there, not of a known family, a fact is missing, or its weight
    files are incomplete or not what the config says. What contradicts itself is warned about.
    """
    path = locate(target, revision=revision, report=report)
    info = describe_folder(target, path, block_length=block_length, mask_id=mask_id)
    check_weights(info)
    for warning in info.warnings:
        logger.warning("%s", warning)
    return with_weight_hash(info, report=report)


def describe_folder(
    target: str, path: Path, *, block_length: int | None = None, mask_id: int | None = None
) -> ModelInfo:
    """What the small files of a folder say; weights need not be there."""
    folder = _Folder.read(target, path)
    tokenizer, generation = folder.tokenizer, folder.generation
    width, mask = folder.block_length(block_length), folder.mask_id(mask_id)
    stop_ids = folder.stop_ids(mask)
    forbidden = {mask, *range(folder.sizes.vocab_size)} - (set(folder.ids.values()) - {mask})
    pad = tokenizer.pad_token_id
    if isinstance(pad, int) and pad not in stop_ids:
        forbidden.add(pad)
    temperature = _number(generation, "temperature", folder.family.temperature)
    return ModelInfo(
        name=target,
        path=path,
        commit=commit_of(path),
        family=folder.family,
        sizes=folder.sizes,
        block_length=width,
        mask_id=mask,
        stop_ids=stop_ids,
        forbidden_ids=tuple(sorted(forbidden)),
        has_chat_template=tokenizer.chat_template is not None,
        temperature=0.0 if generation.get("do_sample") is False else temperature,
        top_p=_number(generation, "top_p", 1.0),
        top_k=int(_number(generation, "top_k", 0)),
        threshold=_BUNDLED_THRESHOLD if target in packaged_targets() else folder.family.threshold,
        weight_hash="",
        tokenizer_hash=hash_files(
            path, [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        ),
        warnings=tuple(folder.notes),
    )


def describe_published(
    entry: Published, *, block_length: int | None = None, mask_id: int | None = None
) -> ModelInfo:
    """What is known of a published checkpoint without its files; `path` leads nowhere."""
    family = family_of(entry.name, (entry.name,), entry.config)
    sizes = read_sizes(entry.config, family, entry.name)
    notes: list[str] = []
    width, mask = (
        _taken(
            entry.name, what, [("the spec", given), ("the published checkpoint", own)], own, notes
        )
        for what, given, own in (
            ("block length", block_length, entry.block_length),
            ("mask id", mask_id, entry.mask_id),
        )
    )
    _check_mask(entry.name, mask, sizes)
    sampling = entry.sampling
    return ModelInfo(
        name=entry.name,
        path=Path(entry.name),
        commit=None,
        family=family,
        sizes=sizes,
        block_length=width,
        mask_id=mask,
        stop_ids=entry.stop_ids,
        forbidden_ids=tuple(sorted({mask, *range(entry.num_named, sizes.vocab_size)})),
        has_chat_template=True,
        temperature=sampling.get("temperature", family.temperature),
        top_p=sampling.get("top_p", 1.0),
        top_k=int(sampling.get("top_k", 0)),
        threshold=family.threshold,
        weight_hash="",
        tokenizer_hash="",
        warnings=tuple(notes),
    )


def check_weights(info: ModelInfo) -> None:
    """ModelError where weight files are missing, cut short or of other tensors; headers only."""
    stored = {name: tensor.shape for name, tensor in read_headers(info.path).items()}
    wrong = misfits(stored, info.sizes, info.family)
    if wrong:
        raise ModelError(
            f"{info.path}: {len(wrong)} tensors do not fit the config, the first: {wrong[0]}"
        )


def with_weight_hash(info: ModelInfo, *, report: LoadReport = unreported) -> ModelInfo:
    """The same, with the weights read for their hash."""
    return replace(info, weight_hash=hash_weights(info.path, report=report))


# -- facts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Folder:
    """A checkpoint's small files, and notes on where they contradict one another."""

    target: str
    names: tuple[str, ...]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    family: Family
    sizes: Sizes
    tokenizer: PreTrainedTokenizerFast
    ids: Mapping[str, int]
    notes: list[str]

    @classmethod
    def read(cls, target: str, path: Path) -> _Folder:
        names, config = names_of(target, path), read_json(path / "config.json")
        family = family_of(target, names, config)
        generation = path / "generation_config.json"
        return cls(
            target,
            names,
            config,
            read_json(generation) if generation.is_file() else {},
            family,
            read_sizes(config, family, str(path / "config.json")),
            load_tokenizer(path),
            ids_of_texts(path),
            [],
        )

    def block_length(self, given: int | None) -> int:
        suffix = next((found for name in self.names if (found := _SUFFIX.search(name))), None)
        of_config = self.config.get("block_size", self.config.get("block_length"))
        for value in (given, of_config):
            if value is not None and (type(value) is not int or value < 1):
                raise ModelError(
                    f"{self.target}: block length must be a whole number above 0, got {value!r}"
                )
        said = [
            ("the spec", given),
            ("config.json", of_config),
            ("the repository's name", int(suffix[1]) if suffix else None),
        ]
        return _taken(self.target, "block length", said, self.family.block_length, self.notes)

    def mask_id(self, given: int | None) -> int:
        entry = next((found for name in self.names if (found := published(name))), None)
        said = [
            ("the spec", given),
            ("config.json", _whole(self.config.get("mask_token_id"))),
            ("the tokenizer", _whole(self.tokenizer.mask_token_id)),
            ("the published checkpoint", entry.mask_id if entry is not None else None),
        ]
        mask = _taken(self.target, "mask id", said, self.family.mask_id, self.notes)
        if all(value is None for _, value in said) and not self._may_be_mask(mask):
            raise ModelError(
                f"{self.target}: no mask id in the spec, config.json or the tokenizer, and the "
                f"family's {mask} is none here: set model.target.mask_id"
            )
        _check_mask(self.target, mask, self.sizes)
        return mask

    def _may_be_mask(self, mask: int) -> bool:
        """Whether an id is a row of the head that stands for no text that a model would write."""
        ordinary = set(self.ids) - set(self.tokenizer.get_added_vocab())
        return mask < self.sizes.vocab_size and mask not in {self.ids[text] for text in ordinary}

    def stop_ids(self, mask: int) -> tuple[int, ...]:
        texts = self.family.stop_texts
        found = {self.ids[text] for text in texts if text in self.ids}
        for value in (
            self.generation.get("eos_token_id"),
            self.config.get("eos_token_id"),
            self.tokenizer.eos_token_id,
        ):
            for one in value if isinstance(value, list) else [value]:
                if type(one) is int:
                    found.add(one)
        if mask in found:
            self.notes.append(f"{self.target}: mask id {mask} is named as a stop id; it is none")
        absent = [text for text in texts if text not in self.ids]
        if absent:
            self.notes.append(
                f"{self.target}: the tokenizer has no {' and no '.join(absent)} to end samples at"
            )
        return tuple(sorted(found - {mask}))


def _taken(
    target: str,
    what: str,
    said: Sequence[tuple[str, int | None]],
    default: int,
    notes: list[str],
) -> int:
    """The first that is said, else the default; a note where others say otherwise."""
    given = [(source, value) for source, value in said if value is not None]
    if not given:
        return default
    source, taken = given[0]
    others = [f"{other} says {value}" for other, value in given[1:] if value != taken]
    if others:
        notes.append(f"{target}: {what} {taken} of {source} is taken; {', '.join(others)}")
    return taken


def _check_mask(target: str, mask: int, sizes: Sizes) -> None:
    if not 0 <= mask < sizes.vocab_size:
        raise ModelError(
            f"{target}: mask id {mask} is outside the vocabulary of {sizes.vocab_size}"
        )


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    return default if value is None else float(value)
