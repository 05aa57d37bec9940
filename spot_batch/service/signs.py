"""Signs of life: which actors have gone silent, or answer and get nothing done.

Pure: the time is always given.
"""

from __future__ import annotations

from dataclasses import dataclass

from spot_batch.job.spec import JobSpec
from spot_batch.records.lending import News

# An actor answers twice a second as long as its process runs.
UNANSWERED_LEASES = 3
LEAST_UNANSWERED_S = 60.0
# While it loads, a library may keep its process from answering.
UNANSWERED_LOADING_S = 600.0
# A step is predicted by the longest so far; before there is one it may be a long prompt on a CPU.
TIMES_THE_LONGEST = 20.0
LEAST_IDLE_S = 300.0
FIRST_IDLE_S = 1800.0
SHOWN_AFTER_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a job bears with an actor: unanswered, unanswered while it loads, and without any
    step done, at first and at least."""

    unanswered_s: float
    loading_s: float
    first_s: float
    idle_s: float

    @classmethod
    def of(cls, spec: JobSpec) -> Patience:
        """What `failure.no_progress_seconds` says; `auto` is a few leases, and for steps as long as
        an actor's own past predicts."""
        given = spec.failure.no_progress_seconds
        if given == "auto":
            return cls(
                unanswered_s=max(
                    LEAST_UNANSWERED_S, UNANSWERED_LEASES * spec.scheduling.lease_seconds
                ),
                loading_s=UNANSWERED_LOADING_S,
                first_s=FIRST_IDLE_S,
                idle_s=LEAST_IDLE_S,
            )
        return cls(unanswered_s=given, loading_s=given, first_s=given, idle_s=given)


class SignsOfLife:
    """What is known of one actor: when it answered last, and when it last got a step done while it
    owed samples."""

    def __init__(self) -> None:
        self._answered_s: float | None = None
        self._advanced_s = 0.0
        self._longest_s = 0.0
        self._num_prepared = self._num_steps = 0
        self._is_loaded = False
        self._owes = False

    def loading(self, now_s: float) -> None:
        """It answered that it still loads."""
        self._answered_s = now_s

    def ready(self, now_s: float) -> None:
        """It answered that it has its models."""
        self._answered_s = self._advanced_s = now_s
        self._is_loaded = True

    def heard(self, news: News, now_s: float) -> None:
        """It answered with news."""
        self._answered_s = now_s
        done = (news.num_prepared, news.num_steps)
        if done != (self._num_prepared, self._num_steps) or not self._owes:
            if self._owes:
                self._longest_s = max(self._longest_s, now_s - self._advanced_s)
            self._num_prepared, self._num_steps = done
            self._advanced_s = now_s
        self._owes = news.num_in_flight + news.num_waiting > 0

    def silent_s(self, now_s: float) -> float:
        """For how long it has given no sign of life; 0 for one that was never heard of, which may
        be waiting for its place on a machine."""
        if self._answered_s is None:
            return 0.0
        return now_s - (self._advanced_s if self._owes else self._answered_s)

    def fault(self, patience: Patience, now_s: float) -> str | None:
        """Why it counts as lost; None while it does not."""
        if self._answered_s is None:
            return None
        unanswered_s = now_s - self._answered_s
        if unanswered_s > (patience.unanswered_s if self._is_loaded else patience.loading_s):
            return f"it has not answered for {unanswered_s:.0f} s"
        allowed_s = patience.first_s
        if self._num_steps:
            allowed_s = max(patience.idle_s, TIMES_THE_LONGEST * self._longest_s)
        idle_s = now_s - self._advanced_s
        if self._owes and idle_s > allowed_s:
            return f"it has got nothing done for {idle_s:.0f} s, though it owes samples"
        return None
