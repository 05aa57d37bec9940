"""A sample in flight: its current state, what it has written, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spot_batch.engine.drafting import Root
from spot_batch.engine.recording import TrajectoryRecorder
from spot_batch.engine.stops import Decode, End, StopScan
from spot_batch.engine.transition import Rule
from spot_batch.engine.tree import Key
from spot_batch.job.limits import MOST_COMMIT_STEP
from spot_batch.records.results import Begun, Completion, NotFinite, SampleStats
from spot_batch.records.sampling import Request


@dataclass(slots=True)
class FinishedBlock:
    """A finished block whose KV is not stored yet."""

    tokens: list[int]
    start: int


@dataclass(slots=True)
class Sample:
    """A sample that holds a row of the cache.

    The current state is the block at `start`: its `tokens` and which of them are still `masked`.
    `to_store` are the blocks before it that the next forward stores. `stale_masked` is the mask of
    the state whose distributions the drafter reads, or None where there are none. `written` and
    `steps` hold the token of each position behind the prompt, and the step that fixed it.
    """

    request: Request
    row: int
    width: int
    rule: Rule
    scan: StopScan
    to_store: list[FinishedBlock]
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
    def of(cls, request: Request, *, row: int, width: int, decode: Decode | None = None) -> Sample:
        """The sample of a request at its first state, or where it was left; `decode` is for stop
        strings."""
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
            scan=StopScan(request.params, decode),
            to_store=[FinishedBlock(prompt[at : at + width], at) for at in range(0, start, width)],
            start=start,
            tokens=remainder + [-1] * num_open,
            masked=[False] * len(remainder) + [True] * num_open,
        )
        length = -(-sample.end // width) * width - len(request.prompt_ids)
        sample.written, sample.steps = [-1] * length, [-1] * length
        if begun is not None:
            sample._go_on_from(begun)
        return sample

    def _go_on_from(self, begun: Begun) -> None:
        self.written[: len(begun.token_ids)] = begun.token_ids
        self.steps[: len(begun.commit_step)] = begun.commit_step
        self.step = begun.num_steps
        self.num_forwards = begun.stats.num_forwards
        self.num_clean_passes = begun.stats.num_clean_passes
        self.num_drafted = begun.stats.num_drafted
        self.num_accepted = begun.stats.num_accepted

    @property
    def stats(self) -> SampleStats:
        """What it has taken so far."""
        return SampleStats(
            num_forwards=self.num_forwards,
            num_clean_passes=self.num_clean_passes,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
        )

    @property
    def end(self) -> int:
        """The absolute position behind the last token that may be written."""
        return len(self.request.prompt_ids) + self.request.params.max_new_tokens

    def begun(self) -> Begun | None:
        """Its whole blocks; None where there are none behind the prompt's."""
        length = self.start - len(self.request.prompt_ids)
        if length <= 0:
            return None
        # The counts are those of now, a little more than of the blocks alone: they decide nothing.
        return Begun(
            token_ids=tuple(self.written[:length]),
            commit_step=tuple(self.steps[:length]),
            num_steps=max(self.steps[:length]) + 1,
            stats=self.stats,
        )

    def root(self, *, crossing: bool) -> Root | None:
        """The current state as what a draft tree stands on; None where nothing is drafted."""
        if self.stale_masked is None or self.request.draft_free:
            return None
        return Root(
            row=self.row,
            start=self.start,
            masked=self.masked,
            stale_masked=self.stale_masked,
            num_committed=self.num_committed,
            noise_key=self.request.noise_key,
            params=self.request.params,
            crossing=crossing and self.start + self.width < self.end,
        )

    def commit(self, commits: Key) -> None:
        """Fix tokens; all of them belong to one step of draft-free decoding."""
        offset = self.start - len(self.request.prompt_ids)
        for position, token in commits:
            assert self.masked[position], f"position {position} is committed already"
            self.tokens[position] = token
            self.masked[position] = False
            self.written[offset + position] = token
            # The longest sample ends inside a block, all of whose positions take steps.
            self.steps[offset + position] = min(self.step, MOST_COMMIT_STEP)
        self.num_committed += len(commits)
        self.step += 1

    def next_block(self) -> FinishedBlock:
        """Leave the block, which is finished, for the next one, all masked; returns the former."""
        finished = FinishedBlock(self.tokens, self.start)
        self.start += self.width
        self.tokens = [-1] * self.width
        self.masked = [True] * self.width
        self.num_committed = 0
        self.stale_masked = None
        return finished

    def end_here(self) -> End | None:
        """Where the sample ends, if it does with what is committed now."""
        first_open = self.masked.index(True) if True in self.masked else self.width
        num_fixed = max(0, self.start - len(self.request.prompt_ids) + first_open)
        if num_fixed == self.num_checked and first_open < self.width:
            return None
        self.num_checked = num_fixed
        whole = first_open == self.width
        return self.scan.find_end(self.written, num_fixed, whole=whole)

    def not_finite(self) -> NotFinite:
        """What becomes of the sample where the logits of its current state are not finite."""
        return NotFinite(
            sample_id=self.request.sample_id,
            start=self.start,
            step=self.step,
            num_prompt_tokens=len(self.request.prompt_ids),
        )

    def completion(self, end: End) -> Completion:
        """The sample, trimmed to its end."""
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
