"""The families of targets: what their published checkpoints have in common, and who is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spot_batch.checkpoints.errors import ModelError
from spot_batch.records.sampling import Confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What the published checkpoints of one architecture have in common.

    `block_length` and `mask_id` are what to take where nothing else says; `confidence`, `threshold`
    and `temperature` are the reference decoder's own. `stop_texts` are looked up in the tokenizer:
    generation configs do not name them all. `exact`: a stored prefix changes nothing.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    confidence: Confidence
    threshold: float
    temperature: float
    block_length: int
    mask_id: int
    stop_texts: tuple[str, ...]
    tokenizer: str
    chat: str
    exact: bool = True


_SDAR = Family(
    name="sdar",
    architecture="SDARForCausalLM",
    model_types=("sdar",),
    confidence="sampled_tempered",
    threshold=0.85,
    temperature=1.0,
    block_length=4,
    mask_id=151669,
    stop_texts=("<|im_end|>", "<|endoftext|>"),
    tokenizer="Qwen2, byte-level BPE",
    chat="Qwen3's template; no system prompt of its own",
)
_FAMILIES = (
    _SDAR,
    replace(
        _SDAR,
        name="sdar-moe",
        architecture="SDARMoeForCausalLM",
        model_types=("sdar_moe",),
    ),
    Family(
        name="llada2",
        architecture="LLaDA2MoeModelLM",
        model_types=("llada2_moe", "llada2_moe_veomni"),
        confidence="sampled_filtered",
        threshold=0.95,
        temperature=0.0,
        block_length=32,
        mask_id=156895,
        stop_texts=("<|endoftext|>", "<|role_end|>"),
        tokenizer="Ling, byte-level BPE",
        chat="<role> tags; a system turn of its own that says: detailed thinking off",
    ),
)

FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _FAMILIES}

_FULL_ATTENTION = (
    "is not offered yet: it attends to its whole canvas, so no prefix can be stored exactly"
)
# What is known and refused, by architecture; `targets list` shows it.
REFUSED: Mapping[str, str] = {
    "LLaDAModelLM": _FULL_ATTENTION,
    "LLaDAMoEModelLM": _FULL_ATTENTION,
    "DreamModel": _FULL_ATTENTION,
    "DiffusionGemmaForBlockDiffusion": (
        "starts from random tokens and replaces them at every step: it has no mask, no token is "
        "final before the end, and a draft could not be checked"
    ),
}
EDITING = (
    "edits tokens that are committed already, so no commit is final; its mask-to-token mode is not "
    "offered: take LLaDA2.0"
)
_UNSURE_OF_EDITING = (
    "neither its files nor its name say whether it is LLaDA2.0 or a later version, which edits "
    "tokens that are committed already; it is taken for LLaDA2.0"
)
AUTOREGRESSIVE = "is autoregressive: it has no mask id and writes from left to right only"

_FULL_ATTENTION_NAME = re.compile(r"^(GSAI-ML/LLaDA-|inclusionAI/LLaDA-MoE|Dream-org/Dream)", re.I)
_DIFFUSION_GEMMA_NAME = re.compile(r"^google/diffusion-?gemma", re.I)
_AUTOREGRESSIVE_NAME = re.compile(r"^Qwen/Qwen\d", re.I)
_LLADA2_NAME = re.compile(r"llada[-_ ]?2[._-](\d+)(?![\db])", re.IGNORECASE)
_EDITING_VERSIONS = ("1", "2")
_EDITING_CODE = "editing_threshold"  # what generation takes in the code that LLaDA2.1 brings along
_AUTOREGRESSIVE = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)$")


def family_of(
    target: str,
    names: tuple[str, ...],
    config: Mapping[str, Any],
    *,
    code: str = "",
    notes: list[str] | None = None,
) -> Family:
    """The family of a config; `names` are what the checkpoint is called, to know its kin by.

    `code`: what its own modelling code says, which is read and never run. `notes` gets a sentence
    where nothing tells whether it is one that edits. Raises ModelError with the reason for one that
    is not supported.
    """
    known = _by_architecture(config)
    if known is None:
        raise ModelError(f"{target}: {_why_not(config)}")
    if known.name == "llada2":
        edits = _edits(names, config, code)
        if edits:
            raise ModelError(f"{target}: {EDITING}")
        if edits is None and notes is not None:
            notes.append(f"{target}: {_UNSURE_OF_EDITING}")
    return known


def refused_by_name(hub_id: str) -> str | None:
    """Why a published checkpoint is not supported, where its name alone tells; None for others."""
    versions = _LLADA2_NAME.findall(hub_id)
    if versions and versions[-1] in _EDITING_VERSIONS:
        return f"it {EDITING}"
    if _FULL_ATTENTION_NAME.match(hub_id):
        return f"it {_FULL_ATTENTION}"
    if _DIFFUSION_GEMMA_NAME.match(hub_id):
        return f"it {REFUSED['DiffusionGemmaForBlockDiffusion']}"
    return f"it {AUTOREGRESSIVE}" if _AUTOREGRESSIVE_NAME.match(hub_id) else None


def architectures_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("architectures")
    return tuple(map(str, given)) if isinstance(given, list) else ()


def _by_architecture(config: Mapping[str, Any]) -> Family | None:
    names = architectures_of(config)
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if not names:  # merged checkpoints of dFactory say their model type alone
        for family in _FAMILIES:
            if config.get("model_type") in family.model_types:
                return family
    return None


def _edits(names: tuple[str, ...], config: Mapping[str, Any], code: str) -> bool | None:
    """Whether a LLaDA2 edits what it has committed: by its files, else by what it is called; None
    where neither tells."""
    if any("edit" in str(key).lower() for key in config) or _EDITING_CODE in code:
        return True
    of_files = (str(config.get("_name_or_path", "")), str(config.get("model_type", "")))
    for known in (of_files, names):
        # A path may hold another version's name: the last one is the checkpoint's.
        versions = [found[-1] for name in known if (found := _LLADA2_NAME.findall(name))]
        if versions:
            return any(version in _EDITING_VERSIONS for version in versions)
        if known is of_files and code:
            return False
    return None


def _why_not(config: Mapping[str, Any]) -> str:
    names, model_type = architectures_of(config), config.get("model_type")
    for name in names:
        if name in REFUSED:
            return f"{name} {REFUSED[name]}"
    for name in (*names, str(model_type)):
        if name.lower().replace("_", "").startswith("diffusiongemma"):
            return f"{name} {REFUSED['DiffusionGemmaForBlockDiffusion']}"
    for name in names:
        if _AUTOREGRESSIVE.search(name) and not any(_masks(config)):
            return f"{name} {AUTOREGRESSIVE}; known: {_known()}"
    called = ", ".join(names) or (f"model type {model_type}" if model_type else "(none named)")
    return f"architecture {called} is not supported; known: {_known()}"


def _masks(config: Mapping[str, Any]) -> Iterator[object]:
    yield from (config.get(name) for name in ("mask_token_id", "mask_id"))


def _known() -> str:
    return ", ".join(sorted(FAMILIES))
