"""Training the bundled target: causal warm-up, then conversion to block diffusion.

The schedule is counted in steps. Every draw, of data and of noise, is addressed by the seed and
the step, so a run that resumes from a checkpoint goes on as if it had never stopped.
"""

import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Model

from spot_batch.lab.bundled.corpus import held_out_problems
from spot_batch.lab.bundled.evaluation import AnswerFigures, evaluate
from spot_batch.lab.bundled.layout import Rows, causal_piece, diffusion_pieces, pack, visibility
from spot_batch.lab.bundled.model import ModelSize, hidden_rows, make_model, tied_logits
from spot_batch.lab.bundled.sources import ExtraSource, SampleSource
from spot_batch.lab.bundled.tokenizer import END_OF_TEXT, MASK, save_tokenizer, train_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A stretch of training with one objective; lr goes from `lr` to `final_lr` by a cosine."""

    objective: Literal["causal", "diffusion"]
    steps: int
    batch: int
    lr: float
    final_lr: float
    warmup: int = 0
    block_length: int = 32
    hard_share: float = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSettings:
    """All that a trained target depends on."""

    phases: tuple[Phase, ...]
    seed: int = 0
    size: ModelSize = field(default_factory=ModelSize)
    block_length: int = 32
    max_tokens: int = 160
    causal_row: int = 256
    diffusion_row: int = 384
    extra_block_share: float = 0.1
    prompt_weight: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float = 0.999  # at most: an average forgets what is older than its phase
    extras: tuple[ExtraSource, ...] = ()
    tokenizer_problems: int = 20_000
    checkpoint_steps: int = 100
    evaluate_steps: int = 500
    num_evaluated: int = 40
    keep_checkpoints: int = 3
    mixed_precision: bool = True

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("a target needs at least one phase")


def bundled_recipe(block_length: int, extras: tuple[ExtraSource, ...]) -> TargetSettings:
    """The bundled target: two runs of about an hour on one core."""
    return TargetSettings(
        phases=(
            causal_phase(steps=400, hard_share=0.2, warmup=50),
            causal_phase(steps=300, hard_share=0.4),
            diffusion_phase(block_length=8, steps=60, lr=2e-3, warmup=20),
            diffusion_phase(block_length=block_length, steps=1340, lr=2.5e-3, final_lr=4e-4),
            diffusion_phase(
                block_length=block_length,
                steps=1300,
                lr=1.2e-3,
                final_lr=3e-5,
                warmup=30,
                hard_share=0.3,
            ),
        ),
        block_length=block_length,
        extras=extras,
    )


def small_recipe(block_length: int, extras: tuple[ExtraSource, ...]) -> TargetSettings:
    """A target of 0.6M parameters, to have more than one: about a quarter of an hour."""
    return TargetSettings(
        phases=(
            causal_phase(steps=500, hard_share=0.2, warmup=50),
            diffusion_phase(block_length=8, steps=60, lr=2e-3, warmup=20),
            diffusion_phase(block_length=block_length, steps=1500, lr=3e-3, final_lr=5e-5),
        ),
        size=ModelSize(
            hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=320
        ),
        block_length=block_length,
        extras=extras,
    )


RECIPES = {"bundled": bundled_recipe, "small": small_recipe}


def causal_phase(*, steps: int, hard_share: float, warmup: int = 0) -> Phase:
    """A phase of next-token training at the peak rate."""
    return Phase(
        objective="causal",
        steps=steps,
        batch=40,
        lr=3e-3,
        final_lr=3e-3,
        warmup=warmup,
        hard_share=hard_share,
    )


def diffusion_phase(
    *,
    block_length: int,
    steps: int,
    lr: float,
    final_lr: float | None = None,
    warmup: int = 0,
    hard_share: float = 0.4,
) -> Phase:
    """A phase of block diffusion at one block length."""
    return Phase(
        objective="diffusion",
        steps=steps,
        batch=32,
        lr=lr,
        final_lr=lr if final_lr is None else final_lr,
        warmup=warmup,
        block_length=block_length,
        hard_share=hard_share,
    )


@dataclass(slots=True)
class Training:
    """A run in memory: weights, their average, the optimisers' moments, and where it stands."""

    model: Qwen3Model
    average: dict[str, Tensor]
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: int = 0
    num_samples: int = 0
    elapsed_s: float = 0.0


def train_target(settings: TargetSettings, out: Path, *, stop_at: int | None = None) -> Path:
    """Train from the newest checkpoint under `out`, or from scratch; returns the last checkpoint.

    `stop_at` ends the run early at that step, to be resumed later.
    """
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = ready_tokenizer(settings, out)
    source = SampleSource(
        tokenizer, seed=settings.seed, max_tokens=settings.max_tokens, extras=settings.extras
    )
    training = start_or_resume(settings, out)
    last = sum(phase.steps for phase in settings.phases)
    last = last if stop_at is None else min(last, stop_at)
    while training.step < last:
        started = time.monotonic()
        phase, within = phase_at(settings, training.step)
        loss, norm = train_step(training, settings, phase, within, source, tokenizer)
        training.elapsed_s += time.monotonic() - started
        log_step(out, training, phase, within, loss, norm)
        if training.step % settings.evaluate_steps == 0 and phase.objective == "diffusion":
            log_figures(out, training, evaluate_average(training, settings, tokenizer))
        due = training.step % settings.checkpoint_steps == 0 or training.step == last
        if due or training.step in phase_ends(settings):
            save_checkpoint(settings, out, training)
    return newest_checkpoint(out)


def train_step(
    training: Training,
    settings: TargetSettings,
    phase: Phase,
    within: int,
    source: SampleSource,
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[float, float]:
    """One step of one phase: the loss and the gradient's norm before clipping."""
    rows = rows_at(training, settings, phase, source, tokenizer)
    loss = rows_loss(training.model, rows, settings=settings, mask_id=mask_id_of(tokenizer))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), settings.clip)
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, within)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    training.step += 1
    training.num_samples += phase.batch
    update_average(training, min(settings.ema, (1 + within) / (10 + within)))
    return float(loss.detach()), float(norm)


def rows_at(
    training: Training,
    settings: TargetSettings,
    phase: Phase,
    source: SampleSource,
    tokenizer: PreTrainedTokenizerFast,
) -> Rows:
    """The rows of the coming step: the next samples, noised by the step's own generator."""
    samples = source.batch(training.num_samples, phase.batch, hard_share=phase.hard_share)
    fill_id = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    if phase.objective == "causal":
        pieces = [
            causal_piece(sample, fill_id=fill_id, prompt_weight=settings.prompt_weight)
            for sample in samples
        ]
        return pack(pieces, row_length=settings.causal_row, fill_id=fill_id)
    pieces = diffusion_pieces(
        samples,
        block_length=phase.block_length,
        fill_id=fill_id,
        mask_id=mask_id_of(tokenizer),
        extra_block_share=settings.extra_block_share,
        rng=np.random.default_rng([settings.seed, training.step]),
    )
    longest = max(len(piece.tokens) for piece in pieces)
    return pack(pieces, row_length=max(settings.diffusion_row, longest), fill_id=fill_id)


def rows_loss(model: Qwen3Model, rows: Rows, *, settings: TargetSettings, mask_id: int) -> Tensor:
    """The weighted mean cross-entropy over the rows' learnt places."""
    learnt = rows.weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.mixed_precision):
        hidden = hidden_rows(model, rows.tokens, rows.positions, visibility(rows))
        logits = tied_logits(model, hidden[learnt], mask_id=mask_id)
    losses = F.cross_entropy(logits, rows.targets[learnt], reduction="none")
    weights = rows.weights[learnt]
    return (losses * weights).sum() / weights.sum()


def phase_at(settings: TargetSettings, step: int) -> tuple[Phase, int]:
    """The phase that step `step` belongs to and its index therein."""
    for phase in settings.phases:
        if step < phase.steps:
            return phase, step
        step -= phase.steps
    raise AssertionError("the step lies beyond the schedule")


def phase_ends(settings: TargetSettings) -> list[int]:
    """The steps at which a phase has just ended."""
    return list(itertools.accumulate(phase.steps for phase in settings.phases))


def learning_rate(phase: Phase, within: int) -> float:
    """Linear warm-up, then a cosine from lr to final_lr at the end of the phase."""
    if within < phase.warmup:
        return phase.lr * (within + 1) / phase.warmup
    along = (within - phase.warmup) / max(phase.steps - phase.warmup, 1)
    return phase.final_lr + (phase.lr - phase.final_lr) * 0.5 * (1 + math.cos(math.pi * along))


def mask_id_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of the mask token."""
    mask_id: int = tokenizer.convert_tokens_to_ids(MASK)
    return mask_id


@torch.no_grad()
def update_average(training: Training, decay: float) -> None:
    """Move the weights' average towards the weights."""
    for name, weight in training.model.named_parameters():
        training.average[name].lerp_(weight, 1 - decay)


# ---------------------------------------------------------------------------- making, keeping


def ready_tokenizer(settings: TargetSettings, out: Path) -> PreTrainedTokenizerFast:
    """The run's tokenizer, trained once."""
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(
            train_tokenizer(
                vocab_size=settings.size.vocab_size,
                seed=settings.seed,
                num_problems=settings.tokenizer_problems,
            ),
            folder,
        )
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A saved tokenizer."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def fresh_training(settings: TargetSettings) -> Training:
    """A run at step 0."""
    model = make_model(settings.size, seed=settings.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    # Muon (Jordan et al. 2024) takes fewer steps than AdamW on matrices; scaled to AdamW's updates,
    # both follow one rate.
    optimizers = (
        torch.optim.Muon(
            matrices, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return Training(model, average, optimizers)


def start_or_resume(settings: TargetSettings, out: Path) -> Training:
    """The run as its newest checkpoint left it, or a fresh one."""
    training = fresh_training(settings)
    if not checkpoints(out):
        return training
    folder = newest_checkpoint(out)
    require_same(settings, json.loads((folder / "state.json").read_text())["settings"], out)
    logger.info("resuming from %s", folder.name)
    training.model.load_state_dict(load_file(folder / "model.safetensors"))
    training.average = load_file(folder / "average.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    named = dict(training.model.named_parameters())
    owner = {id(w): o for o in training.optimizers for g in o.param_groups for w in g["params"]}
    for entry, value in moments.items():
        key, name = entry.split("/", 1)
        owner[id(named[name])].state[named[name]][key] = value
    state = json.loads((folder / "state.json").read_text())
    training.step = state["step"]
    training.num_samples = state["num_samples"]
    training.elapsed_s = state["elapsed_s"]
    return training


def require_same(settings: TargetSettings, begun: dict[str, object], out: Path) -> None:
    """Raise ValueError naming the first setting in which a run was begun otherwise."""
    mine = json.loads(json.dumps(asdict(settings), default=str))
    for name, value in mine.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{out} was begun with {name} {begun.get(name)!r}, not {value!r}: "
                "go on with the same recipe and options, or train into an empty folder"
            )


def save_checkpoint(settings: TargetSettings, out: Path, training: Training) -> None:
    """Write a checkpoint whole, then drop all but the newest few and every phase's last."""
    folder = out / f"checkpoint-{training.step:06d}"
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    weights = dict(training.model.named_parameters())
    tensors = {name: weight.detach() for name, weight in weights.items()}
    save_file(tensors, partial / "model.safetensors")
    save_file(training.average, partial / "average.safetensors")
    moments = {
        f"{key}/{name}": value
        for name, weight in weights.items()
        for optimizer in training.optimizers
        for key, value in optimizer.state.get(weight, {}).items()
    }
    save_file(moments, partial / "optimizer.safetensors")
    state = {
        "step": training.step,
        "num_samples": training.num_samples,
        "elapsed_s": training.elapsed_s,
        "settings": asdict(settings),
    }
    (partial / "state.json").write_text(json.dumps(state, indent=1, default=str))
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
    kept = checkpoints(out)[-settings.keep_checkpoints :]
    for old in checkpoints(out):
        if old not in kept and step_of(old) not in phase_ends(settings):
            shutil.rmtree(old)


def step_of(checkpoint: Path) -> int:
    """The step a checkpoint was taken at."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints under `out`, oldest first."""
    return sorted(path for path in out.glob("checkpoint-*") if path.suffix != ".partial")


def newest_checkpoint(out: Path) -> Path:
    """The checkpoint a resumed run goes on from."""
    found = checkpoints(out)
    if not found:
        raise ValueError(f"{out} holds no checkpoint")
    return found[-1]


# --------------------------------------------------------------------------------- accounting


def evaluate_average(
    training: Training, settings: TargetSettings, tokenizer: PreTrainedTokenizerFast
) -> AnswerFigures:
    """Held-out figures of the averaged weights."""
    model = make_model(settings.size, seed=settings.seed)
    model.load_state_dict(training.average)
    problems = list(held_out_problems(settings.num_evaluated, seed=settings.seed))
    return evaluate(model, tokenizer, problems, block_length=settings.block_length)


def log_step(
    out: Path, training: Training, phase: Phase, within: int, loss: float, norm: float
) -> None:
    """Append a step to losses.jsonl."""
    row: dict[str, object] = {
        "step": training.step,
        "objective": phase.objective,
        "block_length": phase.block_length if phase.objective == "diffusion" else None,
        "loss": round(loss, 5),
        "grad_norm": round(norm, 4),
        "lr": learning_rate(phase, within),
        "elapsed_s": round(training.elapsed_s, 1),
    }
    append_row(out / "losses.jsonl", row)
    if training.step % 20 == 0:
        logger.info(
            "step %d %s loss %.4f norm %.2f at %.0f s",
            training.step, phase.objective, loss, norm, training.elapsed_s,
        )  # fmt: skip


def log_figures(out: Path, training: Training, figures: AnswerFigures) -> None:
    """Append an evaluation to figures.jsonl."""
    append_row(out / "figures.jsonl", {"step": training.step, **asdict(figures)})
    logger.info("step %d %s", training.step, figures)


def append_row(path: Path, row: dict[str, object]) -> None:
    """Append one JSON line."""
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> Iterator[dict[str, float]]:
    """The rows of a JSON-lines log."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
