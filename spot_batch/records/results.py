"""What comes of a sample: a completion or an error, and what of it depends on scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


FinishReason = Literal["stop", "length"]
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
    "not_finite",  # under this target and its arithmetic, which a job never changes
    "too_long",
}
MACHINE_CODES = frozenset({"actor_crash", "oom"})  # another try may end otherwise


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

    `token_ids` is trimmed (no stop token, and none that a stop string begins in).
    `commit_step[i]` is the forward of draft-free decoding that fixed token i, counted from 0 over
    the sample. `num_draft_free_forwards` is how many forwards draft-free decoding of this sample
    takes. `text` is set where a stop string ended the sample: its text up to there. `trajectory` is
    set where the engine was asked to record.
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
class NotFinite:
    """A sample that cannot go on: the target's logits of one of its states are not finite.

    The state is of the block that begins at the absolute position `start`; draft-free decoding
    comes upon it in its forward number `step`, counted from 0 over the sample.
    """

    sample_id: int
    start: int
    step: int
    num_prompt_tokens: int

    def error(self) -> RowError:
        """The error row of the sample."""
        return RowError(
            code="not_finite",
            stage="decode",
            message=(
                f"the target's logits are not finite at forward {self.step}, in the block that "
                f"begins at position {self.start} ({self.num_prompt_tokens} prompt tokens): its "
                "activations overflow; model.target.dtype bfloat16 or float32 holds larger ones"
            ),
        )


Ended = Completion | NotFinite
"""What the engine says of a sample when it lands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """Why a sample has no generation: goes to errors/, the job goes on."""

    code: str
    stage: str
    message: str
    attempts: int = 1


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
