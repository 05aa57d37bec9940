"""The engine: one forward a round over slots of many samples, drafted or not.

A round drafts, runs one forward over every sample's current state, its drafted states, its finished
block and its prompt blocks, and then walks: from the current state on, the target's own transition
is applied, and while the state it leads to is among the drafted ones the walk goes on without
another forward. Draft-free decoding is the same loop with nothing drafted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import torch

from spot_batch.checkpoints.shapes import VISIT_BYTES
from spot_batch.drafters.base import Drafter
from spot_batch.drafters.distributions import StaleStore
from spot_batch.engine.budget import MOST_SLOTS, Budget, Workload
from spot_batch.engine.clock import Stopwatch
from spot_batch.engine.drafting import grow
from spot_batch.engine.latency import LatencyTable
from spot_batch.engine.memory import longest_prefix
from spot_batch.engine.round import Draft, Round
from spot_batch.engine.rows import CacheRows
from spot_batch.engine.sample import Sample
from spot_batch.engine.stops import Decode
from spot_batch.engine.walk import Verifier
from spot_batch.models.slots import Target
from spot_batch.records.results import Begun, Completion, Ended, NotFinite, Rounds
from spot_batch.records.sampling import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """How the engine spends a device; nothing here changes an output.

    `budget`: drafted slots a sample a round; `auto` shares out among all samples as many as the
    measured device has use for. `gamma`: least mass of a drafted state. `crossing`: draft over the
    end of a block. `max_slots`: of one forward; a larger round runs several. `max_positions`: of
    all rows of the cache together, padding included; samples join only while each could be written
    to its end. `visit_bytes`: what the states that are looked at in one call may take together.
    `longest_first`: of the waiting ones the longest joins next, so that none of them is
    alone at the end; else the one that has waited longest.
    """

    max_sequences: int = 32
    budget: int | Literal["auto"] = 0
    gamma: float = 0.0
    crossing: bool = True
    max_slots: int = 1024
    max_positions: int | None = None
    visit_bytes: int = VISIT_BYTES
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


class Engine:
    """Decodes many samples on one device. `add` requests, call `step` while `has_work`.

    `latency` is the device's, which `budget: auto` needs; `clock` is read around its forwards, the
    device's own if none is given. `decode` turns token ids into text;
    samples with stop strings need it. With `record_every` each completion carries one visited state
    in so many (`single` unmasking only); 0 is off. `rounds` says what its rounds were.
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
        self._target, self._settings = target, settings
        self._drafter = drafter if settings.budget else None
        self._decode = decode
        self._watch = Stopwatch(target.device, clock)
        self._waiting: list[_Waiting] = []  # a heap
        self._number = count()
        self._samples: list[Sample] = []
        self.rounds = Rounds()
        self._rows = CacheRows(
            target,
            max_sequences=settings.max_sequences,
            max_slots=settings.max_slots,
            max_positions=settings.max_positions,
        )
        self._stale = StaleStore(
            settings.max_sequences, target.block_length, target.vocab_size, target.device
        )
        self._verifier = Verifier(
            target,
            self._rows,
            stale=self._stale if self._drafter is not None else None,
            auto=self._auto,
            record_every=record_every,
            visit_bytes=settings.visit_bytes,
        )

    @property
    def num_active(self) -> int:
        """How many samples are in flight."""
        return len(self._samples)

    @property
    def num_waiting(self) -> int:
        """How many samples have not joined yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sample is in flight or waits."""
        return bool(self._samples or self._waiting)

    @property
    def num_steps(self) -> int:
        """Steps of draft-free decoding: the progress that was made."""
        return self._verifier.num_steps

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
        most = self._settings.max_positions
        needed = longest_prefix(request, self._target.block_length)
        if most is not None and needed > most:
            raise ValueError(f"sample {request.sample_id} needs {needed} positions of {most}")
        rank = (0, 0)
        if self._settings.longest_first:
            done = len(request.begun.token_ids) if request.begun is not None else 0
            rank = (done - request.params.max_new_tokens, -len(request.prompt_ids))
        heapq.heappush(self._waiting, _Waiting(rank, next(self._number), request))

    def run(self) -> Iterator[Completion]:
        """Decode all that was added. Raises ValueError for a sample whose logits are not finite."""
        while self.has_work:
            for ended in self.step():
                if isinstance(ended, NotFinite):
                    raise ValueError(f"sample {ended.sample_id}: {ended.error().message}")
                yield ended

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """One round. Returns the samples that ended in it, in the order in which they joined."""
        self._admit()
        if not self._samples:
            return []
        load = self._load()
        drafts = self._draft(load)
        planned = self._plan(load, drafts)
        with self._watch:
            forwarded = self._rows.forward(planned.batch())
        finished = self._verifier.walk(planned.samples, forwarded)
        if self._auto is not None:
            self._auto.observe(len(planned.ids), load.num_keys, self._watch.seconds)
        return self._land(finished)

    def _admit(self) -> None:
        """Let waiting samples join while there is a row for the next one."""
        while self._waiting:
            request = self._waiting[0].request
            flying = {sample.row: sample.request for sample in self._samples}
            row = self._rows.row_for(request, flying)
            if row is None:
                return
            heapq.heappop(self._waiting)
            width = self._target.block_length
            self._samples.append(Sample.of(request, row=row, width=width, decode=self._decode))
            if self._auto is not None:
                self._auto.joined(row)

    def _load(self) -> Workload:
        """What the round costs before anything is drafted."""
        samples, width = self._samples, self._target.block_length
        return Workload(
            num_roots=len(samples),
            num_slots=len(samples) + sum(len(sample.to_store) for sample in samples),
            num_keys=sum(sample.start for sample in samples) / len(samples) + width,
            noisy=sum(sample.request.params.temperature > 0 for sample in samples) / len(samples),
        )

    def _draft(self, load: Workload) -> dict[int, Draft]:
        """By row, the drafts of the samples that have stale distributions and may be drafted."""
        if self._drafter is None:
            return {}
        if self._auto is not None and not self._auto.begin(load):
            return {}
        crossing = self._settings.crossing
        found = [sample.root(crossing=crossing) for sample in self._samples]
        roots = [root for root in found if root is not None]
        gamma, budget = self._settings.gamma, self._settings.budget
        if budget != "auto":
            trees = grow(self._drafter, self._stale, roots, budget=budget, gamma=gamma)
            return {
                root.row: Draft(tree, 1.0, tree.drafted())
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
            root.row: Draft(tree, scale, keys)
            for root, tree, scale, keys in zip(roots, trees, scales, chosen, strict=True)
        }

    def _plan(self, load: Workload, drafts: Mapping[int, Draft]) -> Round:
        """The slots of the round."""
        planned = Round(self._target.mask_id, self._target.block_length)
        for sample in self._samples:
            planned.add_sample(sample, drafts.get(sample.row))
        num_drafted = len(planned.ids) - load.num_slots
        self.rounds += Rounds(
            num_rounds=1,
            num_drafting=int(num_drafted > 0),
            num_samples=load.num_roots,
            num_drafted_slots=num_drafted,
        )
        return planned

    def _land(self, finished: Mapping[int, Ended]) -> list[Ended]:
        """Take the samples that have ended out of the flight."""
        done = [finished[sample.row] for sample in self._samples if sample.row in finished]
        self._samples = [sample for sample in self._samples if sample.row not in finished]
        return done
