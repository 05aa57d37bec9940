"""What travels inside the program: named types, none of which needs torch or ray.

A sample is one generation: sample id = row index * n + sample index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from spot_batch.job import LEAST_TOP_P, MOST_TOP_K, checked_temperature

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Unmasking = Literal["single", "threshold"]
StopAt = Literal["early", "block", "never"]
Confidence = Literal["max", "sampled", "sampled_tempered", "sampled_filtered"]
NoiseKey = Literal["position_step", "position"]
FinishReason = Literal["stop", "length"]
Purpose = Literal["data", "audit"]
PromptKind = Literal["messages", "prompt"]

SKIP_CODES = frozenset({"too_long_skipped"})  # error rows that a spec asked for: no failures
ROW_CODES = SKIP_CODES | {  # faults of the row itself: it fails again, whoever tries
    "bad_csv",
    "bad_custom_id",
    "bad_encoding",
    "bad_json",
    "bad_override",
    "bad_prompt",
    "bad_request",
    "bad_type",
    "empty_prompt",
    "too_long",
}
MACHINE_CODES = frozenset({"actor_crash", "oom"})  # another try may end otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one sample is decoded; every field is resolved, none is left to a default of the model.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1.0 are off. `stop_ids` end the sample; the
    first one to stand in the generated part is where it is cut, itself excluded.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    unmasking: Unmasking = "single"
    threshold: float = 0.9
    stop_at: StopAt = "early"
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    confidence: Confidence = "sampled_tempered"
    noise_key: NoiseKey = "position_step"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        try:
            checked_temperature(self.temperature)
        except ValueError as error:
            raise ValueError(f"temperature {error}") from None
        if not LEAST_TOP_P <= self.top_p <= 1.0:
            raise ValueError(f"top_p must be from {LEAST_TOP_P:g} to 1, got {self.top_p}")
        if not 0 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k must be from 0 (off) to {MOST_TOP_K}, got {self.top_k}")
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold must be above 0 and at most 1, got {self.threshold}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStats:
    """What depends on scheduling, and therefore never enters data/.

    A forward is a verify forward the sample took part in (NFE); a clean pass stores a finished
    block's KV and is counted apart, fused or not.
    """

    num_forwards: int = 0
    num_clean_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """What the rounds of an engine were: how many, in how many of them anything was drafted, the
    samples in flight and the slots of drafted states, summed over rounds."""

    num_rounds: int = 0
    num_drafting: int = 0
    num_samples: int = 0
    num_drafted_slots: int = 0

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(
            num_rounds=self.num_rounds + other.num_rounds,
            num_drafting=self.num_drafting + other.num_drafting,
            num_samples=self.num_samples + other.num_samples,
            num_drafted_slots=self.num_drafted_slots + other.num_drafted_slots,
        )

    @property
    def budget(self) -> float:
        """Drafted slots a sample a round, on average: what a fixed budget says at most."""
        return self.num_drafted_slots / self.num_samples if self.num_samples else 0.0

    @property
    def drafting_share(self) -> float:
        """The share of rounds in which anything was drafted."""
        return self.num_drafting / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The whole blocks of a sample that is not finished: every token behind its prompt up to the
    end of a block, the forward that fixed each, and how many forwards of draft-free decoding that
    took."""

    token_ids: tuple[int, ...]
    commit_step: tuple[int, ...]
    num_steps: int
    stats: SampleStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sample for the engine. `noise_key` is 64 bits; `draft_free` asks for no drafts; `begun`
    is what was decoded of it before, to go on from."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    noise_key: int
    params: SamplingParams
    draft_free: bool = False
    begun: Begun | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VisitedState:
    """A state that decoding stood on: what the target said there, and what was committed next.

    `masked` (W,) before the commit; `log_prob` (W * K,) float16 and `ids` (W * K,) int32 are the
    target's top entries; `positions` and `tokens` are this state's own commit and those that
    followed in its block.
    """

    start: int
    num_committed: int
    masked: tuple[bool, ...]
    log_prob: NDArray[np.float16]
    ids: NDArray[np.int32]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The states of a sample, in order, and the address of the noise they were left under."""

    noise_key: int
    temperature: float
    states: tuple[VisitedState, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine makes of a request.

    `token_ids` is trimmed (no stop token). `commit_step[i]` is the forward of draft-free decoding
    that fixed token i, counted from 0 over the sample. `num_draft_free_forwards` is how many
    forwards draft-free decoding of this sample takes. `text` is set where a stop string ended the
    sample: its text up to there. `trajectory` is set where the engine was asked to record.
    """

    sample_id: int
    token_ids: tuple[int, ...]
    commit_step: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_draft_free_forwards: int
    stats: SampleStats
    text: str | None = None
    trajectory: Trajectory | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """Why a sample has no generation: goes to errors/, the job goes on."""

    code: str
    stage: str
    message: str
    attempts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Sample ids lent to one actor. Audit leases are decoded again draft-free."""

    lease_id: int
    sample_ids: tuple[int, ...]
    purpose: Purpose = "data"


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What a published segment tells the driver: metadata only, no rows."""

    name: str
    purpose: Purpose
    sample_ids: tuple[int, ...]
    num_rows: int
    num_errors: int
    num_bytes: int
    checksum: str
    num_tokens: int
    stats: SampleStats
    num_draft_free_forwards: int
    error_codes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """An actor's state, as `collect` returns it: new receipts and what is still in flight."""

    receipts: Sequence[Receipt] = field(default_factory=tuple)
    num_in_flight: int = 0
    num_waiting: int = 0
    num_unpublished: int = 0
    elapsed_s: float = 0.0
    rounds: Rounds = Rounds()


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One pinned file. `digest` says what it holds; size and mtime_ns say whether to look again.

    `origin` is the URL or the compressed file that `path` was kept from, "" for none;
    `origin_mark` says whether to look at it again.
    """

    path: str
    format: str
    size: int
    mtime_ns: int
    digest: str
    first_row: int
    num_rows: int
    origin: str = ""
    origin_mark: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputChunk:
    """Neighbouring rows that are read together: where they stand in their file.

    `offset` and `num_bytes` are bytes for text formats, a row group or batch number and 0 for the
    others. `line` is the 1-based line of the first row, 0 where lines mean nothing.
    """

    file: int
    first_row: int
    num_rows: int
    offset: int
    num_bytes: int
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedInput:
    """What the input is, frozen when the job is submitted: actors read their rows by it.

    `schema` is the serialised Arrow schema of the whole input. `faults` are the first rows known
    to be unusable, `num_faults` how many there are (text formats only; tables are read later).
    `template_columns` are those that `input.template` reads; `prompt_column` is "" then.
    """

    files: tuple[InputFile, ...]
    chunks: tuple[InputChunk, ...]
    num_rows: int
    schema: bytes
    prompt_column: str
    prompt_kind: PromptKind
    custom_id_column: str | None = None
    num_faults: int = 0
    faults: tuple[str, ...] = ()
    template_columns: tuple[str, ...] = ()

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """The columns that a prompt is made of."""
        return (self.prompt_column,) if self.prompt_column else self.template_columns

    @property
    def identity(self) -> dict[str, object]:
        """What of the input decides the output: content, never a path or a time."""
        digests = [file.digest for file in self.files]
        if len(digests) != 1:
            digests = [hashlib.sha256("\n".join(digests).encode()).hexdigest()]
        return {
            "digest": digests[0],
            "num_rows": self.num_rows,
            "prompt_column": self.prompt_column,
            "prompt_kind": self.prompt_kind,
            "custom_id_column": self.custom_id_column,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A sample that is done, one way or the other, as an actor hands it to the store.

    `rows` is the input rows it came with and `position` its row in them; the kept columns are
    taken from there. `text` is the decoded completion, "" for an error. `seed` is the row's seed or
    the job's. `prompt_text` is the rendered prompt, or the raw row where it could not be rendered.
    `custom_id` is None for an error row whose id cannot be read.
    """

    sample_id: int
    custom_id: str | None
    seed: int
    result: Completion | RowError
    rows: pa.Table
    position: int
    text: str = ""
    prompt_text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Samples decoded again draft-free, compared with what was published."""

    num_compared: int
    num_differed: int
    differing: tuple[int, ...] = ()


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
