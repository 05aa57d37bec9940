"""What driver and actors tell each other: leases out, news back. Metadata only, no rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spot_batch.records.results import Rounds, SampleStats

Purpose = Literal["data", "audit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Sample ids lent to one actor. Audit leases are decoded again draft-free; of the ids in
    `begun`, another actor may have left whole blocks behind."""

    sample_ids: tuple[int, ...]
    purpose: Purpose = "data"
    begun: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a published segment tells the driver. `errors` are the codes of its error rows, by
    sample id."""

    name: str
    purpose: Purpose
    sample_ids: tuple[int, ...]
    num_tokens: int
    stats: SampleStats
    num_draft_free_forwards: int
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.sample_ids)

    @property
    def num_errors(self) -> int:
        return len(self.errors)


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """What an actor answers: the receipts of what it published since it was asked last, and what it
    still holds. `num_prepared` samples and `num_steps` of its engine count on from its start."""

    receipts: Sequence[Receipt] = field(default_factory=tuple)
    num_in_flight: int = 0
    num_waiting: int = 0
    num_prepared: int = 0
    num_steps: int = 0
    elapsed_s: float = 0.0
    rounds: Rounds = field(default_factory=Rounds)
