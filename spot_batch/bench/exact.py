"""Are drafted outputs the draft-free ones, token for token? And what do drafts save?"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from spot_batch.bench.prompts import make_requests
from spot_batch.decoding import Engine, EngineSettings
from spot_batch.drafters.base import Drafter
from spot_batch.records import Completion, Request, SamplingParams
from spot_batch.targets.block import BlockTarget
from spot_batch.targets.registry import ModelInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """One way to draft."""

    budget: int
    gamma: float = 0.0
    crossing: bool = True

    @property
    def name(self) -> str:
        floor = f", gamma {self.gamma:g}" if self.gamma else ""
        return f"D {self.budget}{floor}{'' if self.crossing else ', no crossing'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRow:
    """One cell: `num_differ` of `num_compared` samples are not the draft-free ones.

    `nfe` and `draft_free_nfe` are verify forwards a sample; `nfe_apart` counts each clean pass as a
    forward of its own, as without fusing.
    """

    temperature: float
    drafting: str
    sequences: int
    numerics: str
    num_compared: int
    num_differ: int
    nfe: float
    draft_free_nfe: float
    nfe_ratio: float
    nfe_apart_ratio: float
    accepted_per_round: float


def compare_exact(
    target: BlockTarget,
    drafter: Drafter,
    info: ModelInfo,
    questions: Sequence[str],
    *,
    temperatures: Sequence[float],
    draftings: Sequence[Drafting],
    sequences: Sequence[int],
    max_new_tokens: int,
) -> Iterator[ExactRow]:
    """Decode every prompt draft-free, one at a time, then in every other way, and compare."""
    for temperature in temperatures:
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=info.stop_ids,
            confidence=info.family.confidence,
        )
        requests = make_requests(info, list(questions), params)
        alone = EngineSettings(max_sequences=1, budget=0)
        base = decode_all(target, None, requests, alone)
        for number, drafting in product(sequences, draftings):
            settings = replace(
                alone,
                max_sequences=number,
                budget=drafting.budget,
                gamma=drafting.gamma,
                crossing=drafting.crossing,
            )
            found = decode_all(target, drafter, requests, settings)
            yield exact_row(target, temperature, drafting, number, base, found)


def decode_all(
    target: BlockTarget,
    drafter: Drafter | None,
    requests: Sequence[Request],
    settings: EngineSettings,
) -> dict[int, Completion]:
    """Every request's completion, by sample id."""
    engine = Engine(target, drafter, settings)
    for request in requests:
        engine.add(request)
    done: dict[int, Completion] = {}
    while engine.has_work:
        done |= {completion.sample_id: completion for completion in engine.step()}
    return done


def exact_row(
    target: BlockTarget,
    temperature: float,
    drafting: Drafting,
    sequences: int,
    base: dict[int, Completion],
    found: dict[int, Completion],
) -> ExactRow:
    """Compare two decodings of the same requests."""
    differ = [
        sample_id
        for sample_id, completion in base.items()
        if (found[sample_id].token_ids, found[sample_id].commit_step)
        != (completion.token_ids, completion.commit_step)
    ]
    for sample_id in differ[:3]:
        logger.warning("sample %d differs from draft-free decoding", sample_id)
    stats = [completion.stats for completion in found.values()]
    nfe = sum(one.num_forwards for one in stats)
    clean = sum(one.num_clean_passes for one in stats)
    base_nfe = sum(completion.stats.num_forwards for completion in base.values())
    base_clean = sum(completion.stats.num_clean_passes for completion in base.values())
    return ExactRow(
        temperature=temperature,
        drafting=drafting.name,
        sequences=sequences,
        numerics="fast" if target.tiles.sizes is None else "canonical",
        num_compared=len(base),
        num_differ=len(differ),
        nfe=nfe / len(found),
        draft_free_nfe=base_nfe / len(base),
        nfe_ratio=base_nfe / nfe,
        nfe_apart_ratio=(base_nfe + base_clean) / (nfe + clean),
        accepted_per_round=sum(one.num_accepted for one in stats) / nfe,
    )
