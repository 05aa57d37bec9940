"""The engine: one forward a round over slots of many samples, drafted or not.

A round drafts, runs one forward over every sample's current state, its drafted states, its finished
block and its prompt blocks, and then walks: from the current state on, the target's own transition
is applied, and while the state it leads to is among the drafted ones the walk goes on without
another forward. Draft-free decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from spot_batch.checkpoints.shapes import padded_length
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import StaleStore, top_log_probs
from spot_batch.engine.budget import MOST_SLOTS, Budget, Load
from spot_batch.engine.drafting import Root, grow, noise_keys
from spot_batch.engine.latency import LatencyTable, Stopwatch
from spot_batch.engine.memory import longest_prefix
from spot_batch.engine.recording import TrajectoryRecorder
from spot_batch.engine.stops import Decode, End, find_end
from spot_batch.engine.transition import Rule, States, transition
from spot_batch.engine.tree import ROOT, DraftTree, Key
from spot_batch.models.device import onto, to_host
from spot_batch.models.slots import Kept, PrefixCache, SlotBatch, Target
from spot_batch.records.results import Begun, Completion, Rounds, SampleStats
from spot_batch.records.sampling import Request

logger = logging.getLogger(__name__)

_LEAST_SLOTS = 2
"""Of one forward: a finished block and the one behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How the engine spends a device; nothing here changes an output.

    `budget`: drafted slots a sample a round; `auto` shares out among all samples as many as the
    measured device has use for. `gamma`: least mass of a drafted state. `crossing`: draft over the
    end of a block. `max_slots`: of one forward; a larger round runs several. `max_positions`: of
    all rows of the cache together, padding included; samples join only while each could be written
    to its end. `longest_first`: of the waiting ones the longest joins next, so that none of them is
    alone at the end; else the one that has waited longest.
    """

    max_sequences: int = 32
    budget: int | Literal["auto"] = 0
    gamma: float = 0.0
    crossing: bool = True
    max_slots: int = 1024
    max_positions: int | None = None
    longest_first: bool = False

    def __post_init__(self) -> None:
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1, got {self.max_sequences}")
        if self.budget != "auto" and self.budget < 0:
            raise ValueError(f"budget must be at least 0, got {self.budget}")
        if not 0.0 <= self.gamma < 1.0:
            raise ValueError(f"gamma must be at least 0 and below 1, got {self.gamma}")
        if self.max_slots < 2:
            raise ValueError(f"max_slots must be at least 2, got {self.max_slots}")
        if self.max_positions is not None and self.max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {self.max_positions}")


@dataclass(order=True, slots=True)
class _Waiting:
    """A request in line: the smallest rank is next, then who came first."""

    rank: tuple[int, int]
    number: int
    request: Request = field(compare=False)


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


@dataclass(frozen=True, slots=True)
class _Draft:
    """A sample's tree, what its probabilities were scaled by, and the states that get a slot."""

    tree: DraftTree
    scale: float
    keys: Sequence[Key]


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

    def batch(self) -> SlotBatch:
        most = max(map(len, self.sees))
        sees = [[*seen, *[-1] * (most - len(seen))] for seen in self.sees]
        return SlotBatch(
            torch.tensor(self.ids),
            torch.tensor(self.start),
            torch.tensor(self.row),
            torch.tensor(sees),
            torch.tensor(self.store),
            torch.tensor(self.keep),
        )


@dataclass(slots=True)
class _Walker:
    """A sample on its walk: the slot it stands on and what it has committed since the root."""

    sample: _Sample
    states: dict[Key, int]
    crossings: dict[Key, _Crossing]
    slot: int
    draft: _Draft | None = None
    key: Key = ROOT


class Engine:
    """Decodes many samples on one device. `add` requests, call `step` while `has_work`.

    `latency` is the device's, which `budget: auto` needs; `clock` is read around its forwards, the
    device's own if none is given. `decode` turns token ids into text;
    samples with stop strings need it. With `record_every` each completion carries one visited state
    in so many (`single` unmasking only); 0 is off. `num_steps` counts steps of draft-free decoding:
    the progress that was made, and `rounds` what it was made in.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: EngineSettings,
        *,
        latency: LatencyTable | None = None,
        clock: Callable[[], float] | None = None,
        decode: Decode | None = None,
        record_every: int = 0,
    ) -> None:
        self._auto: Budget | None = None
        if settings.budget == "auto" and drafter is not None:
            if latency is None:
                raise ValueError("budget auto needs the device's latency table")
            self._auto = Budget(latency)
        self._watch = Stopwatch(target.device, clock)
        self._target = target
        self._decode = decode
        self._record_every = record_every
        self._drafter = drafter if settings.budget else None
        self._settings = settings
        self._waiting: list[_Waiting] = []  # a heap
        self._number = count()
        self.num_steps = 0
        self.rounds = Rounds()
        self._samples: list[_Sample] = []
        self._max_slots, self._num_rows = settings.max_slots, settings.max_sequences
        self._is_draining = False
        self._held = (self._rows_that_fit(padded_length(target.block_length)), target.block_length)
        self._cache: PrefixCache = target.allocate(*self._held)
        self._stale = StaleStore(
            settings.max_sequences, target.block_length, target.vocab_size, target.device
        )

    @property
    def num_active(self) -> int:
        """Samples in flight."""
        return len(self._samples)

    @property
    def num_waiting(self) -> int:
        """Samples that have not joined yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._samples or self._waiting)

    def begun(self) -> dict[int, Begun]:
        """Whole blocks of the samples in flight, by sample id; call it between steps."""
        samples = [sample for sample in self._samples if not sample.request.draft_free]
        found = {sample.request.sample_id: sample.begun() for sample in samples}
        return {number: begun for number, begun in found.items() if begun is not None}

    def add(self, request: Request) -> None:
        """Queue a sample; it joins between rounds when there is room.

        Raises ValueError where it could not even alone: `PrefixMemory.fault` says so beforehand.
        """
        if request.params.stop and self._decode is None:
            raise ValueError("stop strings need an engine that was given `decode`")
        most, needed = self._settings.max_positions, self._longest(request)
        if most is not None and needed > most:
            raise ValueError(f"sample {request.sample_id} needs {needed} positions of {most}")
        rank = (0, 0)
        if self._settings.longest_first:
            done = len(request.begun.token_ids) if request.begun is not None else 0
            rank = (done - request.params.max_new_tokens, -len(request.prompt_ids))
        heapq.heappush(self._waiting, _Waiting(rank, next(self._number), request))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One round. Returns the samples that it finished, in the order in which they joined."""
        self._admit()
        if not self._samples:
            return []
        load = self._load()
        drafts = self._draft(load)
        plan = _Plan(self._target.mask_id, self._target.block_length)
        for sample in self._samples:
            draft = drafts.get(sample.row)
            drafted = draft.keys if draft is not None else ()
            plan.add_sample(sample, drafted)
            sample.num_forwards += 1
            sample.num_drafted += len(drafted)
            sample.num_clean_passes += len(sample.to_store) if sample.step else 0
            sample.to_store = []
        num_drafted = len(plan.ids) - load.num_slots
        self.rounds += Rounds(
            num_rounds=1,
            num_drafting=int(num_drafted > 0),
            num_samples=load.num_roots,
            num_drafted_slots=num_drafted,
        )
        self._watch.start()
        hidden, kept = self._forward(plan.batch())
        self._watch.stop()
        finished = self._walk(plan, drafts, hidden, kept)
        if self._auto is not None:
            self._auto.observe(len(plan.ids), load.num_keys, self._watch.seconds)
        done = [finished[sample.row] for sample in self._samples if sample.row in finished]
        self._samples = [sample for sample in self._samples if sample.row not in finished]
        return done

    def _admit(self) -> None:
        """Let waiting samples join while there is a row for the next one."""
        while self._waiting:
            if self._is_draining:
                if self._samples:
                    return
                self._halve_rows()
            request = self._waiting[0].request
            row = self._row_for(request)
            if self._is_draining:
                continue
            if row is None:
                return
            heapq.heappop(self._waiting)
            self._samples.append(_Sample.of(request, row=row, width=self._target.block_length))
            if self._auto is not None:
                self._auto.joined(row)

    def _row_for(self, request: Request) -> int | None:
        """A free row that holds the sample at its longest; None while others must land first.

        Rows are of one length, so there are as many as fit at that of the longest in flight. Where
        memory does not hold them after all, fewer fly from now on: the cache is made anew with half
        its rows once those in flight have landed.
        """
        used = {sample.row for sample in self._samples}
        if len(used) >= self._num_rows:
            return None
        longest = max(self._longest(each) for each in (request, *self._in_flight()))
        num_rows = self._rows_that_fit(longest)
        row = min(set(range(len(used) + 1)) - used)
        if max(row, *used, 0) >= num_rows:
            return None
        held_rows, held_positions = self._held
        if row >= held_rows or longest > held_positions:
            try:
                self._cache.resize(num_rows, longest)
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error) or num_rows == 1:
                    raise
                self._num_rows, self._is_draining = num_rows, True
                return None
            self._held = (num_rows, longest)
        return row

    def _rows_that_fit(self, num_positions: int) -> int:
        most = self._settings.max_positions
        return self._num_rows if most is None else min(self._num_rows, most // num_positions)

    def _longest(self, request: Request) -> int:
        return longest_prefix(request, self._target.block_length)

    def _in_flight(self) -> list[Request]:
        return [sample.request for sample in self._samples]

    def _halve_rows(self) -> None:
        self._num_rows = max(1, self._num_rows // 2)
        logger.warning("out of memory: at most %d samples in flight now", self._num_rows)
        del self._cache  # before there is another one
        self._held = (self._num_rows, self._target.block_length)
        self._cache = self._target.allocate(*self._held)
        self._is_draining = False

    def _draft(self, load: Load) -> dict[int, _Draft]:
        """By row, the drafts of the samples that have stale distributions and may be drafted."""
        if self._drafter is None:
            return {}
        if self._auto is not None and not self._auto.begin(load):
            return {}
        roots = [root for root in map(self._root, self._samples) if root is not None]
        gamma, budget = self._settings.gamma, self._settings.budget
        if budget != "auto":
            trees = grow(self._drafter, self._stale, roots, budget=budget, gamma=gamma)
            return {
                root.row: _Draft(tree, 1.0, tree.drafted())
                for root, tree in zip(roots, trees, strict=True)
            }
        assert self._auto is not None
        scales = [self._auto.correction(root.row) for root in roots]
        trees = grow(
            self._drafter,
            self._stale,
            roots,
            budget=MOST_SLOTS,
            gamma=max(gamma, self._auto.floor),
            scales=scales,
            ask_above=self._auto.ask_above,
            goes_on=self._auto.another_wave,
        )
        chosen = self._auto.choose(trees)
        return {
            root.row: _Draft(tree, scale, keys)
            for root, tree, scale, keys in zip(roots, trees, scales, chosen, strict=True)
        }

    def _load(self) -> Load:
        """What the round costs before anything is drafted."""
        samples, width = self._samples, self._target.block_length
        return Load(
            num_roots=len(samples),
            num_slots=len(samples) + sum(len(sample.to_store) for sample in samples),
            num_keys=sum(sample.start for sample in samples) / len(samples) + width,
            noisy=sum(sample.request.params.temperature > 0 for sample in samples) / len(samples),
        )

    def _root(self, sample: _Sample) -> Root | None:
        """The sample's current state as what a tree stands on; None where nothing is drafted."""
        if sample.stale_masked is None or sample.request.draft_free:
            return None
        return Root(
            row=sample.row,
            start=sample.start,
            masked=sample.masked,
            stale_masked=sample.stale_masked,
            num_committed=sample.num_committed,
            noise_key=sample.request.noise_key,
            params=sample.request.params,
            crossing=self._settings.crossing and sample.start + sample.width < sample.end,
        )

    def _forward(self, slots: SlotBatch) -> tuple[Tensor, list[tuple[Kept, int]]]:
        """Hidden rows of all slots, and where the KV of each kept slot is.

        Where memory does not hold a forward it is run again in halves, from now on all are. Nothing
        is lost: what a forward stores it stores again, the same.
        """
        while True:
            try:
                return self._in_parts(slots)
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error) or self._max_slots <= _LEAST_SLOTS:
                    raise
                self._max_slots = max(_LEAST_SLOTS, min(self._max_slots, len(slots)) // 2)
                logger.warning("out of memory: at most %d slots a forward now", self._max_slots)
            if self._target.device.type == "cuda":
                torch.cuda.empty_cache()

    def _in_parts(self, slots: SlotBatch) -> tuple[Tensor, list[tuple[Kept, int]]]:
        rows: list[Tensor] = []
        kept: list[tuple[Kept, int]] = []
        for part in slots.parts(self._max_slots):
            hidden = self._target.forward(part, self._cache)
            rows.append(hidden.rows)
            kept += [(hidden.kept, index) for index in range(int(part.keep.sum()))]
        return rows[0] if len(rows) == 1 else torch.cat(rows), kept

    def _walk(
        self,
        plan: _Plan,
        drafts: Mapping[int, _Draft],
        hidden: Tensor,
        kept: Sequence[tuple[Kept, int]],
    ) -> dict[int, Completion]:
        """Follow every sample from its current state as far as its drafted states reach.

        Returns the finished ones by their cache row: a sample and its audit may fly together.
        """
        finished: dict[int, Completion] = {}
        walkers = [
            _Walker(sample, states, crossings, states[ROOT], drafts.get(sample.row))
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
        slots = torch.tensor([walker.slot for walker in walkers])
        logits = self._target.head(hidden[onto(slots, device)])
        samples = [walker.sample for walker in walkers]
        states = States(
            masked=torch.tensor([sample.masked for sample in samples]),
            start=torch.tensor([sample.start for sample in samples]),
            num_committed=torch.tensor([sample.num_committed for sample in samples]),
            noise_key=noise_keys([sample.request.noise_key for sample in samples]),
            temperature=torch.tensor([sample.request.params.temperature for sample in samples]),
            top_p=torch.tensor([sample.request.params.top_p for sample in samples]),
            top_k=torch.tensor([sample.request.params.top_k for sample in samples]),
        )
        packed = to_host(transition(logits, states, rule).packed()).tolist()
        made = [_commits(each) for each in packed]
        if self._record_every:
            self._record(samples, logits, states, made)
        going: list[_Walker] = []
        resting: list[int] = []
        drafts_next = self._drafter is not None and (self._auto is None or self._auto.wants_stale)
        for index, walker in enumerate(walkers):
            was_masked = list(walker.sample.masked)
            moved = self._advance(walker, made[index], kept, finished)
            if moved is not None:
                walker.sample.num_accepted += 1
                going.append(moved)
            elif True in walker.sample.masked and walker.sample.num_committed:
                walker.sample.stale_masked = was_masked if drafts_next else None
                resting.append(index)
        if resting and drafts_next:
            at = torch.tensor(resting)
            rows = torch.tensor([samples[index].row for index in resting])
            self._stale.put(
                onto(rows, device),
                logits[onto(at, device)],
                onto(states.masked[at], device),
                onto(states.num_committed[at], device),
            )
        return going

    def _record(
        self, samples: Sequence[_Sample], logits: Tensor, states: States, made: Sequence[Key]
    ) -> None:
        masked = onto(states.masked, logits.device)
        log_prob, ids = top_log_probs(logits, masked, self._stale.width)
        for index, sample in enumerate(samples):
            if sample.recorder is None:
                sample.recorder = TrajectoryRecorder(self._record_every)
            sample.recorder.visit(
                start=sample.start,
                num_committed=sample.num_committed,
                masked=tuple(sample.masked),
                commits=made[index],
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
        key = tuple(sorted(walker.key + commits))
        if self._auto is not None and walker.draft is not None:
            draft = walker.draft
            self._auto.learn(sample.row, draft.tree, walker.key, key, draft.scale)
        sample.commit(commits)
        self.num_steps += 1
        end = sample.end_here(self._decode)
        if end is not None:
            finished[sample.row] = sample.completion(end)
            return None
        if True in sample.masked:
            slot = walker.states.get(key)
            if slot is None:
                return None
            return _Walker(sample, walker.states, walker.crossings, slot, walker.draft, key)
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


def _commits(packed: Sequence[int]) -> Key:
    """(W,) of `Choice.packed` -> what is committed."""
    return tuple((position, each >> 1) for position, each in enumerate(packed) if each & 1)


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has a class for it; on a CPU the message of a RuntimeError tells."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(part in str(error) for part in ("not enough memory", "can't allocate memory"))
