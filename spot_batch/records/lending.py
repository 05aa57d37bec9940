"""What driver and actors tell each other: leases out, receipts back. Metadata only, no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from spot_batch.records.results import Rounds, SampleStats

Purpose = Literal["data", "audit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Sample ids lent to one actor. Audit leases are decoded again draft-free."""

    lease_id: int
    sample_ids: tuple[int, ...]
    purpose: Purpose = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a published segment tells the driver: metadata only, no rows."""

    name: str
    purpose: Purpose
    sample_ids: tuple[int, ...]
    num_rows: int
    num_errors: int
    num_bytes: int
    checksum: str
    num_tokens: int
    stats: SampleStats
    num_draft_free_forwards: int
    error_codes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """An actor's state, as `collect` returns it: new receipts and what is still in flight."""

    receipts: Sequence[Receipt] = field(default_factory=tuple)
    num_in_flight: int = 0
    num_waiting: int = 0
    num_unpublished: int = 0
    elapsed_s: float = 0.0
    rounds: Rounds = field(default_factory=Rounds)
