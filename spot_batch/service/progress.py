"""How far a job is: counting what is published, and saying it in one line."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import IntEnum
from typing import Literal, Protocol

from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.summary import Totals
from spot_batch.records.lending import Receipt
from spot_batch.records.progress import Heartbeat, LoadProgress, LoadStage

State = Literal["starting", "running", "stopping", "finishing", "complete", "stopped", "failed"]


class Exit(IntEnum):
    """What the command's exit code says."""

    COMPLETE = 0
    BUG = 1
    BAD_INPUT = 2
    TOO_MANY_ERRORS = 3
    CHECK_FAILED = 4
    RESUMABLE = 75


ENDED: tuple[State, ...] = ("complete", "stopped", "failed")
AT_REST = (*ENDED, "not running", "damaged")  # the states in which `status` may find a job too

LOAD_STAGES: dict[LoadStage, str] = {
    "waiting": "waiting for another process's download",
    "downloading": "downloading",
    "checking": "checking weights",
    "loading": "loading target",
    "measuring": "measuring numerics",
}
LOADS_SHOWN = 4

SPEED_WINDOW_S = 300.0
ESTIMATE_AFTER = 32


def totals_of(receipt: Receipt) -> Totals:
    """What a segment of data adds to the job's totals."""
    return Totals(
        num_samples=receipt.num_rows,
        num_completions=receipt.num_rows - receipt.num_errors,
        num_errors=receipt.num_errors,
        num_tokens=receipt.num_tokens,
        num_forwards=receipt.stats.num_forwards,
        num_clean_passes=receipt.stats.num_clean_passes,
        num_drafted=receipt.stats.num_drafted,
        num_accepted=receipt.stats.num_accepted,
        num_draft_free_forwards=receipt.num_draft_free_forwards,
        error_codes=dict(sorted(Counter(receipt.errors.values()).items())),
    )


def accepted_per_forward(totals: Totals) -> float:
    """Drafted states accepted in a forward, on average over the forwards of all samples."""
    return totals.num_accepted / totals.num_forwards if totals.num_forwards else 0.0


def forwards_ratio(totals: Totals) -> float:
    """Forwards that draft-free decoding takes, over those taken."""
    return totals.num_draft_free_forwards / totals.num_forwards if totals.num_forwards else 1.0


class ProgressSink(Protocol):
    """Where the driver tells how the job goes. The command line implements it."""

    def update(self, heartbeat: Heartbeat) -> None: ...

    def published(self, receipt: Receipt) -> None:
        """A segment is durable."""

    def note(self, message: str) -> None:
        """One line worth reading: an actor died, an estimate, a stop."""


class Silent:
    """A sink that drops everything."""

    def update(self, heartbeat: Heartbeat) -> None:
        del heartbeat

    def published(self, receipt: Receipt) -> None:
        del receipt

    def note(self, message: str) -> None:
        del message


class Meter:
    """Counts what is published and reads speeds off it. Takes the time as an argument."""

    def __init__(self, before: Totals) -> None:
        self.totals = before
        self.here = Totals()  # of this run alone
        self._started_s: float | None = None
        self._marks: deque[tuple[float, int, int]] = deque()

    @property
    def has_started(self) -> bool:
        return self._started_s is not None

    def started(self, now_s: float) -> None:
        """The first actor is ready: speeds count from here."""
        if self._started_s is None:
            self._started_s = now_s
            self._marks.append((now_s, self.totals.num_samples, self.totals.num_tokens))

    def add(self, receipts: Iterable[Receipt], now_s: float) -> None:
        for receipt in receipts:
            self.totals += totals_of(receipt)
            self.here += totals_of(receipt)
        self._marks.append((now_s, self.totals.num_samples, self.totals.num_tokens))
        while len(self._marks) > 2 and self._marks[1][0] < now_s - SPEED_WINDOW_S:
            self._marks.popleft()

    def speeds(self) -> tuple[float, float]:
        """(rows, tokens) a second over the last five minutes, at published moments."""
        if len(self._marks) < 2:
            return 0.0, 0.0
        first, last = self._marks[0], self._marks[-1]
        elapsed_s = max(1e-3, last[0] - first[0])
        return (last[1] - first[1]) / elapsed_s, (last[2] - first[2]) / elapsed_s

    def eta_s(self, num_samples: int, now_s: float) -> float | None:
        rows_per_s, _ = self.speeds()
        if rows_per_s <= 0.0:
            return None
        since_last_s = now_s - self._marks[-1][0]
        return max(0.0, (num_samples - self.totals.num_samples) / rows_per_s - since_last_s)


def no_space(error: StorageFull) -> str:
    """What a full disk means to the person who runs the job."""
    return f"{error.filename}: {error.strerror}"


def describe_seconds(seconds: float) -> str:
    """A duration as people write it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def describe_drafting(drafted_per_round: float, drafting_share: float) -> str:
    """What budget was in force, as in: 2.31 drafted slots a sample a round, in 84 % of rounds."""
    return (
        f"{drafted_per_round:.2f} drafted slots a sample a round, in {100 * drafting_share:.0f} % "
        "of rounds"
    )


def describe_load(progress: LoadProgress) -> str:
    """As in: loading target 3.1 of 16.4 GB."""
    what, total = LOAD_STAGES[progress.stage], progress.num_bytes_total
    if not total:
        return what
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{what} {progress.num_bytes / unit:.1f} of {total / unit:.1f} {name}"


def describe_loads(heartbeat: Heartbeat) -> list[str]:
    """A line an actor that is not ready; of many, the first."""
    lines = [f"actor {each.actor}: {describe_load(each.progress)}" for each in heartbeat.loading]
    left = len(lines) - LOADS_SHOWN
    return lines if left <= 0 else [*lines[:LOADS_SHOWN], f"and {left} more actors loading"]


def describe_saved(num_saved: int, saved: str) -> str:
    """What is `saved` of the forwards of draft-free decoding, or why there are more of them."""
    if num_saved >= 0:
        return saved
    return f"{-num_saved:,} more, since what is made again after a stop counts twice"


def describe(heartbeat: Heartbeat) -> str:
    """The progress line."""
    share = (
        100.0 * heartbeat.num_durable / heartbeat.num_samples if heartbeat.num_samples else 100.0
    )
    num_saved, ratio = heartbeat.num_forwards_saved, heartbeat.forwards_ratio
    at_rest = heartbeat.state in AT_REST
    parts = [f"rows {heartbeat.num_durable:,}/{heartbeat.num_samples:,} ({share:.1f} %) durable"]
    if not at_rest:
        parts.append(f"in flight {heartbeat.num_in_flight:,}")
    parts.append(f"errors {heartbeat.num_errors:,}")
    if heartbeat.tokens_per_s or not at_rest:
        parts.append(f"{heartbeat.tokens_per_s:,.0f} tokens/s")
    parts += [
        f"accepted drafts {heartbeat.accepted_per_forward:.2f} a forward",
        f"forwards {describe_saved(num_saved, f'saved {num_saved:,} ({ratio:.2f}x)')}",
    ]
    if not at_rest:
        eta = describe_seconds(heartbeat.eta_s) if heartbeat.eta_s is not None else "-"
        parts.append(f"ETA {eta}")
        parts.append(f"actors {heartbeat.num_actors}/{heartbeat.num_actors_wanted}")
        parts += [
            f"actor {each.actor} silent for {describe_seconds(each.seconds)}"
            for each in heartbeat.silent[:LOADS_SHOWN]
        ]
    return " · ".join(parts)
