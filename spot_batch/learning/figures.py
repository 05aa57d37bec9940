"""How good a drafter is on held-out trajectories: accuracy and calibration, by what it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from spot_batch.drafters.distributions import MASKED
from spot_batch.drafters.order import Calibration, OrderModel, edge_weights
from spot_batch.learning.calibration import (
    CHUNK,
    MAX_DEPTH,
    MAX_STATES,
    Masses,
    calibration_error,
    chain_masses,
)
from spot_batch.learning.queries import DepthLaw, draw_depths, make_examples, plainly_most_confident
from spot_batch.learning.trajectories import Trajectories


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryFigures:
    """Figures of some queries. Shares: `next_commit` of best positions that were committed next,
    `stale_confidence` and `plain_confidence` of the baseline's with and without the noise,
    `token_agrees` of candidate tokens at the position committed that were its token,
    `agreement_right` of guesses whether they would be, `hit` of best guesses right in both.

    Percent: `edge_error`, the calibration error of the best guess's probability, and `mass_error`
    of chains of such guesses, each beside what chance alone would show.
    """

    depth: int | None = None
    temperature: float | None = None
    masks_left: str | None = None
    num_queries: int
    next_commit: float
    stale_confidence: float
    plain_confidence: float
    token_agrees: float
    agreement_right: float
    hit: float
    edge_error: float
    edge_by_chance: float
    mass_error: float | None = None
    mass_by_chance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """All figures of a drafter. `overall` asks at depths as training draws them, and its mass error
    is of all depths; the tables ask about every state at every depth."""

    num_prompts: int
    num_states: int
    overall: QueryFigures
    by_depth: tuple[QueryFigures, ...]
    by_temperature: tuple[QueryFigures, ...]
    by_masks_left: tuple[QueryFigures, ...]

    def tree(self) -> dict[str, object]:
        """As JSON, without what a group does not have."""
        return {
            "num_prompts": self.num_prompts,
            "num_states": self.num_states,
            "overall": _tree(self.overall),
            "by_depth": [_tree(each) for each in self.by_depth],
            "by_temperature": [_tree(each) for each in self.by_temperature],
            "by_masks_left": [_tree(each) for each in self.by_masks_left],
        }


@dataclass(frozen=True, slots=True)
class _Answers:
    """What a drafter answered to queries, and how it was: all (q,)."""

    depth: Tensor
    temperature: Tensor
    num_masked: Tensor
    right: Tensor
    stale_right: Tensor
    plain_right: Tensor
    agrees: Tensor
    agreement_right: Tensor
    weight: Tensor
    hit: Tensor

    def take(self, index: Tensor) -> _Answers:
        return _Answers(*(getattr(self, name)[index] for name in _FIELDS))


_FIELDS = tuple(_Answers.__dataclass_fields__)


def measure(
    model: OrderModel,
    calibration: Calibration,
    held_out: Trajectories,
    *,
    law: DepthLaw,
    seed: int,
    max_depth: int = MAX_DEPTH,
) -> HeldOut:
    """The figures of an order model on states that it has not learned from."""
    assert len(held_out), "no held-out state"
    generator = torch.Generator().manual_seed(seed)
    states = held_out.some(MAX_STATES, seed=seed)
    ahead = states.num_ahead
    drawn = _answers(
        model, calibration, states, torch.arange(len(states)), draw_depths(ahead, law, generator)
    )
    asked = [
        (at, torch.full_like(at, depth))
        for depth in range(1, max_depth + 1)
        if len(at := torch.nonzero(ahead >= depth).squeeze(1))
    ]
    index = torch.cat([at for at, _ in asked])
    answers = _answers(model, calibration, states, index, torch.cat([depth for _, depth in asked]))
    masses = chain_masses(model, calibration, states, max_depth=max_depth)
    return HeldOut(
        num_prompts=states.num_prompts,
        num_states=len(states),
        overall=_figures(drawn, masses),
        by_depth=tuple(_by_depth(answers, masses)),
        by_temperature=tuple(_by_temperature(answers, masses)),
        by_masks_left=tuple(_by_masks_left(answers)),
    )


@torch.inference_mode()
def _answers(
    model: OrderModel,
    calibration: Calibration,
    states: Trajectories,
    index: Tensor,
    depth: Tensor,
) -> _Answers:
    device = model.head.weight.device
    table = calibration.table(device)
    parts = []
    for at in range(0, len(index), CHUNK):
        rows, deep = index[at : at + CHUNK], depth[at : at + CHUNK]
        part = states.take(rows).to(device)
        asked = make_examples(states, rows, deep, device=device)
        score, agreement = model(asked.features, asked.status)
        weight, _ = edge_weights(score, agreement, asked.status, asked.depth, table)
        # The best position by the order head alone is what "next commit" speaks of.
        masked = asked.status == MASKED
        next_one = score.masked_fill(~masked, -torch.inf).argmax(dim=1)
        doubt, offset = table[1:, asked.depth.clamp_max(table.shape[1]) - 1]
        believed = agreement.gather(1, asked.label[:, None]).squeeze(1) / doubt + offset > 0
        best = weight.argmax(dim=1)
        plain = plainly_most_confident(part, asked.status, asked.depth)
        of_chunk = _Answers(
            depth=asked.depth,
            temperature=part.temperature,
            num_masked=masked.sum(dim=1),
            right=next_one == asked.label,
            stale_right=asked.stale_best == asked.label,
            plain_right=plain == asked.label,
            agrees=asked.agrees,
            agreement_right=believed == asked.agrees,
            weight=weight.gather(1, best[:, None]).squeeze(1),
            hit=asked.agrees & (best == asked.label),
        )
        parts.append([getattr(of_chunk, name).cpu() for name in _FIELDS])
    return _Answers(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _by_depth(answers: _Answers, masses: Masses) -> Iterator[QueryFigures]:
    for depth in answers.depth.unique().tolist():
        yield _figures(
            answers.take(answers.depth == depth),
            masses.take(masses.depth == depth),
            depth=depth,
        )


def _by_temperature(answers: _Answers, masses: Masses) -> Iterator[QueryFigures]:
    for heat in answers.temperature.unique().tolist():
        of_heat = answers.take(answers.temperature == heat)
        for depth in of_heat.depth.unique().tolist():
            yield _figures(
                of_heat.take(of_heat.depth == depth),
                masses.take((masses.temperature == heat) & (masses.depth == depth)),
                temperature=round(heat, 4),
                depth=depth,
            )


def _by_masks_left(answers: _Answers) -> Iterator[QueryFigures]:
    """In powers of two: 1, 2-3, 4-7, ..."""
    bucket = answers.num_masked.double().log2().floor().long()
    for power in bucket.unique().tolist():
        first, last = 2**power, 2 ** (power + 1) - 1
        yield _figures(
            answers.take(bucket == power),
            None,
            masks_left=str(first) if first == last else f"{first}-{last}",
        )


def _figures(
    answers: _Answers,
    masses: Masses | None,
    *,
    depth: int | None = None,
    temperature: float | None = None,
    masks_left: str | None = None,
) -> QueryFigures:
    edge = calibration_error(answers.weight, answers.hit)
    mass = None if masses is None else masses.calibration_error
    return QueryFigures(
        depth=depth,
        temperature=temperature,
        masks_left=masks_left,
        num_queries=len(answers.depth),
        next_commit=_share(answers.right),
        stale_confidence=_share(answers.stale_right),
        plain_confidence=_share(answers.plain_right),
        token_agrees=_share(answers.agrees),
        agreement_right=_share(answers.agreement_right),
        hit=_share(answers.hit),
        edge_error=round(edge.error, 3),
        edge_by_chance=round(edge.by_chance, 3),
        mass_error=None if mass is None else round(mass.error, 3),
        mass_by_chance=None if mass is None else round(mass.by_chance, 3),
    )


def _share(hits: Tensor) -> float:
    return round(hits.double().mean().item(), 5)


def _tree(figures: QueryFigures) -> dict[str, object]:
    return {name: value for name, value in asdict(figures).items() if value is not None}


def tables(held_out: HeldOut) -> str:
    """All figures as Markdown."""
    overall = held_out.overall
    head = (
        f"{held_out.num_states:,} held-out states of {held_out.num_prompts:,} prompts. At depths "
        f"as training draws them: next commit {overall.next_commit:.3f}, stale confidence "
        f"{overall.stale_confidence:.3f}; calibration error of all masses {overall.mass_error:.2f} "
        f"% (by chance {overall.mass_by_chance:.2f} %)."
    )
    return "\n\n".join(
        [
            head,
            _table(("depth",), held_out.by_depth),
            _table(("temperature", "depth"), held_out.by_temperature),
            _table(("masks_left",), held_out.by_masks_left),
        ]
    )


_SHARES = {
    "next commit": "next_commit",
    "stale confidence": "stale_confidence",
    "without noise": "plain_confidence",
    "token agrees": "token_agrees",
    "agreement right": "agreement_right",
    "hit": "hit",
}
_ERRORS = {"edge error %": "edge", "mass error %": "mass"}


def _table(keys: Sequence[str], rows: Sequence[QueryFigures]) -> str:
    errors = {
        title: name
        for title, name in _ERRORS.items()
        if any(getattr(row, f"{name}_error") is not None for row in rows)
    }
    titles = [*(key.replace("_", " ") for key in keys), "queries", *_SHARES, *errors]
    lines = []
    for row in rows:
        cells = [str(getattr(row, key)) for key in keys] + [f"{row.num_queries:,}"]
        cells += [f"{getattr(row, name):.3f}" for name in _SHARES.values()]
        cells += [
            f"{getattr(row, f'{name}_error'):.2f} ({getattr(row, f'{name}_by_chance'):.2f})"
            for name in errors.values()
        ]
        lines.append(cells)
    return _markdown(titles, lines)


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


# -- two calibrations ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MassError:
    """Calibration errors of the same states' masses under two calibrations, in percent."""

    depth: int | None = None
    temperature: float | None = None
    num_masses: int
    before: float
    after: float
    by_chance: float


def compare(
    model: OrderModel, before: Calibration, after: Calibration, states: Trajectories
) -> list[MassError]:
    """How far off the masses of chains from these states are: of all, by depth, by temperature."""
    old, new = chain_masses(model, before, states), chain_masses(model, after, states)

    def error(
        index: Tensor, *, depth: int | None = None, temperature: float | None = None
    ) -> MassError:
        of_new = new.take(index).calibration_error
        return MassError(
            depth=depth,
            temperature=temperature,
            num_masses=int(index.sum()),
            before=round(old.take(index).calibration_error.error, 3),
            after=round(of_new.error, 3),
            by_chance=round(of_new.by_chance, 3),
        )

    return [
        error(torch.ones_like(new.hit)),
        *(error(new.depth == depth, depth=depth) for depth in new.depth.unique().tolist()),
        *(
            error(new.temperature == heat, temperature=round(heat, 4))
            for heat in new.temperature.unique().tolist()
        ),
    ]


def comparison_table(errors: Sequence[MassError]) -> str:
    """The errors as Markdown."""
    rows = []
    for each in errors:
        of = "all"
        if each.depth is not None:
            of = f"depth {each.depth}"
        elif each.temperature is not None:
            of = f"temperature {each.temperature:g}"
        shares = [f"{share:.2f}" for share in (each.before, each.after, each.by_chance)]
        rows.append([of, f"{each.num_masses:,}", *shares])
    titles = ["masses of", "how many", "error before %", "after %", "by chance %"]
    return _markdown(titles, rows)
