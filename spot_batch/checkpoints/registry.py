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

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.families import Family, family_of
from spot_batch.checkpoints.hub import commit_of, locate, names_of, packaged_targets
from spot_batch.checkpoints.json_files import Fields, read_json
from spot_batch.checkpoints.published import PublishedCheckpoint, published
from spot_batch.checkpoints.shapes import Sizes, misfits, read_sizes
from spot_batch.checkpoints.tokenizer import TOKENIZER_FILES, ids_of_texts, load_tokenizer
from spot_batch.checkpoints.weights import hash_files, hash_weights, read_headers
from spot_batch.records.progress import LoadReport, unreported
from spot_batch.records.sampling import SamplingParams

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
    weight_hash: str | None = None,
    report: LoadReport = unreported,
) -> ModelInfo:
    """Look a target up: packaged, a local folder or a hub id; its weights are here afterwards.

    Raises ModelError where it is not there, not of a known family, a fact is missing, or its weight
    files are incomplete or not what the config says. What contradicts itself is warned about.
    Weights are read for their hash unless it is given.
    """
    path = locate(target, revision=revision, report=report)
    info = describe_folder(target, path, block_length=block_length, mask_id=mask_id)
    check_weights(info)
    for warning in info.warnings:
        logger.warning("%s", warning)
    if weight_hash is not None:
        return replace(info, weight_hash=weight_hash)
    return with_weight_hash(info, report=report)


def describe_folder(
    target: str, path: Path, *, block_length: int | None = None, mask_id: int | None = None
) -> ModelInfo:
    """What the small files of a folder say; weights need not be there."""
    folder = _Folder.read(target, path)
    tokenizer = folder.tokenizer
    width, mask = folder.block_length(block_length), folder.mask_id(mask_id)
    _check_texts(target, folder.ids, folder.sizes)
    stop_ids = folder.stop_ids(mask)
    forbidden = {mask, *range(folder.sizes.vocab_size)} - (set(folder.ids.values()) - {mask})
    pad = tokenizer.pad_token_id
    if isinstance(pad, int) and pad not in stop_ids and pad < folder.sizes.vocab_size:
        forbidden.add(pad)
    temperature, top_p, top_k = folder.sampling()
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
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        threshold=_BUNDLED_THRESHOLD if target in packaged_targets() else folder.family.threshold,
        weight_hash="",
        tokenizer_hash=hash_files(
            path, [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        ),
        warnings=tuple(folder.notes),
    )


def describe_published(
    entry: PublishedCheckpoint, *, block_length: int | None = None, mask_id: int | None = None
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
    _check_width(entry.name, width, sizes)
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
        many = "1 tensor does" if len(wrong) == 1 else f"{len(wrong)} tensors do"
        raise ModelError(f"{info.path}: {many} not fit the config, the first: {wrong[0]}")


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
        notes: list[str] = []
        generation = path / "generation_config.json"
        said = read_json(generation) if generation.is_file() else {}
        # What either file says of editing counts.
        edits = {key: value for key, value in said.items() if "edit" in key.lower()}
        family = family_of(target, names, {**config, **edits}, code=_code_of(path), notes=notes)
        return cls(
            target,
            names,
            config,
            said,
            family,
            read_sizes(config, family, str(path / "config.json")),
            load_tokenizer(path),
            ids_of_texts(path),
            notes,
        )

    def block_length(self, given: int | None) -> int:
        suffix = next((found for name in self.names if (found := _SUFFIX.search(name))), None)
        of_config = self.config.get("block_size", self.config.get("block_length"))
        self._check_whole("block length", of_config)
        said = [
            ("the spec", given),
            ("config.json", of_config),
            ("the repository's name", int(suffix[1]) if suffix else None),
        ]
        width = _taken(self.target, "block length", said, self.family.block_length, self.notes)
        _check_width(self.target, width, self.sizes)
        return width

    def mask_id(self, given: int | None) -> int:
        entry = next((found for name in self.names if (found := published(name))), None)
        of_config = self.config.get("mask_token_id")
        self._check_whole("mask_token_id", of_config)
        of_tokenizer = self.tokenizer.mask_token_id
        said = [
            ("the spec", given),
            ("config.json", of_config),
            ("the tokenizer", of_tokenizer if type(of_tokenizer) is int else None),
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

    def _check_whole(self, what: str, value: object) -> None:
        if value is not None and type(value) is not int:
            raise ModelError(
                f"{self.target}: {what} of config.json must be a whole number, got {value!r}"
            )

    def sampling(self) -> tuple[float, float, int]:
        """(temperature, top_p, top_k) of generation_config.json, else the family's and off."""
        read = Fields(self.generation, f"{self.target}: generation_config.json")
        temperature = read.number("temperature", self.family.temperature)
        top_k = max(0, read.count("top_k", 0, least=-1))
        try:
            params = SamplingParams(
                max_new_tokens=1,
                temperature=temperature if read.flag("do_sample", True) else 0.0,
                top_p=read.number("top_p", 1.0),
                top_k=top_k,
            )
        except ValueError as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{read.where}: {error}") from error
        return params.temperature, params.top_p, params.top_k

    def _may_be_mask(self, mask: int) -> bool:
        """Whether an id is a row of the head that stands for no text that a model would write."""
        ordinary = set(self.ids) - set(self.tokenizer.get_added_vocab())
        return mask < self.sizes.vocab_size and mask not in {self.ids[text] for text in ordinary}

    def stop_ids(self, mask: int) -> tuple[int, ...]:
        texts = self.family.stop_texts
        found = {self.ids[text] for text in texts if text in self.ids}
        for source, value in (
            ("generation_config.json", self.generation.get("eos_token_id")),
            ("config.json", self.config.get("eos_token_id")),
            ("the tokenizer", self.tokenizer.eos_token_id),
        ):
            for one in value if isinstance(value, list) else [value]:
                if one is None:
                    continue
                if type(one) is not int:
                    raise ModelError(
                        f"{self.target}: eos_token_id of {source} must be whole numbers, got "
                        f"{value!r}"
                    )
                if 0 <= one < self.sizes.vocab_size:
                    found.add(one)
                else:
                    self.notes.append(
                        f"{self.target}: stop id {one} of {source} is outside the vocabulary of "
                        f"{self.sizes.vocab_size}"
                    )
        if mask in found:
            self.notes.append(f"{self.target}: mask id {mask} is named as a stop id; it is none")
        absent = [text for text in texts if text not in self.ids]
        if absent:
            self.notes.append(
                f"{self.target}: the tokenizer has no {' and no '.join(absent)} to end samples at"
            )
        return tuple(sorted(found - {mask}))


def _code_of(path: Path) -> str:
    """The modelling code that a folder brings along, as text: it tells versions apart."""
    files = sorted(path.glob("modeling_llada2*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


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


def _check_width(target: str, width: int, sizes: Sizes) -> None:
    if not 1 <= width <= sizes.max_context:
        raise ModelError(
            f"{target}: block length {width} must be from 1 to the context of {sizes.max_context}"
        )


def _check_texts(target: str, ids: Mapping[str, int], sizes: Sizes) -> None:
    highest = max(ids.values(), default=0)
    if highest >= sizes.vocab_size:
        raise ModelError(
            f"{target}: the tokenizer has ids up to {highest}, the model a vocabulary of "
            f"{sizes.vocab_size}"
        )
