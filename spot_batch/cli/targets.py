"""`targets`: which targets there are, and what one is."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json

if TYPE_CHECKING:
    from spot_batch.checkpoints.registry import ModelInfo
    from spot_batch.checkpoints.report import Description, Memory, Weights
    from spot_batch.drafters.registry import DrafterChoice


@plain_errors
def list_targets(as_json: Json = False) -> None:
    """The families, packaged and published targets, and who is refused and why. No network."""
    from spot_batch.checkpoints.families import AUTOREGRESSIVE, EDITING, FAMILIES, REFUSED
    from spot_batch.checkpoints.hub import packaged_targets
    from spot_batch.checkpoints.published import published_names
    from spot_batch.checkpoints.report import describe_target
    from spot_batch.models.block import check_network
    from spot_batch.terminal.screen import Screen

    packaged = [describe_target(name, check=check_network) for name in packaged_targets()]
    found = [describe_target(name, check=check_network) for name in published_names()]
    refused = {**REFUSED, "LLaDA2.1, LLaDA2.2": EDITING, "other ...ForCausalLM": AUTOREGRESSIVE}
    if as_json:
        document = {
            "families": [asdict(family) for family in FAMILIES.values()],
            "packaged": [_document(each) for each in packaged],
            "published": [_document(each) for each in found],
            "refused": refused,
        }
        print(json.dumps(document))
        return
    screen = Screen()
    for family in FAMILIES.values():
        screen.line(f"{family.name}: {family.architecture}", style="bold")
        for each in (*packaged, *found):
            info, millions = each.info, each.weights.num_parameters / 1e6
            if info.family == family:
                count = f"{millions:>6.2f}M" if millions < 100 else f"{millions / 1e3:>6.2f}B"
                screen.line(
                    f"  {info.name:<34} block length {info.block_length:>2}, {count} parameters, "
                    f"{size(each.weights.num_bytes):>9}, KV {info.sizes.kv_bytes(2):>7,} bytes a "
                    "token"
                )
    screen.line("refused", style="bold")
    for name, why in refused.items():
        screen.line(f"  {name} {why}")
    screen.line("more about one: spot-batch targets check NAME_OR_FOLDER")


@plain_errors
def check(
    target: Annotated[str, typer.Argument(help="Hub id, folder, or bundled.")],
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Instead of its own.")] = None,
    mask_id: Annotated[int | None, typer.Option(help="Instead of its own.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16), float32, bfloat16 or float16.")
    ] = "auto",
    sequences: Annotated[int, typer.Option(help="In flight, for the memory.")] = 32,
    max_context: Annotated[
        int | None, typer.Option(help="Prompt and answer, for the memory; 4,096 at most.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a target is, by its small files or its name: no weights are downloaded or loaded."""
    from spot_batch.checkpoints.report import describe_target, memory_of
    from spot_batch.drafters.registry import choose_drafter
    from spot_batch.models.block import check_network

    found = describe_target(
        target, revision=revision, block_length=block_length, mask_id=mask_id, check=check_network
    )
    info = found.info
    memory = memory_of(
        info,
        dtype=dtype,
        num_sequences=sequences,
        num_positions=min(4096, info.max_context) if max_context is None else max_context,
    )
    drafter = choose_drafter("auto", info)
    if as_json:
        document = {
            **_document(found),
            "memory": {**asdict(memory), "total": memory.total},
            "drafter": {"name": drafter.name, "why": drafter.why},
        }
        print(json.dumps(document))
        return
    _show(found, memory, drafter)


def _show(found: Description, memory: Memory, drafter: DrafterChoice) -> None:
    from spot_batch.checkpoints.report import MEMORY_FORMULA
    from spot_batch.terminal.screen import Screen

    info, family = found.info, found.info.family
    screen = Screen()
    screen.facts(
        [
            ("target", f"{info.name}, {_origin(found)}"),
            (
                "family",
                f"{family.name} ({family.architecture}); "
                + ("exact for its family" if family.exact else "not exact for its family"),
            ),
            ("block length", str(info.block_length)),
            ("mask id", str(info.mask_id)),
            ("stop ids", ", ".join(map(str, info.stop_ids)) or "none: samples end by length"),
            ("never written", f"{len(info.forbidden_ids):,} of {info.vocab_size:,} ids"),
            ("context", f"{info.max_context:,} positions"),
            ("chat", family.chat if info.has_chat_template else "no chat template: raw text"),
            ("sampling", _sampling(info)),
            (
                "confidence",
                f"{family.confidence}; threshold {info.threshold:g} unless the spec has one",
            ),
            ("weights", _weights(found.weights)),
            ("KV", f"{info.sizes.kv_bytes(2):,} bytes a token in 16 bits"),
            (
                "memory",
                f"{size(memory.total)} in {memory.dtype} for {memory.num_sequences} sequences of "
                f"{memory.num_positions:,} positions: weights {size(memory.weights)}, head "
                f"{size(memory.head)}, prefixes {size(memory.prefixes)}, working set "
                f"{size(memory.working_set)}\n({MEMORY_FORMULA})",
            ),
            ("drafter", f"{drafter.name}: {drafter.why}"),
        ]
    )
    if found.unsure is not None:
        screen.line(f"not sure: {found.unsure}", style="yellow")
    for warning in info.warnings:
        screen.line(f"warning: {warning}", style="yellow")


def _origin(found: Description) -> str:
    info = found.info
    if found.source == "table":
        return "from the table of published checkpoints: no files of it are here"
    if found.source == "folder":
        return f"from {info.path}"
    return f"commit {(info.commit or 'unknown')[:12]}, from {info.path}"


def _sampling(info: ModelInfo) -> str:
    if not info.temperature:
        return "greedy, where the spec leaves it open"
    return (
        f"temperature {info.temperature:g}, top_p {info.top_p:g}, top_k {info.top_k}, where the "
        "spec leaves them open"
    )


def _weights(weights: Weights) -> str:
    told = (
        f"{weights.num_parameters:,} parameters in {weights.num_tensors:,} tensors, "
        f"{size(weights.num_bytes)}"
    )
    if weights.stored is None:
        return f"{told} in bfloat16, by the config; no files of them are here"
    dtypes = " and ".join(sorted(weights.stored))
    files = "1 file" if weights.num_files == 1 else f"{weights.num_files} files"
    return f"{told} of {dtypes} in {files}, whole and as the config says"


def _document(found: Description) -> dict[str, object]:
    info = found.info
    return {
        "name": info.name,
        "source": found.source,
        "path": None if found.source == "table" else str(info.path),
        "commit": info.commit,
        "family": info.family.name,
        "architecture": info.family.architecture,
        "exact_for_family": info.family.exact,
        "block_length": info.block_length,
        "mask_id": info.mask_id,
        "stop_ids": list(info.stop_ids),
        "num_forbidden_ids": len(info.forbidden_ids),
        "vocab_size": info.vocab_size,
        "max_context": info.max_context,
        "has_chat_template": info.has_chat_template,
        "temperature": info.temperature,
        "top_p": info.top_p,
        "top_k": info.top_k,
        "confidence": info.family.confidence,
        "threshold": info.threshold,
        "weights": asdict(found.weights),
        "kv_bytes_per_token": info.sizes.kv_bytes(2),
        "weight_hash": info.weight_hash or None,
        "unsure": found.unsure,
        "warnings": list(info.warnings),
    }


def size(num_bytes: int) -> str:
    """Bytes in a unit that fits."""
    amount = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.2f} GB"
