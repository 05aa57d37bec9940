"""From sample ids to requests for the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import pyarrow as pa

from spot_batch.inputs.errors import RowFault
from spot_batch.inputs.given import number, texts, whole
from spot_batch.inputs.ids import noise_key
from spot_batch.inputs.reader import InputRows
from spot_batch.inputs.render import PromptRenderer, RenderedPrompt
from spot_batch.job.limits import MAX_NEW_TOKENS, checked_temperature, checked_top_p
from spot_batch.job.spec import JobSpec
from spot_batch.records.input import PinnedInput
from spot_batch.records.results import Completion, Outcome, RowError
from spot_batch.records.sampling import Confidence, Request, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSample:
    """A sample ready for the engine (`request`), or one that failed before it (`error`).

    `custom_id` is None for a row with a fault whose own id cannot be read: the row's number would
    pass for an id that another row may have.
    """

    sample_id: int
    custom_id: str | None
    seed: int
    rows: pa.Table
    position: int
    prompt_text: str
    request: Request | None
    error: RowError | None

    def outcome(self, result: Completion | RowError, text: str = "") -> Outcome:
        """What the store takes, once the engine (or a failure) has answered."""
        return Outcome(
            sample_id=self.sample_id,
            custom_id=self.custom_id,
            seed=self.seed,
            result=result,
            rows=self.rows,
            position=self.position,
            text=text,
            prompt_text=self.prompt_text,
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One input row, read and rendered once for all of its samples."""

    custom_id: str | None
    seed: int
    position: int
    prompt_text: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams | None
    error: RowError | None


class RowReader(Protocol):
    """Where rows come from: an InputReader, or the rows of a sample that is decoded again."""

    def read(self, row_indices: Sequence[int]) -> InputRows: ...

    def where(self, row_index: int) -> str: ...


class SamplePreparer:
    """From sample ids to requests: reads rows, renders prompts, applies per-row overrides.

    `confidence` is the target family's rule, taken where the spec says `family`. The spec's
    sampling fields must have been resolved (`with_model_defaults`).
    """

    def __init__(
        self,
        spec: JobSpec,
        pinned: PinnedInput,
        reader: RowReader,
        renderer: PromptRenderer,
        *,
        stop_ids: Sequence[int],
        confidence: Confidence,
    ) -> None:
        self._reader = reader
        self._renderer = renderer
        self._num_samples = spec.generation.n
        self._seed = spec.generation.seed
        self._per_row = spec.generation.per_row
        self._custom_id = pinned.custom_id_column
        self._prompt_columns = pinned.prompt_columns
        self._used = list(
            dict.fromkeys(
                name
                for name in (*pinned.prompt_columns, self._custom_id, *self._per_row)
                if name is not None
            )
        )
        self._params = sampling_params(spec, stop_ids=stop_ids, confidence=confidence)

    def prepare(
        self, sample_ids: Sequence[int], *, draft_free: bool = False
    ) -> list[PreparedSample]:
        """One prepared sample an id, in the order asked for."""
        row_indices = list(dict.fromkeys(each // self._num_samples for each in sample_ids))
        read = self._reader.read(row_indices)
        values = read.table.select(self._used).to_pylist()
        made = {
            row_index: self._row(row_index, values[position], position, read)
            for position, row_index in enumerate(row_indices)
        }
        return [
            self._sample(each, made[each // self._num_samples], read.table, draft_free=draft_free)
            for each in sample_ids
        ]

    def _row(
        self, row_index: int, values: Mapping[str, object], position: int, read: InputRows
    ) -> _Row:
        custom_id = str(row_index) if self._custom_id is None else None
        seed, text = self._seed, read.raw.get(position, "")
        try:
            if position in read.faults:
                custom_id = custom_id or read.faults[position].custom_id
                raise read.faults[position]
            custom_id = custom_id or self._id_of(values)
            text = _shown({name: values[name] for name in self._prompt_columns})
            seed = _override(values, "seed", self._per_row, self._seed)
            params = self._params_of(values)
            prompt = self._rendered(values, params)
        except RowFault as fault:
            stage = "input" if position in read.faults else "prompt"
            message = f"{self._reader.where(row_index)}: {fault.message}"
            error = RowError(code=fault.code, stage=stage, message=message)
            return _Row(custom_id, seed, position, text, (), None, error)
        return _Row(custom_id, seed, position, prompt.text, prompt.token_ids, params, None)

    def _rendered(self, values: Mapping[str, object], params: SamplingParams) -> RenderedPrompt:
        try:
            return self._renderer.render(values, max_new_tokens=params.max_new_tokens)
        except RowFault:
            raise
        except Exception as error:
            logger.warning("a prompt cannot be made", exc_info=True)
            raise RowFault("bad_prompt", f"{type(error).__name__}: {error}") from error

    def _sample(
        self, sample_id: int, row: _Row, table: pa.Table, *, draft_free: bool
    ) -> PreparedSample:
        request = None
        if row.params is not None:
            assert row.custom_id is not None, "a row that is decoded has an id"
            request = Request(
                sample_id=sample_id,
                prompt_ids=row.prompt_ids,
                noise_key=noise_key(row.seed, row.custom_id, sample_id % self._num_samples),
                params=row.params,
                draft_free=draft_free,
            )
        return PreparedSample(
            sample_id=sample_id,
            custom_id=row.custom_id,
            seed=row.seed,
            rows=table,
            position=row.position,
            prompt_text=row.prompt_text,
            request=request,
            error=row.error,
        )

    def _id_of(self, values: Mapping[str, object]) -> str:
        assert self._custom_id is not None
        value = values[self._custom_id]
        if value is None or value == "":
            raise RowFault("bad_custom_id", f"column {self._custom_id!r} is empty")
        return str(value)

    def _params_of(self, values: Mapping[str, object]) -> SamplingParams:
        if not self._per_row:
            return self._params
        own = {str(name): values.get(name) for name in self._per_row}
        temperature, top_p = (
            number(own.get(name), f"column {name!r}", check, code=_BAD_OVERRIDE)
            for name, check in (("temperature", checked_temperature), ("top_p", checked_top_p))
        )
        stop = texts(own.get("stop"), "column 'stop'", code=_BAD_OVERRIDE)
        usual = self._params
        return replace(
            usual,
            max_new_tokens=_override(values, "max_new_tokens", self._per_row, usual.max_new_tokens),
            temperature=usual.temperature if temperature is None else temperature,
            top_p=usual.top_p if top_p is None else top_p,
            stop=usual.stop if stop is None else tuple(stop),
        )


def unprepared(
    spec: JobSpec,
    pinned: PinnedInput,
    reader: RowReader,
    sample_ids: Sequence[int],
    error: RowError,
) -> list[PreparedSample]:
    """Samples that end in `error`, made from the reader alone: nothing of their rows is rendered.

    What kills whoever renders a row does not kill whoever says so.
    """
    n, own_seed = spec.generation.n, "seed" in spec.generation.per_row
    row_indices = list(dict.fromkeys(each // n for each in sample_ids))
    read = reader.read(row_indices)
    position_of = {row_index: position for position, row_index in enumerate(row_indices)}
    names = {*pinned.prompt_columns, pinned.custom_id_column, "seed" if own_seed else None} - {None}
    values = read.table.select(sorted(map(str, names))).to_pylist()

    def failed(sample_id: int) -> PreparedSample:
        row_index = sample_id // n
        position = position_of[row_index]
        row, fault = values[position], read.faults.get(position)
        custom_id: str | None = str(row_index)
        if fault is not None:
            custom_id = fault.custom_id
        elif pinned.custom_id_column is not None:
            custom_id = str(row[pinned.custom_id_column] or "") or None
        seed = spec.generation.seed
        with suppress(RowFault):
            seed = _override(row, "seed", spec.generation.per_row, seed)
        shown = _shown({name: row[name] for name in pinned.prompt_columns})
        return PreparedSample(
            sample_id=sample_id,
            custom_id=custom_id,
            seed=seed,
            rows=read.table,
            position=position,
            prompt_text=read.raw.get(position, shown),
            request=None,
            error=replace(error, message=f"{reader.where(row_index)}: {error.message}"),
        )

    return [failed(sample_id) for sample_id in sample_ids]


def sampling_params(
    spec: JobSpec, *, stop_ids: Sequence[int], confidence: Confidence
) -> SamplingParams:
    """How the job decodes a sample that overrides nothing."""
    given = spec.generation
    assert given.temperature is not None, "the spec's sampling fields are resolved first"
    assert given.top_p is not None
    assert given.top_k is not None
    assert given.threshold is not None
    rule = given.advanced.confidence
    return SamplingParams(
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        unmasking=given.unmasking,
        threshold=given.threshold,
        stop_at=given.stop_at,
        stop_ids=tuple(stop_ids),
        stop=given.stop,
        confidence=confidence if rule == "family" else rule,
        noise_rule=given.advanced.noise_key,
    )


_BAD_OVERRIDE = "bad_override"
_BOUNDS = {"seed": (0, 2**64 - 1), "max_new_tokens": (1, MAX_NEW_TOKENS)}


def _override(values: Mapping[str, object], name: str, per_row: Sequence[str], default: int) -> int:
    """A row's own whole number, or the job's where the row has none."""
    value = values.get(name) if name in per_row else None
    low, high = _BOUNDS[name]
    if isinstance(value, float) and value.is_integer():  # whole numbers beside nulls, in pandas
        value = int(value)
    checked = whole(value, f"column {name!r}", low, high, code=_BAD_OVERRIDE)
    return default if checked is None else checked


def _shown(values: Mapping[str, object]) -> str:
    """What a prompt was to be made of: one column's value, or several with their names."""
    value = next(iter(values.values())) if len(values) == 1 else dict(values)
    return value if isinstance(value, str) else str(value)
