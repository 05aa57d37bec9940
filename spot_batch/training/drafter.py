"""Training an order drafter from trajectories, and how good it is on held-out ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from spot_batch.drafters.order import OrderConfig, OrderModel, order_features
from spot_batch.drafters.stale import (
    COMMITTED,
    MASKED,
    SINCE,
    Candidates,
    Queries,
    StaleStore,
    candidates,
)
from spot_batch.training.trajectories import Trajectories

logger = logging.getLogger(__name__)

_LOG_EVERY = 200
_EVALUATION_QUERIES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSettings:
    """How an order drafter is trained. Depths are drawn geometrically with this mean, capped at
    `max_depth`, a fifth of them uniformly (algorithms.md B.4)."""

    config: OrderConfig
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    mean_depth: float = 2.0
    max_depth: int = 12
    uniform_share: float = 0.2
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch must be at least 1, got {self.steps}, {self.batch}")


@dataclass(frozen=True, slots=True)
class Examples:
    """Queries with their answers: status (q, W), label position (q,), whether the candidate token
    there is the target's (q,), and the features (q, W, 36)."""

    features: Tensor
    status: Tensor
    label: Tensor
    agrees: Tensor
    stale_best: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthFigures:
    """Held-out figures of one depth: shares of queries."""

    depth: int
    num_queries: int
    next_commit: float
    stale_confidence: float
    token_agrees: float
    mean_mass: float
    hit: float


def train_drafter(
    trajectories: Trajectories, settings: DrafterSettings
) -> tuple[OrderModel, list[DepthFigures]]:
    """An order model of these trajectories, and its held-out figures by depth.

    Raises ValueError where the trajectories are of another block length.
    """
    if trajectories.block_length != settings.config.block_length:
        raise ValueError(
            f"the trajectories are of block length {trajectories.block_length}, "
            f"the drafter's is {settings.config.block_length}"
        )
    train, held_out = trajectories.split(held_out=settings.held_out)
    generator = torch.Generator().manual_seed(settings.seed)
    model = seeded_model(settings.config, generator)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    model.train()
    for step in range(settings.steps):
        rate = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * max(rate, 0.01)
        index, depth = draw_queries(train, settings, generator)
        loss = examples_loss(model, make_examples(train, index, depth))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _LOG_EVERY == 0 or step == settings.steps - 1:
            logger.info("step %d: loss %.4f", step, loss.item())
    model.eval()
    return model, evaluate_drafter(model, held_out, max_depth=6, seed=settings.seed)


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
    masked = examples.status == MASKED
    order = functional.cross_entropy(score.masked_fill(~masked, -1e9), examples.label)
    at_label = agreement.gather(1, examples.label[:, None]).squeeze(1)
    return order + functional.binary_cross_entropy_with_logits(at_label, examples.agrees.float())


def draw_queries(
    trajectories: Trajectories, settings: DrafterSettings, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """States and how many commits after them to ask about, at least 1: two (q,) int64."""
    index = torch.randint(len(trajectories), (settings.batch,), generator=generator)
    ahead = trajectories.num_ahead[index].clamp_max(settings.max_depth)
    uniform = torch.rand(settings.batch, generator=generator)
    geometric = 1 + (uniform.log() / math.log1p(-1.0 / settings.mean_depth)).floor().long()
    even = 1 + (torch.rand(settings.batch, generator=generator) * ahead).floor().long()
    flat = torch.rand(settings.batch, generator=generator) < settings.uniform_share
    depth = torch.where(flat, even, geometric)
    return index, torch.minimum(depth, ahead).clamp_min(1)


def make_examples(trajectories: Trajectories, index: Tensor, depth: Tensor) -> Examples:
    """The queries (`index`, `depth`) with the features the engine would have asked with."""
    part = trajectories.take(index)
    stale = StaleStore(0, part.block_length, part.log_prob.shape[2], torch.device("cpu"))
    stale.log_prob = part.log_prob.float()
    stale.ids = part.ids.long()
    stale.num_committed = part.num_committed
    width = part.block_length
    committed = torch.arange(width) < depth[:, None]  # which of its future commits are done
    since = torch.zeros_like(part.masked)
    rows = torch.arange(len(index))[:, None].expand(-1, width)
    since[rows[committed], part.positions[committed]] = True
    status = torch.where(since, SINCE, torch.where(part.masked, MASKED, COMMITTED))
    queries = Queries(
        row=torch.arange(len(index)),
        status=status,
        start=part.start,
        num_committed=part.num_committed + depth,
        noise_key=part.noise_key,
        temperature=part.temperature,
        top_p=torch.ones(len(index)),
        top_k=torch.zeros(len(index), dtype=torch.int64),
    )
    found = candidates(stale, queries, "position_step")
    label = part.positions.gather(1, depth[:, None]).squeeze(1)
    token = part.tokens.gather(1, depth[:, None]).squeeze(1)
    agrees = found.token.gather(1, label[:, None]).squeeze(1) == token
    return Examples(
        order_features(found, status, depth.float()), status, label, agrees, _best(found, status)
    )


def _best(found: Candidates, status: Tensor) -> Tensor:
    """The stale-confidence baseline: the masked position of the most confident candidate."""
    return found.log_odds.masked_fill(status != MASKED, -torch.inf).argmax(dim=1)


@torch.inference_mode()
def evaluate_drafter(
    model: OrderModel, held_out: Trajectories, *, max_depth: int, seed: int
) -> list[DepthFigures]:
    """Next-commit accuracy and mass calibration by depth, beside the stale-confidence baseline."""
    generator = torch.Generator().manual_seed(seed)
    figures = []
    for depth in range(1, max_depth + 1):
        able = torch.nonzero(held_out.num_ahead >= depth).squeeze(1)
        if not len(able):
            break
        drawn = able[torch.randperm(len(able), generator=generator)[:_EVALUATION_QUERIES]]
        examples = make_examples(held_out, drawn, torch.full_like(drawn, depth))
        score, agreement = model(examples.features, examples.status)
        order = score.masked_fill(examples.status != MASKED, -torch.inf).softmax(dim=1)
        weight = order * torch.sigmoid(agreement)
        best = order.argmax(dim=1)
        right = best == examples.label
        figures.append(
            DepthFigures(
                depth=depth,
                num_queries=len(drawn),
                next_commit=_share(right),
                stale_confidence=_share(examples.stale_best == examples.label),
                token_agrees=_share(examples.agrees),
                mean_mass=weight.gather(1, best[:, None]).mean().item(),
                hit=_share(right & examples.agrees),
            )
        )
    return figures


def _share(hits: Tensor) -> float:
    return hits.float().mean().item()


def drafter_card(
    name: str,
    trajectories: Trajectories,
    settings: DrafterSettings,
    figures: Sequence[DepthFigures],
) -> dict[str, object]:
    """What a drafter's card says of its making."""
    num_held_out = max(1, round(len(trajectories.sample_id.unique()) * settings.held_out))
    trained = asdict(settings)
    trained.pop("config")
    return {
        "name": name,
        "target": trajectories.metadata["target"],
        "target_weights": trajectories.metadata["weights"],
        "num_states": len(trajectories),
        "num_held_out_samples": num_held_out,
        "temperatures": sorted({round(heat, 4) for heat in trajectories.temperature.tolist()}),
        "training": trained,
        "held_out": [asdict(one) for one in figures],
    }


def figures_table(figures: Sequence[DepthFigures]) -> str:
    """The held-out figures as Markdown."""
    lines = [
        "| depth | queries | next commit | stale confidence | token agrees | mean mass | hit |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {f.depth} | {f.num_queries} | {f.next_commit:.3f} | {f.stale_confidence:.3f} "
        f"| {f.token_agrees:.3f} | {f.mean_mass:.3f} | {f.hit:.3f} |"
        for f in figures
    ]
    return "\n".join(lines)
