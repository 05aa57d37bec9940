"""Calibrating the masses of draft trees, and measuring how far they are from what they claim.

A mass is a product of guesses, each made from a state that is itself guessed. So it is followed as
a tree follows it: from each recorded state the most probable guess is taken, asked again, and so
on, and the product is held against whether the target went that way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from spot_batch.drafters.distributions import SINCE
from spot_batch.drafters.order import Calibration, OrderModel, edge_weights
from spot_batch.learning.queries import ask, status_after
from spot_batch.learning.trajectories import Trajectories

MAX_DEPTH = 6
"""Depths with figures and a calibration of their own."""

MAX_STATES = 8_192
"""States that a calibration or figures are taken of; more add little."""

NUM_BINS = 10
CHUNK = 512  # states a call of the model

_FEWEST = 64  # answers that a depth wants for a fit of its own
_PRIOR = 0.1  # keeps the fit finite where all answers are alike
_STRIDE = 0.2  # how far the log of a temperature may well be from that of the depth before
_HEATS = (0.125, 8.0)  # of the scores: least and most


@dataclass(frozen=True, slots=True)
class Masses:
    """Masses of chain ends and what came of them: depth (n,), temperature, mass (n,) float32, hit
    (n,) bool."""

    depth: Tensor
    temperature: Tensor
    mass: Tensor
    hit: Tensor

    def take(self, index: Tensor) -> Masses:
        """Those at `index` (int64 or bool)."""
        return Masses(self.depth[index], self.temperature[index], self.mass[index], self.hit[index])

    @property
    def calibration_error(self) -> CalibrationError:
        return calibration_error(self.mass, self.hit)


@dataclass(frozen=True, slots=True)
class CalibrationError:
    """Percent: the mean distance of claimed from seen shares over bins of what is claimed, weighed
    by size, and what chance alone would show of it for claims that are right."""

    error: float
    by_chance: float


def calibration_error(claimed: Tensor, hit: Tensor) -> CalibrationError:
    """(n,) probabilities and whether they came true -> the expected calibration error."""
    assert claimed.shape == hit.shape, (claimed.shape, hit.shape)
    claimed = claimed.double()
    which = (claimed * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    zeros = torch.zeros(NUM_BINS, dtype=torch.float64)
    gap = zeros.index_add(0, which, claimed - hit.double()).abs()
    variance = zeros.index_add(0, which, claimed * (1 - claimed))
    chance = (2.0 / math.pi * variance).sqrt()  # mean absolute deviation of a normal variable
    num = max(1, len(claimed))
    return CalibrationError(100 * gap.sum().item() / num, 100 * chance.sum().item() / num)


class Chains:
    """The greedy chains of n states: `ask`, settle what depth weighs how, `advance`, as long as any
    trajectory goes on. A chain is alive while all its guesses came true."""

    def __init__(self, model: OrderModel, states: Trajectories) -> None:
        self._model = model
        self._device = model.head.weight.device
        self._states = states
        self._ahead = states.num_ahead
        self.depth = 1
        first = torch.ones(len(states), dtype=torch.int64)
        self._status = status_after(states, first)
        self.alive = torch.ones(len(states), dtype=torch.bool)
        self.mass = torch.ones(len(states))
        self._ask()

    @property
    def temperature(self) -> Tensor:
        return self._states.temperature

    def __len__(self) -> int:
        return len(self._states)

    def _ask(self) -> None:
        """Keep the chains whose trajectory goes on for `depth`, and ask about their ends."""
        kept = torch.nonzero(self._ahead >= self.depth).squeeze(1)
        self._states, self._ahead = self._states.take(kept), self._ahead[kept]
        self._status, self.alive, self.mass = self._status[kept], self.alive[kept], self.mass[kept]
        score, agreement, token = [], [], []
        for at in range(0, len(kept), CHUNK):
            index = torch.arange(at, min(at + CHUNK, len(kept)))
            part = self._states.take(index).to(self._device)
            status = self._status[index].to(self._device)
            depth = torch.full((len(index),), self.depth, device=self._device)
            features, found = ask(part, status, depth)
            scored, agreed = self._model(features, status)
            score.append(scored.float().cpu())
            agreement.append(agreed.float().cpu())
            token.append(found.token.cpu())
        width = self._states.block_length
        self._score = torch.cat([torch.zeros(0, width), *score])
        self._agreement = torch.cat([torch.zeros(0, width), *agreement])
        self._token = torch.cat([torch.zeros(0, width, dtype=torch.int64), *token])
        self.label = self._states.positions[:, self.depth]
        at_label = self._token.gather(1, self.label[:, None]).squeeze(1)
        self.agrees = at_label == self._states.tokens[:, self.depth]

    def agreement_at_label(self) -> tuple[Tensor, Tensor]:
        """Of the chains alive: (m,) agreement logits where the target committed, and (m,) whether
        the candidate there was its token."""
        logit = self._agreement.gather(1, self.label[:, None]).squeeze(1)
        return logit[self.alive], self.agrees[self.alive]

    def guesses(self, calibration: Calibration) -> tuple[Tensor, Tensor, Tensor]:
        """Of each end under a calibration: (n,) its best guess, the mass behind it, whether the
        target went there."""
        depth = torch.full((len(self),), self.depth)
        weight, _ = edge_weights(
            self._score, self._agreement, self._status, depth, calibration.table()
        )
        best = weight.argmax(dim=1)
        mass = self.mass * weight.gather(1, best[:, None]).squeeze(1)
        return best, mass, self.alive & self.agrees & (best == self.label)

    def advance(self, calibration: Calibration) -> None:
        """Take the best guess of each end as made."""
        best, self.mass, self.alive = self.guesses(calibration)
        self._status = self._status.scatter(1, best[:, None], SINCE)
        self.depth += 1
        self._ask()


@torch.inference_mode()
def chain_masses(
    model: OrderModel, calibration: Calibration, states: Trajectories, *, max_depth: int = MAX_DEPTH
) -> Masses:
    """The masses of greedy chains from these states, of every depth up to `max_depth`."""
    depth, temperature, masses, hits = [], [], [], []
    chains = Chains(model, states)
    while len(chains):
        _, mass, hit = chains.guesses(calibration)
        depth.append(torch.full((len(chains),), chains.depth))
        temperature.append(chains.temperature)
        masses.append(mass)
        hits.append(hit)
        if chains.depth == max_depth:
            break
        chains.advance(calibration)
    return Masses(torch.cat(depth), torch.cat(temperature), torch.cat(masses), torch.cat(hits))


@torch.inference_mode()
def fit_calibration(
    model: OrderModel, states: Trajectories, *, max_depth: int = MAX_DEPTH
) -> Calibration:
    """The calibration under which these states' masses are most likely, left to right: each depth
    is fitted on the products that the depths before it give.

    Depths with few answers take over what the depth before has.
    """
    order: list[float] = []
    agreement: list[float] = []
    offset: list[float] = []
    chains = Chains(model, states)
    for depth in range(1, max_depth + 1):
        logit, agrees = chains.agreement_at_label()
        if len(logit) < _FEWEST:
            break
        doubt, shift = _fit_agreement(logit, agrees)

        def calibrated(heat: float, doubt: float = doubt, shift: float = shift) -> Calibration:
            return Calibration(
                order=(*order, heat), agreement=(*agreement, doubt), offset=(*offset, shift)
            )

        heat = _fit_order(chains, calibrated, before=order[-1] if order else None)
        order.append(heat)
        agreement.append(doubt)
        offset.append(shift)
        if depth < max_depth:
            chains.advance(calibrated(heat))
    if not order:
        return Calibration()
    return Calibration(order=tuple(order), agreement=tuple(agreement), offset=tuple(offset))


def _fit_agreement(logit: Tensor, agrees: Tensor) -> tuple[float, float]:
    """Temperature and offset of agreement logits: logistic regression by damped Newton steps."""
    spread = float(logit.double().std().clamp_min(1e-3))
    x = torch.stack((logit.double() / spread, torch.ones(len(logit), dtype=torch.float64)), dim=1)
    answer = agrees.double()

    def loss(weight: Tensor) -> float:
        seen = functional.binary_cross_entropy_with_logits(x @ weight, answer, reduction="sum")
        return float(seen + 0.5 * _PRIOR * (weight @ weight))

    weight = torch.zeros(2, dtype=torch.float64)
    for _ in range(50):
        chance = torch.sigmoid(x @ weight)
        slope = x.T @ (chance - answer) + _PRIOR * weight
        curve = (x * (chance * (1 - chance))[:, None]).T @ x
        step = torch.linalg.solve(curve + _PRIOR * torch.eye(2, dtype=torch.float64), slope)
        while loss(weight - step) > loss(weight) and float(step.abs().max()) > 1e-9:
            step = step / 2
        weight = weight - step
        if float(step.abs().max()) < 1e-9:
            break
    scale = min(max(float(weight[0]) / spread, 0.05), 20.0)
    return round(1.0 / scale, 6), round(min(max(float(weight[1]), -20.0), 20.0), 6)


def _fit_order(
    chains: Chains, calibrated: Callable[[float], Calibration], *, before: float | None
) -> float:
    """The temperature of the scores under which the masses at this depth are most likely, near that
    of the depth `before`: else each depth would make up for what chance did to the last."""

    def loss(log_heat: float) -> float:
        _, mass, hit = chains.guesses(calibrated(math.exp(log_heat)))
        claimed = mass.double().clamp(1e-7, 1 - 1e-7)
        found = functional.binary_cross_entropy(claimed, hit.double(), reduction="sum").item()
        away = 0.0 if before is None else (log_heat - math.log(before)) / _STRIDE
        return found + 0.5 * away * away

    low, high = map(math.log, _HEATS)
    for _ in range(3):  # 21 points, then 21 about the best, twice
        step = (high - low) / 20
        best = min((low + step * at for at in range(21)), key=loss)
        low, high = max(low, best - step), min(high, best + step)
    return round(math.exp(best), 6)


def halves_for_fit(states: Trajectories) -> tuple[Trajectories, Trajectories]:
    """Prompts to fit on and prompts to measure on. Raises ValueError where there is only one."""
    for_fit, for_figures = states.halves()
    if not len(for_fit):
        raise ValueError("the trajectories are of one prompt; record more: half are for the fit")
    return for_fit, for_figures
