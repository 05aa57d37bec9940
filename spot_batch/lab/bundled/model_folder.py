"""A checkpoint as a model folder, in the manner of the published SDAR, with its card."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spot_batch.lab.bundled.corpus import Problem
from spot_batch.lab.bundled.evaluation import AnswerFigures, evaluate
from spot_batch.lab.bundled.gsm8k import Gsm8kFigures
from spot_batch.lab.bundled.model import make_model
from spot_batch.lab.bundled.target import (
    TargetSettings,
    load_tokenizer,
    step_of,
)
from spot_batch.lab.bundled.tokenizer import END_OF_TEXT, IM_END, MASK, save_tokenizer

CARD_NOTES = """
Trained from nothing by this repository on a synthetic corpus that it generates
(`spot_batch.lab.bundled.corpus`): worked word problems, one-expression Python functions, list and
word instructions, short stories. It is made for tests, examples and measurements of decoding on a
laptop, and knows nothing beyond that corpus.

Causal warm-up with next-token loss, then block diffusion with BD3-LM's mask: the number of masks
of a block is uniform, a masked token weighs (free positions / masks), prompts are never noised,
row i scores position i, the response is filled with `<|endoftext|>` to the end of its block.
Averaged weights (EMA), stored in bfloat16, embeddings tied.
"""


def write_model_folder(
    checkpoint: Path,
    folder: Path,
    *,
    settings: TargetSettings,
    command: str,
    figures: AnswerFigures | None = None,
    remark: str = "",
) -> None:
    """Write a checkpoint's averaged weights as a model folder that appears whole.

    `remark` goes to the card: what a reader should know of this very run.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    weights = load_file(checkpoint / "average.safetensors")
    tokenizer_folder = checkpoint.parent / "tokenizer"
    notes = training_notes(step_of(checkpoint), state["num_samples"], state["elapsed_s"], figures)
    notes += ["", remark] if remark else []
    write_folder(weights, tokenizer_folder, folder, settings=settings, command=command, notes=notes)


def gsm8k_note(folder: Path, scores: Gsm8kFigures) -> None:
    """Add what GSM8K found to an exported folder's card."""
    card = folder / "README.md"
    card.write_text(
        card.read_text(encoding="utf-8")
        + f"GSM8K, {scores.num_prompts} questions, at most {scores.max_new_tokens} tokens, greedy: "
        f"{scores.accuracy:.3f} right, {scores.without_loop:.3f} without a repetition loop at the "
        "end.\n",
        encoding="utf-8",
    )


def evaluate_checkpoint(
    checkpoint: Path, problems: Sequence[Problem], *, settings: TargetSettings
) -> AnswerFigures:
    """Held-out figures of a checkpoint's averaged weights as they are exported, in bfloat16."""
    weights = load_file(checkpoint / "average.safetensors")
    model = make_model(settings.size, seed=settings.seed)
    model.load_state_dict({name: w.to(torch.bfloat16).float() for name, w in weights.items()})
    tokenizer = load_tokenizer(checkpoint.parent / "tokenizer")
    return evaluate(model, tokenizer, problems, block_length=settings.block_length)


def write_folder(
    weights: dict[str, torch.Tensor],
    tokenizer_folder: Path,
    folder: Path,
    *,
    settings: TargetSettings,
    command: str,
    notes: Sequence[str],
) -> None:
    """Write config, weights, tokenizer and card; an old folder is replaced at the end."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = load_tokenizer(tokenizer_folder)
    save_tokenizer(tokenizer, partial)
    mask_id, end_id, fill_id = tokenizer.convert_tokens_to_ids([MASK, IM_END, END_OF_TEXT])
    write_json(partial / "config.json", sdar_config(settings, mask_id=mask_id, fill_id=fill_id))
    write_json(
        partial / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [end_id, fill_id],
            "pad_token_id": fill_id,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    named = {f"model.{name}": weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(named, partial / "model.safetensors", metadata={"format": "pt"})
    num_parameters = sum(weight.numel() for weight in weights.values())
    (partial / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    card = render_card(settings, num_parameters=num_parameters, command=command, notes=notes)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        folder.replace(old)
        partial.replace(folder)
        shutil.rmtree(old)
    else:
        partial.replace(folder)


def sdar_config(settings: TargetSettings, *, mask_id: int, fill_id: int) -> dict[str, object]:
    """config.json as published SDAR checkpoints have it, with the block size and mask id said."""
    size = settings.size
    return {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": settings.block_length,
        "bos_token_id": fill_id,
        "eos_token_id": fill_id,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": size.ffn_size,
        "mask_token_id": mask_id,
        "max_position_embeddings": size.max_positions,
        "max_window_layers": size.num_layers,
        "model_type": "sdar",
        "num_attention_heads": size.num_heads,
        "num_hidden_layers": size.num_layers,
        "num_key_value_heads": size.num_kv_heads,
        "pad_token_id": fill_id,
        "rms_norm_eps": size.norm_eps,
        "rope_scaling": None,
        "rope_theta": size.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": size.vocab_size,
    }


def training_notes(
    step: int, num_samples: int, elapsed_s: float, figures: AnswerFigures | None
) -> list[str]:
    """What the card says of the run and of the held-out evaluation."""
    notes = [f"{step} steps, {num_samples} samples, {elapsed_s / 60:.0f} minutes of wall clock."]
    if figures is not None:
        notes += [
            "",
            f"Held-out, {figures.num_prompts} prompts, greedy, one commit a forward:",
            "",
            "| figure | share |",
            "|---|---|",
            f"| exact answers | {figures.exact:.3f} |",
            f"| exact, easy (numbers to 20) | {figures.exact_easy:.3f} |",
            f"| exact, hard (numbers to 99) | {figures.exact_hard:.3f} |",
            f"| exact, word problems | {figures.exact_math:.3f} |",
            f"| exact, Python functions | {figures.exact_code:.3f} |",
            f"| exact, lists and words | {figures.exact_list:.3f} |",
            f"| stories told as asked | {figures.exact_story:.3f} |",
            f"| ends by itself | {figures.ended:.3f} |",
            f"| mean confidence of a commit | {figures.mean_confidence:.3f} |",
            f"| stale argmax is the commit | {figures.stale_argmax:.3f} |",
            f"| stale confidence names the next position | {figures.stale_position:.3f} |",
        ]
    return notes


def render_card(
    settings: TargetSettings, *, num_parameters: int, command: str, notes: Sequence[str]
) -> str:
    """The model card."""
    size = settings.size
    lines = [
        "---",
        "library_name: spot-batch",
        "tags: [block-diffusion, sdar, synthetic]",
        "---",
        "# A small block-diffusion target",
        "",
        f"SDAR architecture (Qwen3 body, block-causal attention), block length "
        f"{settings.block_length}, {num_parameters / 1e6:.2f}M parameters: {size.num_layers} "
        f"layers, width {size.hidden_size}, {size.num_heads}/{size.num_kv_heads} heads x "
        f"{size.head_dim}, FFN {size.ffn_size}, vocabulary {size.vocab_size} (byte-level BPE, "
        f"every digit a token).",
        CARD_NOTES,
        f"Made by `{command}`, seed {settings.seed}.",
        "",
        *notes,
        "",
    ]
    return "\n".join(lines)


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
