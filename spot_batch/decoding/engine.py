"""The engine: one forward a round over slots of many samples, drafted or not.

A round drafts, runs one forward over every sample's current state, its drafted states, its finished
block and its prompt blocks, and then walks: from the current state on, the target's own transition
is applied, and while the state it leads to is among the drafted ones the walk goes on without
another forward. Draft-free decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spot_batch.decoding.recording import TrajectoryRecorder
from spot_batch.decoding.stops import Decode, End, find_end
from spot_batch.decoding.transition import Choice, Rule, States, transition
from spot_batch.decoding.tree import ROOT, DraftTree, Edge, Key
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.stale import (
    COMMITTED,
    MASKED,
    SINCE,
    Queries,
    StaleStore,
    top_log_probs,
)
from spot_batch.records import Begun, Completion, Request, SampleStats
from spot_batch.targets.slots import Kept, PrefixCache, SlotBatch, Target

AUTO_BUDGET = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How the engine spends a device; nothing here changes an output.

    `budget`: drafted slots a sample a round. `gamma`: least mass of a drafted state. `crossing`:
    draft over the end of a block. `max_slots`: of one forward; a larger round runs several.
    """

    max_sequences: int = 32
    budget: int = AUTO_BUDGET
    gamma: float = 0.0
    crossing: bool = True
    max_slots: int = 1024

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, got {self.max_sequences}")
        if self.budget < 0:
            raise ValueError(f"budget must be at least 0, got {self.budget}")
        if not 0.0 <= self.gamma < 1.0:
            raise ValueError(f"gamma must be at least 0 and below 1, got {self.gamma}")
        if self.max_slots < 2:
            raise ValueError(f"max_slots must be at least 2, got {self.max_slots}")


@dataclass(slots=True)
class _Block:
    """A finished block whose KV is not stored yet."""

    tokens: list[int]
    start: int


@dataclass(slots=True)
class _Sample:
    """A sample in flight: its current state, and what it has written."""

    request: Request
    row: int
    width: int
    rule: Rule
    to_store: list[_Block]
    start: int
    tokens: list[int]
    masked: list[bool]
    num_committed: int = 0
    num_checked: int = 0
    step: int = 0
    stale_masked: list[bool] | None = None
    written: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    num_forwards: int = 0
    num_clean_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    recorder: TrajectoryRecorder | None = None

    @classmethod
    def of(cls, request: Request, *, row: int, width: int) -> _Sample:
        begun = request.begun
        prompt = [*request.prompt_ids, *(begun.token_ids if begun is not None else ())]
        assert begun is None or len(prompt) % width == 0, "what was begun ends with a block"
        start = len(prompt) // width * width
        remainder = prompt[start:]
        num_open = width - len(remainder)
        sample = cls(
            request=request,
            row=row,
            width=width,
            rule=Rule.of(request.params),
            to_store=[_Block(prompt[at : at + width], at) for at in range(0, start, width)],
            start=start,
            tokens=remainder + [-1] * num_open,
            masked=[False] * len(remainder) + [True] * num_open,
            steps=[],
        )
        if begun is not None:
            sample._go_on_from(begun)
        return sample

    def _go_on_from(self, begun: Begun) -> None:
        self._reserve()
        self.written[: len(begun.token_ids)] = begun.token_ids
        self.steps[: len(begun.commit_step)] = begun.commit_step
        self.step = begun.num_steps
        self.num_forwards = begun.stats.num_forwards
        self.num_clean_passes = begun.stats.num_clean_passes
        self.num_drafted = begun.stats.num_drafted
        self.num_accepted = begun.stats.num_accepted

    def begun(self) -> Begun | None:
        """Its whole blocks, where there are any behind the prompt's."""
        length = self.start - len(self.request.prompt_ids)
        if length <= 0:
            return None
        # Counts are those of now, a little more than of the blocks alone: they decide nothing.
        at_start = max(self.steps[:length]) + 1
        return Begun(
            token_ids=tuple(self.written[:length]),
            commit_step=tuple(self.steps[:length]),
            num_steps=at_start,
            stats=self.stats,
        )

    @property
    def stats(self) -> SampleStats:
        return SampleStats(
            num_forwards=self.num_forwards,
            num_clean_passes=self.num_clean_passes,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

    @property
    def end(self) -> int:
        """Absolute position behind the last token that may be written."""
        return len(self.request.prompt_ids) + self.request.params.max_new_tokens

    def commit(self, commits: Key) -> None:
        """Fix tokens; all of them belong to one step of draft-free decoding."""
        if not self.steps:
            self._reserve()
        offset = self.start - len(self.request.prompt_ids)
        for position, token in commits:
            assert self.masked[position], f"position {position} is committed already"
            self.tokens[position] = token
            self.masked[position] = False
            self.written[offset + position] = token
            self.steps[offset + position] = self.step
        self.num_committed += len(commits)
        self.step += 1

    def _reserve(self) -> None:
        width, prompt = self.width, len(self.request.prompt_ids)
        length = -(-self.end // width) * width - prompt
        self.written, self.steps = [-1] * length, [-1] * length

    def next_block(self) -> None:
        """Leave the finished block for the next one, all masked."""
        self.start += self.width
        self.tokens = [-1] * self.width
        self.masked = [True] * self.width
        self.num_committed = 0
        self.stale_masked = None

    def end_here(self, decode: Decode | None) -> End | None:
        """Where the sample ends, if it does with what is committed now."""
        first_open = self.masked.index(True) if True in self.masked else self.width
        num_fixed = max(0, self.start - len(self.request.prompt_ids) + first_open)
        if num_fixed == self.num_checked and first_open < self.width:
            return None
        self.num_checked = num_fixed
        whole = first_open == self.width
        return find_end(self.written[:num_fixed], self.request.params, whole=whole, decode=decode)

    def completion(self, end: End) -> Completion:
        """The trimmed sample."""
        return Completion(
            sample_id=self.request.sample_id,
            token_ids=tuple(self.written[: end.num_tokens]),
            commit_step=tuple(self.steps[: end.num_tokens]),
            finish_reason=end.reason,
            text=end.text,
            trajectory=None if self.recorder is None else self.recorder.trajectory(self.request),
            num_prompt_tokens=len(self.request.prompt_ids),
            num_draft_free_forwards=self.step,
            stats=self.stats,
        )


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A drafted complete state: its kept KV, and the slot of the next block behind it."""

    kept: int
    next_slot: int


@dataclass(slots=True)
class _Plan:
    """The slots of a round, and where each sample's states stand among them."""

    mask_id: int
    width: int
    ids: list[list[int]] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    sees: list[tuple[int, ...]] = field(default_factory=list)
    store: list[bool] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)
    states: list[dict[Key, int]] = field(default_factory=list)
    crossings: list[dict[Key, _Crossing]] = field(default_factory=list)
    num_kept: int = 0

    def add(
        self,
        ids: list[int],
        *,
        start: int,
        row: int,
        behind: tuple[int, ...] = (),
        store: bool = False,
        keep: bool = False,
    ) -> int:
        """Append a slot that sees itself and the slots it stands behind; returns its index."""
        index = len(self.ids)
        self.ids.append(ids)
        self.start.append(start)
        self.row.append(row)
        self.sees.append((*behind, index))
        self.store.append(store)
        self.keep.append(keep)
        self.num_kept += keep
        return index

    def add_sample(self, sample: _Sample, drafted: Sequence[Key]) -> None:
        """Append a sample's unstored clean blocks, its current state and its drafted states."""
        for block in sample.to_store:
            self.add(block.tokens, start=block.start, row=sample.row, store=True)
        current = [
            self.mask_id if masked else token
            for token, masked in zip(sample.tokens, sample.masked, strict=True)
        ]
        states: dict[Key, int] = {}
        crossings: dict[Key, _Crossing] = {}
        num_open = sum(sample.masked)
        states[ROOT] = self.add(current, start=sample.start, row=sample.row)
        for key in drafted:
            ids = list(current)
            for position, token in key:
                ids[position] = token
            if len(key) < num_open:
                states[key] = self.add(ids, start=sample.start, row=sample.row)
                continue
            kept = self.num_kept
            clean = self.add(ids, start=sample.start, row=sample.row, keep=True)
            following = self.add(
                [self.mask_id] * self.width,
                start=sample.start + self.width,
                row=sample.row,
                behind=(clean,),
            )
            crossings[key] = _Crossing(kept, following)
        self.states.append(states)
        self.crossings.append(crossings)

    def batch(self, device: torch.device) -> SlotBatch:
        most = max(map(len, self.sees))
        sees = [[*seen, *[-1] * (most - len(seen))] for seen in self.sees]
        return SlotBatch(
            torch.tensor(self.ids, device=device),
            torch.tensor(self.start, device=device),
            torch.tensor(self.row, device=device),
            torch.tensor(sees, device=device),
            torch.tensor(self.store, device=device),
            torch.tensor(self.keep, device=device),
        )


@dataclass(slots=True)
class _Walker:
    """A sample on its walk: the slot it stands on and what it has committed since the root."""

    sample: _Sample
    states: dict[Key, int]
    crossings: dict[Key, _Crossing]
    slot: int
    key: Key = ROOT


class Engine:
    """Decodes many samples on one device. `add` requests, call `step` while `has_work`.

    `decode` turns token ids into text; samples with stop strings need it. With `record_every` each
    completion carries one visited state in so many (`single` unmasking only); 0 is off.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: EngineSettings,
        *,
        decode: Decode | None = None,
        record_every: int = 0,
    ) -> None:
        self._target = target
        self._decode = decode
        self._record_every = record_every
        self._drafter = drafter
        self._settings = settings
        self._waiting: deque[Request] = deque()
        self._samples: list[_Sample] = []
        self._free_rows = list(range(settings.max_sequences - 1, -1, -1))
        self._cache: PrefixCache = target.allocate(settings.max_sequences, target.block_length)
        self._stale = StaleStore(
            settings.max_sequences, target.block_length, target.vocab_size, target.device
        )

    @property
    def num_active(self) -> int:
        """Samples in flight."""
        return len(self._samples)

    @property
    def has_work(self) -> bool:
        return bool(self._samples or self._waiting)

    def begun(self) -> dict[int, Begun]:
        """Whole blocks of the samples in flight, by sample id; call it between steps."""
        samples = [sample for sample in self._samples if not sample.request.draft_free]
        found = {sample.request.sample_id: sample.begun() for sample in samples}
        return {number: begun for number, begun in found.items() if begun is not None}

    def add(self, request: Request) -> None:
        """Queue a sample; it joins between rounds when there is room."""
        if request.params.stop and self._decode is None:
            raise ValueError("stop strings need an engine that was given `decode`")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One round. Returns the samples that it finished, in the order in which they joined."""
        self._admit()
        if not self._samples:
            return []
        trees = self._draft()
        plan = _Plan(self._target.mask_id, self._target.block_length)
        for sample, tree in zip(self._samples, trees, strict=True):
            drafted = tree.drafted() if tree is not None else ()
            plan.add_sample(sample, drafted)
            sample.num_forwards += 1
            sample.num_drafted += len(drafted)
            sample.num_clean_passes += len(sample.to_store) if sample.step else 0
            sample.to_store = []
        hidden, kept = self._forward(plan.batch(self._target.device))
        finished = self._walk(plan, hidden, kept)
        done = [finished[sample.row] for sample in self._samples if sample.row in finished]
        self._samples = [sample for sample in self._samples if sample.row not in finished]
        self._free_rows += finished
        return done

    def _admit(self) -> None:
        width = self._target.block_length
        while self._waiting and self._free_rows:
            sample = _Sample.of(self._waiting.popleft(), row=self._free_rows.pop(), width=width)
            self._cache.ensure(-(-sample.end // width) * width)
            self._samples.append(sample)

    def _draft(self) -> list[DraftTree | None]:
        """A grown tree for each sample that has stale distributions and may be drafted."""
        trees: list[DraftTree | None] = []
        for sample in self._samples:
            wanted = sample.stale_masked is not None and not sample.request.draft_free
            if self._drafter is None or not self._settings.budget or not wanted:
                trees.append(None)
                continue
            trees.append(
                DraftTree(
                    num_masked=sum(sample.masked),
                    budget=self._settings.budget,
                    gamma=self._settings.gamma,
                    crossing=self._settings.crossing and sample.start + sample.width < sample.end,
                )
            )
        while True:
            asked = [
                (sample, tree, key)
                for sample, tree in zip(self._samples, trees, strict=True)
                if tree is not None
                for key in tree.frontier()
            ]
            if not asked:
                return trees
            self._expand(asked)

    def _expand(self, asked: Sequence[tuple[_Sample, DraftTree, Key]]) -> None:
        """Ask the drafter about one wave of hypothetical states of all samples."""
        assert self._drafter is not None
        device = self._target.device
        status = []
        for sample, _, key in asked:
            assert sample.stale_masked is not None
            of_state = [
                MASKED if masked else (SINCE if stale else COMMITTED)
                for masked, stale in zip(sample.masked, sample.stale_masked, strict=True)
            ]
            for position, _ in key:
                of_state[position] = SINCE
            status.append(of_state)
        params = [sample.request.params for sample, _, _ in asked]
        queries = Queries(
            row=torch.tensor([sample.row for sample, _, _ in asked], device=device),
            status=torch.tensor(status, device=device),
            start=torch.tensor([sample.start for sample, _, _ in asked], device=device),
            num_committed=torch.tensor(
                [sample.num_committed + len(key) for sample, _, key in asked], device=device
            ),
            noise_key=_keys([sample.request.noise_key for sample, _, _ in asked], device),
            temperature=torch.tensor([p.temperature for p in params], device=device),
            top_p=torch.tensor([p.top_p for p in params], device=device),
            top_k=torch.tensor([p.top_k for p in params], device=device),
        )
        proposals = self._drafter.propose(self._stale, queries, asked[0][0].rule.noise_key)
        for (_, tree, key), weights, positions, tokens in zip(
            asked,
            proposals.weight.tolist(),
            proposals.position.tolist(),
            proposals.token.tolist(),
            strict=True,
        ):
            tree.expand(
                key,
                [
                    Edge(((at, tok),), mass)
                    for mass, at, tok in zip(weights, positions, tokens, strict=True)
                    if mass > 0.0
                ],
            )
        for tree in {id(tree): tree for _, tree, _ in asked}.values():
            tree.select()

    def _forward(self, slots: SlotBatch) -> tuple[Tensor, list[tuple[Kept, int]]]:
        """Hidden rows of all slots, and where the KV of each kept slot is."""
        rows: list[Tensor] = []
        kept: list[tuple[Kept, int]] = []
        for part in slots.parts(self._settings.max_slots):
            hidden = self._target.forward(part, self._cache)
            rows.append(hidden.rows)
            kept += [(hidden.kept, index) for index in range(int(part.keep.sum()))]
        return rows[0] if len(rows) == 1 else torch.cat(rows), kept

    def _walk(
        self, plan: _Plan, hidden: Tensor, kept: Sequence[tuple[Kept, int]]
    ) -> dict[int, Completion]:
        """Follow every sample from its current state as far as its drafted states reach.

        Returns the finished ones by their cache row: a sample and its audit may fly together.
        """
        finished: dict[int, Completion] = {}
        walkers = [
            _Walker(sample, states, crossings, states[ROOT])
            for sample, states, crossings in zip(
                self._samples, plan.states, plan.crossings, strict=True
            )
        ]
        while walkers:
            # One rule a job, so nearly always one group.
            going: list[_Walker] = []
            for rule in dict.fromkeys(walker.sample.rule for walker in walkers):
                group = [walker for walker in walkers if walker.sample.rule == rule]
                going += self._visit(group, rule, hidden, kept, finished)
            walkers = going
        return finished

    def _visit(
        self,
        walkers: Sequence[_Walker],
        rule: Rule,
        hidden: Tensor,
        kept: Sequence[tuple[Kept, int]],
        finished: dict[int, Completion],
    ) -> list[_Walker]:
        """Apply the transition at each slot; returns the walkers that reached a drafted state."""
        device = self._target.device
        slots = torch.tensor([walker.slot for walker in walkers], device=device)
        logits = self._target.head(hidden[slots])
        samples = [walker.sample for walker in walkers]
        states = States(
            masked=torch.tensor([sample.masked for sample in samples], device=device),
            start=torch.tensor([sample.start for sample in samples], device=device),
            num_committed=torch.tensor([sample.num_committed for sample in samples], device=device),
            noise_key=_keys([sample.request.noise_key for sample in samples], device),
            temperature=torch.tensor(
                [sample.request.params.temperature for sample in samples], device=device
            ),
            top_p=torch.tensor([sample.request.params.top_p for sample in samples], device=device),
            top_k=torch.tensor([sample.request.params.top_k for sample in samples], device=device),
        )
        choice = transition(logits, states, rule)
        token, commit = choice.token.tolist(), choice.commit.tolist()
        if self._record_every:
            self._record(samples, logits, states, choice)
        going: list[_Walker] = []
        resting: list[int] = []
        for index, walker in enumerate(walkers):
            commits = _commits(token[index], commit[index])
            was_masked = list(walker.sample.masked)
            moved = self._advance(walker, commits, kept, finished)
            if moved is not None:
                walker.sample.num_accepted += 1
                going.append(moved)
            elif True in walker.sample.masked and walker.sample.num_committed:
                walker.sample.stale_masked = was_masked
                resting.append(index)
        if resting and self._drafter is not None:
            at = torch.tensor(resting, device=device)
            rows = torch.tensor([samples[index].row for index in resting], device=device)
            self._stale.put(rows, logits[at], states.masked[at], states.num_committed[at])
        return going

    def _record(
        self, samples: Sequence[_Sample], logits: Tensor, states: States, choice: Choice
    ) -> None:
        log_prob, ids = top_log_probs(logits, states.masked, self._stale.width)
        token, commit = choice.token.tolist(), choice.commit.tolist()
        for index, sample in enumerate(samples):
            if sample.recorder is None:
                sample.recorder = TrajectoryRecorder(self._record_every)
            sample.recorder.visit(
                start=sample.start,
                num_committed=sample.num_committed,
                masked=tuple(sample.masked),
                commits=_commits(token[index], commit[index]),
                log_prob=log_prob[index],
                ids=ids[index],
            )

    def _advance(
        self,
        walker: _Walker,
        commits: Key,
        kept: Sequence[tuple[Kept, int]],
        finished: dict[int, Completion],
    ) -> _Walker | None:
        """Commit, and move to the slot of the new state if it was drafted."""
        sample = walker.sample
        sample.commit(commits)
        end = sample.end_here(self._decode)
        if end is not None:
            finished[sample.row] = sample.completion(end)
            return None
        key = tuple(sorted(walker.key + commits))
        if True in sample.masked:
            slot = walker.states.get(key)
            if slot is None:
                return None
            return _Walker(sample, walker.states, walker.crossings, slot, key)
        block = _Block(list(sample.tokens), sample.start)
        sample.next_block()
        crossing = walker.crossings.get(key)
        if crossing is None:
            sample.to_store = [block]
            return None
        of_forward, index = kept[crossing.kept]
        self._cache.adopt(of_forward, index, row=sample.row, start=block.start)
        sample.num_clean_passes += 1
        return _Walker(sample, {}, {}, crossing.next_slot)


def _commits(token: Sequence[int], commit: Sequence[bool]) -> Key:
    """(W,) proposals and the positions to fix -> what is committed."""
    return tuple((position, token[position]) for position, fixed in enumerate(commit) if fixed)


def _keys(keys: Sequence[int], device: torch.device) -> Tensor:
    """64-bit keys as int64."""
    wrapped = [key - (1 << 64) if key >= 1 << 63 else key for key in keys]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)
