"""One published sample again, draft-free, from the job directory: identical, or how far off."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.engine.stops import Decode
from spot_batch.engine.transition import Rule, States, perturbed_noise_step, transition
from spot_batch.inputs.prepare import PreparedSample
from spot_batch.inputs.reader import InputReader, InputRows
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.scan import read_part_of
from spot_batch.models.device import choose_device
from spot_batch.noise import gumbel
from spot_batch.records.results import Completion
from spot_batch.records.sampling import Request
from spot_batch.service.assemble import load_job_target, require_numerics, sample_preparer, text_of
from spot_batch.service.plan import JobPlan, plan_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a sample first went another way: the forward, and what each of the two fixed there.

    `gap` is by how much the replay preferred its own choice: of log-odds where the positions
    differ (`kind` position), of perturbed logits where the tokens do (`kind` token). A small one is
    a near tie that other arithmetic decides otherwise; a large one is another model or a bug.
    """

    forward: int
    position: int
    token_id: int | None
    published_position: int
    published_token_id: int | None
    kind: str
    gap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A sample decoded again. `differing` are the compared columns that are not the same."""

    custom_id: str
    sample_index: int
    num_tokens: int
    generation: str
    differing: tuple[str, ...]
    difference: Difference | None = None


def replay(job: JobDirectory, row: str, *, sample_index: int = 0) -> Replay:
    """Decodes a published sample again, draft-free. ValueError where there is no such sample.

    Its row is the published one where that still holds what the prompt was made of, else the
    pinned input's.
    """
    from spot_batch.models.numerics import NumericsMismatch

    published = _find(job, row, sample_index)
    plan = plan_of(job, check_input=False)
    prepared, request = _prepared(job, plan, published)
    torch.set_num_threads(job.spec.resources.num_threads)
    target = load_job_target(job.spec, plan.info, choose_device("auto"))
    if job.numerics_path.exists():
        try:
            require_numerics(job, target)
        except NumericsMismatch as error:
            logger.warning("%s; a difference may be that of the arithmetic", error)
    watch, text = _Watch(target), text_of(plan.tokenizer)
    again = _decode(watch, request, text)
    generation = again.text if again.text is not None else text(again.token_ids)
    outcome = {
        "generation": generation.encode("utf-8", "replace").decode(),
        "finish_reason": again.finish_reason,
        "token_ids": list(again.token_ids),
        "commit_step": list(again.commit_step),
    }
    differing = tuple(
        name for name, value in outcome.items() if name in published and published[name] != value
    )
    assert prepared.custom_id is not None, "a published sample has an id"
    difference = None
    if differing and {"token_ids", "commit_step"} <= published.keys():
        difference = _difference(watch, request, text, again, published)
    return Replay(
        custom_id=prepared.custom_id,
        sample_index=sample_index,
        num_tokens=len(again.token_ids),
        generation=generation,
        differing=differing,
        difference=difference,
    )


# -- the sample ------------------------------------------------------------------------------------


def _find(job: JobDirectory, row: str, sample_index: int) -> dict[str, Any]:
    """The published sample by its custom_id: our columns without their prefix, and its table."""
    prefix = job.spec.output.prefix
    for part in range(job.num_parts):
        table = read_part_of(job, "data", part)
        if table is None:
            continue
        mine = pc.and_(
            pc.equal(table[prefix + "custom_id"], row),
            pc.equal(table[prefix + "sample_index"], sample_index),
        )
        found = table.filter(mine)
        if found.num_rows:
            own = {
                name.removeprefix(prefix): found[name][0].as_py()
                for name in job.schema.names[len(job.kept) :]
            }
            return {**own, "table": found}
    raise _not_published(job, row, sample_index)


def _not_published(job: JobDirectory, row: str, sample_index: int) -> OutputError:
    """Why there is no such sample: it failed, or nobody knows it."""
    for part in range(job.num_parts):
        table = read_part_of(job, "errors", part)
        for failed in table.to_pylist() if table is not None else ():
            if (failed["custom_id"], failed["sample_index"]) == (row, sample_index):
                return OutputError(
                    f"{job.root}: sample {sample_index} of row {row!r} has no generation, "
                    f"it is in errors/: {failed['code']}: {failed['message']}"
                )
    return OutputError(
        f"{job.root}: no published sample {sample_index} of a row with custom_id {row!r}"
    )


class _PublishedRow:
    """Reads the one row that a published sample came from, out of the sample itself."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, row_indices: Sequence[int]) -> InputRows:
        assert len(row_indices) == 1, f"want one row, got {len(row_indices)}"
        return InputRows(tuple(row_indices), self._table)

    def where(self, row_index: int) -> str:
        return f"row {row_index}"


def _prepared(
    job: JobDirectory, plan: JobPlan, published: Mapping[str, Any]
) -> tuple[PreparedSample, Request]:
    pinned, table = job.pinned, published["table"]
    used = {*pinned.prompt_columns, *job.spec.generation.per_row}
    used |= {pinned.custom_id_column} if pinned.custom_id_column is not None else set()
    if used <= set(table.column_names):
        reader: InputReader | _PublishedRow = _PublishedRow(table)
    else:
        check_unchanged(pinned)
        reader = InputReader(pinned)
    preparer = sample_preparer(job.spec, pinned, plan.info, plan.tokenizer, reader=reader)
    sample_id = published["row_index"] * job.spec.generation.n + published["sample_index"]
    (prepared,) = preparer.prepare([sample_id], draft_free=True)
    assert prepared.request is not None, f"a published sample has a request: {prepared.error}"
    return prepared, prepared.request


# -- decoding --------------------------------------------------------------------------------------


class _Watch:
    """A target whose logits of one forward can be kept: draft-free decoding asks once a forward."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.wanted: int | None = None
        self.logits: Tensor | None = None
        self._num_calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def begin(self, wanted: int | None = None) -> None:
        self.wanted, self.logits, self._num_calls = wanted, None, 0

    def head(self, rows: Tensor) -> Tensor:
        logits: Tensor = self._target.head(rows)
        if self._num_calls == self.wanted:
            self.logits = logits.clone()
        self._num_calls += 1
        return logits


def _decode(watch: _Watch, request: Request, text: Decode, wanted: int | None = None) -> Completion:
    watch.begin(wanted)
    engine = Engine(watch, None, EngineSettings(max_sequences=1, budget=0), decode=text)
    engine.add(request)
    return next(engine.run())


def _difference(
    watch: _Watch,
    request: Request,
    text: Decode,
    again: Completion,
    published: Mapping[str, Any],
) -> Difference | None:
    """The first forward at which the two fixed something else; None where only the end differs."""
    mine = list(zip(again.commit_step, again.token_ids, strict=True))
    theirs = list(zip(published["commit_step"], published["token_ids"], strict=True))
    length = min(len(mine), len(theirs))
    apart = [
        min(one[0], other[0])
        for one, other in zip(mine[:length], theirs[:length], strict=True)
        if one != other
    ]
    if not apart:
        return None
    forward = min(apart)
    ours = {at: token for at, (step, token) in enumerate(mine) if step == forward}
    given = {at: token for at, (step, token) in enumerate(theirs) if step == forward}
    changed = sorted(ours.items() ^ given.items())
    at = next((place for place, _ in sorted(ours.items()) if (place, ours[place]) in changed), None)
    there = next((place for place in sorted(given) if (place, given[place]) in changed), None)
    prompt = len(request.prompt_ids)
    _decode(watch, request, text, wanted=forward)
    kind, gap = _gap(watch, request, mine, forward, ours=(at, ours), given=(there, given))
    return Difference(
        forward=forward,
        position=-1 if at is None else prompt + at,
        token_id=None if at is None else ours[at],
        published_position=-1 if there is None else prompt + there,
        published_token_id=None if there is None else given[there],
        kind=kind,
        gap=gap,
    )


def _gap(
    watch: _Watch,
    request: Request,
    mine: Sequence[tuple[int, int]],
    forward: int,
    *,
    ours: tuple[int | None, Mapping[int, int]],
    given: tuple[int | None, Mapping[int, int]],
) -> tuple[str, float]:
    """(kind, by how much the replay's choice is ahead of the published one at this forward)."""
    logits, width = watch.logits, int(watch.block_length)
    assert logits is not None, f"forward {forward} was not decoded"
    at, there = ours[0], given[0]
    if at is None or there is None:  # what was fixed instead lies behind the published end
        return "position", math.nan
    prompt = len(request.prompt_ids)
    start = (prompt + min(at, there)) // width * width
    fixed = {prompt + place for place, (step, _) in enumerate(mine) if step < forward}
    masked = [place >= prompt and place not in fixed for place in range(start, start + width)]
    params = request.params
    states = States.of(
        [request],
        masked=[masked],
        start=[start],
        num_committed=[sum(place >= start for place in fixed)],
    )
    rule = Rule.of(params)
    choice = transition(logits, states, rule)
    here, other = prompt + at - start, prompt + there - start
    token = int(choice.token[0, other])
    if token == given[1][there]:
        return "position", float(choice.log_odds[0, here] - choice.log_odds[0, other])
    both = torch.tensor([token, given[1][there]])
    scores = logits[0, other].cpu()[both]
    if params.temperature > 0:
        scores = scores / params.temperature + gumbel(
            states.noise_key.expand(2),
            position=torch.full((2,), prompt + there),
            step=perturbed_noise_step(states.num_committed, rule.noise_rule).expand(2),
            token=both,
        )
    return "token", float(scores[0] - scores[1])
