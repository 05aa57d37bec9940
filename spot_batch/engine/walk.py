"""The walk: which of the drafted states are the target's own, and where each sample ends up.

From its current state on, a sample moves by the target's own transition, and as long as the state
that this leads to is among the drafted ones it goes on without another forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spot_batch.drafters.distributions import StaleStore, top_log_probs
from spot_batch.engine.budget import Budget
from spot_batch.engine.recording import TrajectoryRecorder
from spot_batch.engine.round import SampleSlots
from spot_batch.engine.rows import CacheRows, Forwarded
from spot_batch.engine.sample import Sample
from spot_batch.engine.stops import Decode
from spot_batch.engine.transition import NOT_FINITE, States, decided
from spot_batch.engine.tree import ROOT, Key
from spot_batch.models.device import onto, to_host
from spot_batch.models.slots import Target
from spot_batch.records.results import Ended


@dataclass(slots=True)
class _Walker:
    """A sample on its walk: the slot it stands on and what it has committed since the root."""

    slots: SampleSlots
    at: int
    key: Key = ROOT

    @property
    def sample(self) -> Sample:
        return self.slots.sample


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
        decode: Decode | None,
        record_every: int,
    ) -> None:
        self._target, self._rows = target, rows
        self._stale, self._auto = stale, auto
        self._decode, self._record_every = decode, record_every
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
        self,
        walkers: Sequence[_Walker],
        forwarded: Forwarded,
        finished: dict[int, Ended],
    ) -> list[_Walker]:
        """Apply the transition at each slot; returns the walkers that reached a drafted state."""
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
        made = [_commits(each) for each in found]
        if self._record_every:
            self._record(samples, logits, states, made)
        remembers = self._stale is not None and (self._auto is None or self._auto.wants_stale)
        going: list[_Walker] = []
        resting: list[int] = []
        for index, walker in enumerate(walkers):
            commits, was_masked = made[index], list(walker.sample.masked)
            if commits is None:
                finished[walker.sample.row] = walker.sample.not_finite()
                continue
            moved = self._advance(walker, commits, forwarded, finished)
            if moved is not None:
                walker.sample.num_accepted += 1
                going.append(moved)
            elif True in walker.sample.masked and walker.sample.num_committed:
                walker.sample.stale_masked = was_masked if remembers else None
                resting.append(index)
        if resting and remembers:
            self._remember(samples, resting, logits, states)
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
        end = sample.end_here(self._decode)
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

    def _remember(
        self, samples: Sequence[Sample], resting: Sequence[int], logits: Tensor, states: States
    ) -> None:
        """Keep the distributions of the states that samples rest on, for the drafter."""
        assert self._stale is not None
        device, at = self._target.device, torch.tensor(resting)
        self._stale.put(
            onto(torch.tensor([samples[index].row for index in resting]), device),
            logits[onto(at, device)],
            onto(states.masked[at], device),
            onto(states.num_committed[at], device),
        )

    def _record(
        self, samples: Sequence[Sample], logits: Tensor, states: States, made: Sequence[Key | None]
    ) -> None:
        masked = onto(states.masked, logits.device)
        log_prob, ids = top_log_probs(logits, masked)
        for index, (sample, commits) in enumerate(zip(samples, made, strict=True)):
            if commits is None:
                continue
            if sample.recorder is None:
                sample.recorder = TrajectoryRecorder(self._record_every)
            sample.recorder.visit(
                start=sample.start,
                num_committed=sample.num_committed,
                masked=tuple(sample.masked),
                commits=commits,
                log_prob=log_prob[index],
                ids=ids[index],
            )


def _commits(found: Sequence[int]) -> Key | None:
    """(W,) of `decided` -> what is committed; None where the logits are not finite."""
    if found[0] == NOT_FINITE:
        return None
    return tuple((position, each >> 1) for position, each in enumerate(found) if each & 1)
