"""The order drafter (SPOT): which masked position does the target commit next?

A small pre-norm transformer over the positions of a block. It reads the stale distributions and
which positions have been fixed since, never tokens, so it does not depend on a vocabulary.
Two outputs a position: the score of being next, and whether the candidate token will still be the
target's when its position is chosen.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from spot_batch.drafters.base import Proposals, TokenGate, best_edges
from spot_batch.drafters.stale import (
    COMMITTED,
    MASKED,
    TOP_K,
    Candidates,
    Queries,
    StaleStore,
    candidates,
)
from spot_batch.records import NoiseKey

KIND = "order"
_LOG_ODDS_SCALE = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderConfig:
    """Shape of an order drafter."""

    block_length: int
    num_layers: int = 3
    hidden_size: int = 128
    num_heads: int = 8
    top_k: int = TOP_K

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )


class OrderLayer(nn.Module):
    """Pre-norm self-attention and a feed-forward of four times the width."""

    def __init__(self, config: OrderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.feed_norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(q, W, d) -> (q, W, d)"""
        num, width, size = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(num, width, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(num, width, size))
        fed: Tensor = self.down(functional.gelu(self.up(self.feed_norm(x))))
        return x + fed


class OrderModel(nn.Module):
    """(q, W, 36) features and (q, W) status -> (q, W) position scores, (q, W) agreement logits.

    With 3 layers, width 128 and a block of 32 it has 0.62M parameters.
    """

    def __init__(self, config: OrderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.features = nn.Linear(config.top_k + 4, size)
        self.position = nn.Embedding(config.block_length, size)
        self.status = nn.Embedding(3, size)
        self.layers = nn.ModuleList(OrderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(size)
        self.hidden = nn.Linear(size, size)
        self.head = nn.Linear(size, 2)

    def forward(self, features: Tensor, status: Tensor) -> tuple[Tensor, Tensor]:
        """Scores are not yet masked: the caller knows which positions are open."""
        x = self.features(features) + self.position.weight + self.status(status)
        for layer in self.layers:
            x = layer(x)
        score, agreement = self.head(functional.gelu(self.hidden(self.norm(x)))).unbind(dim=2)
        return score, agreement


def order_features(found: Candidates, status: Tensor, staleness: Tensor) -> Tensor:
    """Stale candidates, (q, W) status and (q,) commits since the stale state -> (q, W, 36).

    32 probabilities, tail mass, entropy, log-odds of the candidate under the query's noise, share
    of the block committed since. Zeros where the position was committed before the stale state.
    """
    width = status.shape[1]
    probability = found.log_prob.exp()
    missing = TOP_K - probability.shape[2]
    tail = (1.0 - probability.sum(dim=2)).clamp_min(0.0)
    entropy = -(probability * found.log_prob.clamp_min(-30.0)).sum(dim=2)
    entropy = entropy - tail * tail.clamp_min(1e-12).log()
    log_odds = found.log_odds.clamp(-24.0, 24.0) / _LOG_ODDS_SCALE
    since = (staleness[:, None] / width).expand(-1, width)
    rest = torch.stack((tail, entropy, log_odds, since), dim=2)
    features = torch.cat((functional.pad(probability, (0, missing)), rest), dim=2)
    return features.masked_fill((status == COMMITTED)[:, :, None], 0.0)


class OrderDrafter:
    """The order model at work."""

    def __init__(
        self, model: OrderModel, name: str = KIND, *, gate: TokenGate | None = None
    ) -> None:
        self.model = model.eval()
        self.gate = gate or TokenGate()
        self.name = name

    @torch.inference_mode()
    def propose(self, stale: StaleStore, queries: Queries, noise_key: NoiseKey) -> Proposals:
        """q(position | state) times the chance that the candidate token stands; see `Drafter`."""
        found = candidates(stale, queries, noise_key)
        staleness = queries.num_committed - stale.num_committed[queries.row]
        score, agreement = self.model(
            order_features(found, queries.status, staleness.float()), queries.status
        )
        masked = queries.status == MASKED
        order = score.masked_fill(~masked, -torch.inf).softmax(dim=1).nan_to_num(nan=0.0)
        return best_edges(order * torch.sigmoid(agreement), found, self.gate)


def save_order(model: OrderModel, path: Path, card: dict[str, object]) -> None:
    """Write PATH.safetensors and PATH.json: the tensors, and what they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, path.with_suffix(".safetensors"))
    described = {"kind": KIND, "config": asdict(model.config), **card}
    path.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def load_order(path: Path, *, block_length: int, device: torch.device) -> OrderDrafter:
    """Load PATH.safetensors beside its PATH.json card.

    Raises ValueError naming the file where it is missing, truncated, or for another block length or
    top-k.
    """
    card = read_card(path)
    try:
        config = OrderConfig(**card["config"])
    except TypeError as error:
        raise ValueError(f"{path.with_suffix('.json')}: not a config of ours ({error})") from error
    weights = path.with_suffix(".safetensors")
    if config.block_length != block_length:
        raise ValueError(
            f"{weights}: the drafter is for block length {config.block_length}, "
            f"the target's is {block_length}"
        )
    if config.top_k != TOP_K:
        raise ValueError(f"{weights}: the drafter reads top-{config.top_k}, we keep top-{TOP_K}")
    model = OrderModel(config)
    try:
        model.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights}: not a drafter of its card's shape ({error})") from error
    return OrderDrafter(model.to(device), name=str(card.get("name", path.stem)))


def read_card(path: Path) -> dict[str, Any]:
    """The card beside a drafter. Raises ValueError naming the file."""
    file = path.with_suffix(".json")
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: the drafter's card cannot be read ({error})") from error
    if (
        not isinstance(card, dict)
        or card.get("kind") != KIND
        or not isinstance(card.get("config"), dict)
    ):
        raise ValueError(f"{file}: not the card of an {KIND} drafter")
    return card
