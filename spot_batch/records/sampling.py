"""How one sample is decoded, and the request that an engine is given.

A sample is one generation: sample id = row index * n + sample index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spot_batch.job.limits import LEAST_TOP_P, MOST_TOP_K, checked_temperature
from spot_batch.records.results import Begun

Unmasking = Literal["single", "threshold"]
StopAt = Literal["early", "block", "never"]
Confidence = Literal["max", "sampled", "sampled_tempered", "sampled_filtered"]
NoiseRule = Literal["position_step", "position"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one sample is decoded; every field is resolved, none is left to a default of the model.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 are off. `stop_ids` end the sample; the
    first one to stand in the generated part is where it is cut, itself excluded.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    unmasking: Unmasking = "single"
    threshold: float = 0.9
    stop_at: StopAt = "early"
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    confidence: Confidence = "sampled_tempered"
    noise_rule: NoiseRule = "position_step"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        try:
            checked_temperature(self.temperature)
        except ValueError as error:
            raise ValueError(f"temperature {error}") from None
        if not LEAST_TOP_P <= self.top_p <= 1.0:
            raise ValueError(f"top_p must be from {LEAST_TOP_P:g} to 1, got {self.top_p}")
        if not 0 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k must be from 0 (off) to {MOST_TOP_K}, got {self.top_k}")
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold must be above 0 and at most 1, got {self.threshold}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample for the engine. `noise_key` is 64 bits; `draft_free` asks for no drafts; `begun`
    is what was decoded of it before, to go on from."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    noise_key: int
    params: SamplingParams
    draft_free: bool = False
    begun: Begun | None = None
