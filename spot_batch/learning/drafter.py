"""Training an order drafter from trajectories."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from spot_batch.drafters.distributions import MASKED
from spot_batch.drafters.order import Calibration, OrderConfig, OrderModel
from spot_batch.learning.calibration import MAX_STATES, fit_calibration
from spot_batch.learning.figures import HeldOut, measure
from spot_batch.learning.queries import DepthLaw, Examples, draw_queries, make_examples
from spot_batch.learning.trajectories import Trajectories

logger = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16"]

_LOG_EVERY = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSettings:
    """How an order drafter is trained. `held_out` is the share of prompts it does not learn from:
    half of them calibrate it, the others are what figures are taken of."""

    config: OrderConfig
    depths: DepthLaw = field(default_factory=DepthLaw)
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    held_out: float = 0.1
    seed: int = 0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch must be at least 1, got {self.steps}, {self.batch}")
        if not 0.0 < self.held_out < 1.0:
            raise ValueError(f"held_out must be between 0 and 1, got {self.held_out}")


@dataclass(frozen=True, slots=True)
class TrainedDrafter:
    """An order model, its calibration and its held-out figures."""

    model: OrderModel
    calibration: Calibration
    held_out: HeldOut


def train_drafter(
    trajectories: Trajectories, settings: DrafterSettings, *, device: str | torch.device = "cpu"
) -> TrainedDrafter:
    """An order model of these trajectories, calibrated and measured on prompts it has not seen.

    Raises ValueError where the trajectories are of another block length, or of one prompt.
    """
    if trajectories.block_length != settings.config.block_length:
        raise ValueError(
            f"the trajectories are of block length {trajectories.block_length}, "
            f"the drafter's is {settings.config.block_length}"
        )
    train, held_out = trajectories.split(share=settings.held_out)
    if not len(train):
        raise ValueError(
            f"all {trajectories.num_prompts} prompts are held out; record more, or hold out less"
        )
    model = fitted_model(train, settings, torch.device(device))
    for_fit, for_figures = held_out.halves()
    calibration = Calibration()
    if not len(for_fit):
        logger.warning("one prompt alone is held out: the drafter is not calibrated")
    else:
        calibration = fit_calibration(model, for_fit.some(MAX_STATES, seed=settings.seed))
    figures = measure(model, calibration, for_figures, law=settings.depths, seed=settings.seed)
    return TrainedDrafter(model, calibration, figures)


def fitted_model(
    train: Trajectories, settings: DrafterSettings, device: torch.device
) -> OrderModel:
    """An order model fitted to these states."""
    generator = torch.Generator().manual_seed(settings.seed)
    model = seeded_model(settings.config, generator).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    ahead = train.num_ahead
    model.train()
    for step in range(settings.steps):
        rate = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * max(rate, 0.01)
        index, depth = draw_queries(ahead, settings.depths, settings.batch, generator)
        examples = make_examples(train, index, depth, device=device)
        low = settings.precision == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            loss = examples_loss(model, examples)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _LOG_EVERY == 0 or step == settings.steps - 1:
            logger.info("step %d: loss %.4f", step, loss.item())
    return model.eval()


def best_precision(device: str | torch.device) -> Precision:
    """bfloat16 where the device multiplies it, else float32."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def seeded_model(config: OrderConfig, generator: torch.Generator) -> OrderModel:
    """An order model whose weights depend on the generator alone."""
    model = OrderModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = 0.7 * parameter.shape[1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def examples_loss(model: OrderModel, examples: Examples) -> Tensor:
    """Cross-entropy of the next position, and of whether its candidate token stands."""
    score, agreement = model(examples.features, examples.status)
    score, agreement = score.float(), agreement.float()
    masked = examples.status == MASKED
    order = functional.cross_entropy(score.masked_fill(~masked, -1e9), examples.label)
    at_label = agreement.gather(1, examples.label[:, None]).squeeze(1)
    return order + functional.binary_cross_entropy_with_logits(at_label, examples.agrees.float())


def drafter_card(
    name: str,
    trajectories: Trajectories,
    settings: DrafterSettings,
    trained: TrainedDrafter,
) -> dict[str, object]:
    """What a drafter's card says of its making."""
    training = asdict(settings)
    training.pop("config")
    return {
        "name": name,
        **made_from(trajectories),
        "training": training,
        "held_out": trained.held_out.tree(),
    }


def made_from(trajectories: Trajectories) -> dict[str, object]:
    """What a card says of the trajectories that a drafter, or its calibration, was made from."""
    source = trajectories.source
    return {
        "target": source.target,
        "target_weights": source.weights,
        "jobs": list(source.jobs),
        "num_states": len(trajectories),
        "num_prompts": trajectories.num_prompts,
        "temperatures": trajectories.temperatures,
    }


def unseen(trajectories: Trajectories, card: Mapping[str, Any]) -> Trajectories:
    """The states that a drafter with this card did not learn from.

    Raises ValueError where it has learned from all of them.
    """
    training = card.get("training")
    share = training.get("held_out") if isinstance(training, dict) else None
    learned = [
        index for index, job in enumerate(trajectories.source.jobs) if job in card.get("jobs", ())
    ]
    if not learned or not isinstance(share, float):
        return trajectories
    seen = torch.isin(trajectories.job, torch.tensor(learned)) & (trajectories.place >= share)
    if bool(seen.all()):
        raise ValueError(
            "the drafter has learned from all these states; record some of other prompts"
        )
    return trajectories.take(~seen)
