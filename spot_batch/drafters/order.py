"""The order drafter (SPOT): which masked position does the target commit next?

A small pre-norm transformer over the positions of a block. It reads the stale distributions and
which positions have been fixed since, never tokens, so it does not depend on a vocabulary.
Two outputs a position: the score of being next, and whether the candidate token will still be the
target's when its position is chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from spot_batch.drafters.base import Proposals, best_edges
from spot_batch.drafters.distributions import (
    COMMITTED,
    MASKED,
    TOP_K,
    Candidates,
    Queries,
    StaleStore,
    candidates,
    tail_mass,
)
from spot_batch.records.sampling import NoiseRule

KIND = "order"
_LOG_ODDS_SCALE = 8.0
_MOST_ODDS = 60.0  # at temperature 0.5 odds are squared: a sure token's log-odds pass 30
_SECOND_SHARE = 0.6
"""Of the commits that are not the candidate token, this share is its runner-up: 0.65 one commit
after the stale state, 0.53 after six (the bundled target at temperatures 0 to 1.5)."""

_MOST_LAYERS, _MOST_WIDE = 256, 65_536  # beyond, a card is in error


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderConfig:
    """Shape of an order drafter."""

    block_length: int
    num_layers: int = 3
    hidden_size: int = 128
    num_heads: int = 8
    top_k: int = TOP_K

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            most = _MOST_LAYERS if name == "num_layers" else _MOST_WIDE
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
            )

    @property
    def num_features(self) -> int:
        """Reals a position: the stale probabilities and four more, see `order_features`."""
        return self.top_k + 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What makes an order model's probabilities the shares they claim to be.

    One entry for each number of commits since the stale state, from 1 on; the last one serves all
    beyond. Scores are divided by `order`; agreement logits are divided by `agreement`, then
    `offset` is added. No value changes an output, only which states are drafted.
    """

    order: tuple[float, ...] = (1.0,)
    agreement: tuple[float, ...] = (1.0,)
    offset: tuple[float, ...] = (0.0,)

    def __post_init__(self) -> None:
        if not len(self.order) == len(self.agreement) == len(self.offset) > 0:
            raise ValueError("order, agreement and offset want one entry a depth each")
        for name, values in (("order", self.order), ("agreement", self.agreement)):
            for value in values:
                if not (math.isfinite(value) and value > 0.0):
                    raise ValueError(f"{name} holds {value}; a temperature is above 0")
        if not all(math.isfinite(value) for value in self.offset):
            raise ValueError("offset holds what is not finite")

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """(3, depths) float32: order, agreement, offset."""
        return torch.tensor((self.order, self.agreement, self.offset), device=device)


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
        # The bfloat16 kernel of CPUs takes ten times as long backward, and heads are narrow.
        with torch.autocast(x.device.type, enabled=False):
            mixed = functional.scaled_dot_product_attention(
                query.float(), key.float(), value.float()
            )
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
        self.features = nn.Linear(config.num_features, size)
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
    tail = tail_mass(found.log_prob)
    entropy = -(probability * found.log_prob.clamp_min(-30.0)).sum(dim=2)
    entropy = entropy - tail * tail.clamp_min(1e-12).log()
    log_odds = found.log_odds.clamp(-_MOST_ODDS, _MOST_ODDS) / _LOG_ODDS_SCALE
    since = (staleness[:, None] / width).expand(-1, width)
    rest = torch.stack((tail, entropy, log_odds, since), dim=2)
    features = torch.cat((functional.pad(probability, (0, missing)), rest), dim=2)
    return features.masked_fill((status == COMMITTED)[:, :, None], 0.0)


def edge_weights(
    score: Tensor, agreement: Tensor, status: Tensor, staleness: Tensor, calibration: Tensor
) -> tuple[Tensor, Tensor]:
    """What a model says of (q, W) positions, (q,) commits since the stale state and a calibration's
    table -> two (q, W) probabilities: that the target commits the candidate token there next, and
    that it commits another one there.

    0 where the position is not masked.
    """
    depth = staleness.long().clamp(1, calibration.shape[1]) - 1
    heat, doubt, offset = calibration[:, depth, None]
    score = (score / heat).masked_fill(status != MASKED, -torch.inf)
    order: Tensor = score.softmax(dim=1).nan_to_num(nan=0.0)
    stands = torch.sigmoid(agreement / doubt + offset)
    return order * stands, order * (1.0 - stands)


class OrderDrafter:
    """The order model at work."""

    def __init__(
        self,
        model: OrderModel,
        name: str = KIND,
        *,
        calibration: Calibration | None = None,
    ) -> None:
        self.model = model.eval()
        self.name = name
        self.calibration = calibration or Calibration()
        self._table = self.calibration.table(model.head.weight.device)

    @torch.inference_mode()
    def propose(self, stale: StaleStore, queries: Queries, noise_rule: NoiseRule) -> Proposals:
        """q(position | state) times the chance that the candidate token stands, and beside it the
        runner-up where it does not; see `Drafter`."""
        found = candidates(stale, queries, noise_rule)
        staleness = queries.num_committed - stale.num_committed[queries.row]
        score, agreement = self.model(
            order_features(found, queries.status, staleness.float()), queries.status
        )
        weight, other = edge_weights(score, agreement, queries.status, staleness, self._table)
        return best_edges(weight, found, second=_SECOND_SHARE * other)


def weights_file(path: Path) -> Path:
    """The tensors of the drafter PATH; the name may hold dots."""
    return path.with_name(path.name + ".safetensors")


def card_file(path: Path) -> Path:
    """The card of the drafter PATH."""
    return path.with_name(path.name + ".json")


def bare_path(path: Path) -> Path:
    """The drafter's PATH, whether or not one of its files was named."""
    return path.with_suffix("") if path.suffix in (".safetensors", ".json") else path


def save_order(
    model: OrderModel,
    path: Path,
    card: Mapping[str, object],
    *,
    calibration: Calibration | None = None,
) -> None:
    """Write PATH.safetensors and PATH.json: the tensors, and what they are. Each appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    partial = path.with_name(path.name + ".safetensors.partial")
    save_file(tensors, partial)
    partial.replace(weights_file(path))
    write_card(
        path,
        {
            "kind": KIND,
            "config": asdict(model.config),
            "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "calibration": asdict(calibration or Calibration()),
            **card,
        },
    )


def write_card(path: Path, card: Mapping[str, object]) -> None:
    """Write PATH.json, whole."""
    partial = path.with_name(path.name + ".json.partial")
    partial.write_text(json.dumps(card, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(card_file(path))


def load_order(path: Path, *, block_length: int, device: torch.device) -> OrderDrafter:
    """Load PATH.safetensors beside its PATH.json card.

    Raises ValueError naming the file where it is missing, truncated, or for another block length or
    top-k.
    """
    card = read_card(path)
    config, calibration = config_of(path, card), calibration_of(path, card)
    weights = weights_file(path)
    if config.block_length != block_length:
        raise ValueError(
            f"{weights}: the drafter is for block length {config.block_length}, "
            f"the target's is {block_length}"
        )
    if config.top_k != TOP_K:
        raise ValueError(f"{weights}: the drafter reads top-{config.top_k}, we keep top-{TOP_K}")
    # Shapes first: a card may claim a model of any size.
    with torch.device("meta"):
        model = OrderModel(config)
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    found = stored_shapes(weights)
    for name in [*wanted, *found]:
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"{weights}: not a drafter of its card's shape "
                f"({name}: {found.get(name, 'absent')}, want {wanted.get(name, 'none')})"
            )
    try:
        model.load_state_dict(load_file(weights), assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"{weights}: not a drafter of its card's shape ({error})") from error
    name = str(card.get("name", path.name))
    return OrderDrafter(model.float().to(device), name=name, calibration=calibration)


def stored_shapes(weights: Path) -> dict[str, list[int]]:
    """The shape of every tensor of a .safetensors file, from its header alone.

    Raises ValueError naming the file where it is missing or truncated.
    """
    try:
        with safe_open(weights, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{weights}: not a drafter's tensors ({error})") from error


def read_card(path: Path) -> dict[str, Any]:
    """The card of the drafter PATH. Raises ValueError naming the file."""
    file = card_file(path)
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


def config_of(path: Path, card: Mapping[str, Any]) -> OrderConfig:
    """The model's shape as PATH's card has it. Raises ValueError naming the file."""
    try:
        return OrderConfig(**card["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{card_file(path)}: not a config of ours ({error})") from error


def calibration_of(path: Path, card: Mapping[str, Any]) -> Calibration:
    """The calibration in PATH's card; none is the identity. Raises ValueError naming the file."""
    given = card.get("calibration")
    if given is None:
        return Calibration()
    try:
        return Calibration(
            **{name: tuple(float(value) for value in values) for name, values in given.items()}
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{card_file(path)}: not a calibration of ours ({error})") from error
