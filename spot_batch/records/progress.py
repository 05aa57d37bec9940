"""How far a job is and how it went: what screens, cards and followers read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """How this run went, for the card and the summary: facts that never decide the output.

    `drafted_per_round`: drafted slots a sample a round; `drafting_share`: of the rounds, those in
    which anything was drafted.
    """

    drafter: str
    target: str
    device: str = "cpu"
    num_actors: int = 0
    elapsed_s: float = 0.0
    drafted_per_round: float = 0.0
    drafting_share: float = 0.0


LoadStage = Literal["waiting", "downloading", "checking", "loading", "measuring"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a target is on its way from the hub to a device, and of how many bytes.

    `waiting`: another process of the node downloads it. `checking`: files are read for their hash.
    `measuring`: the arithmetic is probed. A stage that has no bytes, or cannot know how many, has a
    total of 0.
    """

    stage: LoadStage
    num_bytes: int = 0
    num_bytes_total: int = 0


LoadReport = Callable[[LoadProgress], None]
"""Told often while a target loads, from any thread; it must come back at once."""


def unreported(progress: LoadProgress) -> None:
    """Nobody wants to know."""
    del progress


@dataclass(frozen=True, slots=True)
class ActorLoading:
    """An actor that is not ready yet."""

    actor: int
    progress: LoadProgress


@dataclass(frozen=True, slots=True)
class SilentActor:
    """An actor that has given no sign of life for so long."""

    actor: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """How far a job is: what the screen, `status` and an attached command read.

    The files themselves are the truth. Durable and in flight are apart; speeds leave out what
    earlier runs did, as do drafted slots a sample a round and the share of rounds that drafted;
    `exit_code` stands once the driver has ended.
    """

    state: str
    num_samples: int
    num_durable: int
    num_in_flight: int = 0
    num_errors: int = 0
    num_audits: int = 0
    num_audited: int = 0
    num_actors: int = 0
    num_actors_wanted: int = 0
    loading: tuple[ActorLoading, ...] = ()
    silent: tuple[SilentActor, ...] = ()
    tokens_per_s: float = 0.0
    rows_per_s: float = 0.0
    accepted_per_forward: float = 0.0
    num_forwards_saved: int = 0
    forwards_ratio: float = 1.0
    drafted_per_round: float = 0.0
    drafting_share: float = 0.0
    eta_s: float | None = None
    elapsed_s: float = 0.0
    time: float = 0.0
    exit_code: int | None = None
    message: str = ""
