"""The walk: which of the drafted states are the target's own, and where each sample ends up.

From its current state on, a sample moves by the target's own transition, and as long as the state
that this leads to is among the drafted ones it goes on without another forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.checkpoints.shapes import LOGITS_FILTERED, LOGITS_GREEDY, LOGITS_SAMPLED
from spot_batch.drafters.distributions import StaleStore, top_log_probs
from spot_batch.engine.budget import Budget
from spot_batch.engine.memory import Ladder
from spot_batch.engine.recording import TrajectoryRecorder
from spot_batch.engine.round import SampleSlots
from spot_batch.engine.rows import CacheRows, Forwarded
from spot_batch.engine.sample import Sample
from spot_batch.engine.transition import NOT_FINITE, States, decided
from spot_batch.engine.tree import ROOT, Key
from spot_batch.models.device import onto, to_host
from spot_batch.models.slots import Target
from spot_batch.records.results import Ended
from spot_batch.records.sampling import SamplingParams


@dataclass(slots=True)
class _Walker:
    """A sample on its walk: the slot it stands on and what it has committed since the root."""

    slots: SampleSlots
    at: int
    key: Key = ROOT

    @property
    def sample(self) -> Sample:
        return self.slots.sample


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the target says of some states, and what it commits there: None where its logits are not
    finite. `top` is what a trajectory keeps of them, if one is recorded."""

    logits: Tensor
    states: States
    commits: Sequence[Key | None]
    top: tuple[Tensor, Tensor] | None


class Verifier:
    """Walks the samples of an engine.

    `stale` is where distributions are remembered for the drafter, None where there is none; `auto`
    learns from what came true. `num_steps` counts steps of draft-free decoding.
    """

    def __init__(
        self,
        target: Target,
        rows: CacheRows,
        *,
        stale: StaleStore | None,
        auto: Budget | None,
        record_every: int,
        visit_bytes: int,
    ) -> None:
        self._target, self._rows = target, rows
        self._stale, self._auto = stale, auto
        self._record_every = record_every
        self._visits = Ladder("states a visit", 1 << 30, 1)
        self._visit_bytes = visit_bytes
        self._logits_bytes = 4 * target.block_length * target.vocab_size
        self.num_steps = 0

    def walk(self, samples: Sequence[SampleSlots], forwarded: Forwarded) -> dict[int, Ended]:
        """Follow every sample from its current state as far as its drafted states reach.

        Returns the finished ones by their cache row: a sample and its audit may fly together.
        """
        finished: dict[int, Ended] = {}
        walkers = [_Walker(slots, slots.states[ROOT]) for slots in samples]
        while walkers:
            # There is one rule a job, so nearly always one group.
            going: list[_Walker] = []
            for rule in dict.fromkeys(walker.sample.rule for walker in walkers):
                group = [walker for walker in walkers if walker.sample.rule == rule]
                going += self._visit(group, forwarded, finished)
            walkers = going
        return finished

    def _visit(
        self, walkers: Sequence[_Walker], forwarded: Forwarded, finished: dict[int, Ended]
    ) -> list[_Walker]:
        """Apply the transition at each slot, at as many at once as memory holds; returns the
        walkers that reached a drafted state."""
        going: list[_Walker] = []
        left = list(walkers)
        per_state = logits_of_a_visit([walker.sample.request.params for walker in walkers])
        within = power_of_two(self._visit_bytes // (self._logits_bytes * per_state))
        while left:
            part = left[: min(within, self._visits.most)]
            try:
                seen = self._look(part, forwarded)
            except (MemoryError, RuntimeError) as error:
                self._visits.step_down(error, len(part))
                continue
            going += self._move(part, seen, forwarded, finished)
            del seen, left[: len(part)]  # the logits, before there are others
        return going

    def _look(self, walkers: Sequence[_Walker], forwarded: Forwarded) -> _Seen:
        """What the target says and does at each slot. Changes nothing, so it can be done again."""
        samples = [walker.sample for walker in walkers]
        slots = torch.tensor([walker.at for walker in walkers])
        logits = self._target.head(forwarded.rows[onto(slots, self._target.device)])
        states = States.of(
            [sample.request for sample in samples],
            masked=[sample.masked for sample in samples],
            start=[sample.start for sample in samples],
            num_committed=[sample.num_committed for sample in samples],
        )
        found = to_host(decided(logits, states, samples[0].rule)).tolist()
        top = None
        if self._record_every:
            top = top_log_probs(logits, onto(states.masked, logits.device))
        return _Seen(logits, states, [_commits(each) for each in found], top)

    def _move(
        self,
        walkers: Sequence[_Walker],
        seen: _Seen,
        forwarded: Forwarded,
        finished: dict[int, Ended],
    ) -> list[_Walker]:
        """Commit what was decided at each slot."""
        remembers = self._stale is not None and (self._auto is None or self._auto.wants_stale)
        going: list[_Walker] = []
        resting: list[int] = []
        for index, walker in enumerate(walkers):
            sample, commits = walker.sample, seen.commits[index]
            if commits is None:
                finished[sample.row] = sample.not_finite()
                continue
            if seen.top is not None:
                log_prob, ids = seen.top
                self._record(sample, commits, log_prob[index], ids[index])
            was_masked = list(sample.masked)
            moved = self._advance(walker, commits, forwarded, finished)
            if moved is not None:
                sample.num_accepted += 1
                going.append(moved)
            elif True in sample.masked and sample.num_committed:
                sample.stale_masked = was_masked if remembers else None
                resting.append(index)
        if remembers:
            self._remember(walkers, resting, seen)
        return going

    def _advance(
        self,
        walker: _Walker,
        commits: Key,
        forwarded: Forwarded,
        finished: dict[int, Ended],
    ) -> _Walker | None:
        """Commit, and move to the slot of the new state if it was drafted."""
        sample, slots = walker.sample, walker.slots
        key = tuple(sorted(walker.key + commits))
        if self._auto is not None and slots.draft is not None:
            draft = slots.draft
            self._auto.learn(sample.row, draft.tree, walker.key, key, draft.scale)
        sample.commit(commits)
        self.num_steps += 1
        end = sample.end_here()
        if end is not None:
            finished[sample.row] = sample.completion(end)
            return None
        if True in sample.masked:
            at = slots.states.get(key)
            return None if at is None else _Walker(slots, at, key)
        block = sample.next_block()
        crossing = slots.crossings.get(key)
        if crossing is None:
            sample.to_store = [block]
            return None
        self._rows.adopt(forwarded.kept[crossing.kept], row=sample.row, start=block.start)
        sample.num_clean_passes += 1
        return _Walker(SampleSlots(sample, None, {}, {}), crossing.next_slot)

    def _remember(self, walkers: Sequence[_Walker], resting: Sequence[int], seen: _Seen) -> None:
        """Keep the distributions of the states that samples rest on, for the drafter."""
        assert self._stale is not None
        device, left = self._target.device, list(resting)
        while left:
            part = left[: self._visits.most]
            at = torch.tensor(part)
            try:
                self._stale.put(
                    onto(torch.tensor([walkers[index].sample.row for index in part]), device),
                    seen.logits[onto(at, device)],
                    onto(seen.states.masked[at], device),
                    onto(seen.states.num_committed[at], device),
                )
            except (MemoryError, RuntimeError) as error:
                self._visits.step_down(error, len(part))
                continue
            del left[: len(part)]

    def _record(self, sample: Sample, commits: Key, log_prob: Tensor, ids: Tensor) -> None:
        if sample.recorder is None:
            sample.recorder = TrajectoryRecorder(self._record_every)
        sample.recorder.visit(
            start=sample.start,
            num_committed=sample.num_committed,
            masked=tuple(sample.masked),
            commits=commits,
            log_prob=log_prob,
            ids=ids,
        )


def logits_of_a_visit(params: Sequence[SamplingParams]) -> int:
    """How many times its logits each of these states takes at the most."""
    noisy = [each for each in params if each.temperature > 0]
    if any(each.top_p < 1.0 or each.top_k > 0 for each in noisy):
        return LOGITS_FILTERED
    return LOGITS_SAMPLED if noisy else LOGITS_GREEDY


def power_of_two(num: int) -> int:
    """The largest that is at most `num`, or 1: tiles of the head are so many states."""
    return 1 << max(0, num.bit_length() - 1)


def _commits(found: Sequence[int]) -> Key | None:
    """(W,) of `decided` -> what is committed; None where the logits are not finite."""
    if found[0] == NOT_FINITE:
        return None
    return tuple((position, each >> 1) for position, each in enumerate(found) if each & 1)
