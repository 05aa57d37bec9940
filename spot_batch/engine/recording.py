"""Recording trajectories: every few visited states with what followed them in their block."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spot_batch.engine.tree import Key
from spot_batch.records.results import Trajectory, VisitedState
from spot_batch.records.sampling import Request


@dataclass(frozen=True, slots=True)
class _Visit:
    """A state worth keeping, `index` commits into what is recorded of its block."""

    index: int
    num_committed: int
    masked: tuple[bool, ...]
    log_prob: Tensor
    ids: Tensor


@dataclass(slots=True)
class TrajectoryRecorder:
    """Follows a sample of `single` unmasking; keeps one state in `every`, of all its blocks."""

    every: int
    _start: int = -1
    _commits: list[tuple[int, int]] = field(default_factory=list)
    _visits: list[_Visit] = field(default_factory=list)
    _states: list[VisitedState] = field(default_factory=list)
    _num_visited: int = 0

    def visit(
        self,
        *,
        start: int,
        num_committed: int,
        masked: tuple[bool, ...],
        commits: Key,
        log_prob: Tensor,
        ids: Tensor,
    ) -> None:
        """Take note of a state of the block at `start` and of its commit.

        masked (W,) before the commit; log_prob, ids (W, K).
        """
        if start != self._start:
            self._close_block()
            self._start = start
        if self._num_visited % self.every == 0:
            self._visits.append(_Visit(len(self._commits), num_committed, masked, log_prob, ids))
        self._num_visited += 1
        self._commits += commits

    def trajectory(self, request: Request) -> Trajectory:
        """What was seen of the sample, which is finished."""
        self._close_block()
        return Trajectory(
            noise_key=request.noise_key,
            temperature=request.params.temperature,
            states=tuple(self._states),
        )

    def _close_block(self) -> None:
        for visit in self._visits:
            following = self._commits[visit.index :]
            if len(following) < 2:  # nothing follows its own commit: nothing to learn
                continue
            self._states.append(
                VisitedState(
                    start=self._start,
                    num_committed=visit.num_committed,
                    masked=visit.masked,
                    log_prob=visit.log_prob.half().flatten().cpu().numpy(),
                    ids=visit.ids.int().flatten().cpu().numpy(),
                    positions=tuple(position for position, _ in following),
                    tokens=tuple(token for _, token in following),
                )
            )
        self._visits, self._commits = [], []
