"""The job spec: what a person may write, section by section, and how each value is checked.

Every section is a frozen pydantic model that refuses unknown keys. What a complaint says, and how
YAML and overrides become a spec, is in reading.py; what of a spec decides data/, in fingerprint.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    field_validator,
    model_validator,
)

from spot_batch.job.limits import LEAST_TOP_P, MAX_NEW_TOKENS, MOST_TOP_K, checked_temperature
from spot_batch.job.remote import is_url, local_folder
from spot_batch.job.secrets import credentials_in

ONE_FILE = (".jsonl", ".parquet")  # endings of an output that is one file
InputFormat = Literal["auto", "jsonl", "json", "parquet", "arrow", "csv", "hf", "openai-batch"]
PerRow = Literal["temperature", "top_p", "seed", "max_new_tokens", "stop"]
OptionalColumn = Literal["token_ids", "commit_step", "usage", "rendered_prompt", "trajectory"]


class SpecError(ValueError):
    """A spec that cannot be run; the message names the key, the value and what would do."""


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {json.dumps(value)}")
    return value


def _auto_or(kind: type[int] | type[float], least: float) -> Callable[[object], int | float | str]:
    def check(value: object) -> int | float | str:
        noun = "a whole number" if kind is int else "a number"
        wrong = ValueError(f"must be auto or {noun} of at least {least:g}, got {value!r}")
        if value == "auto":
            return "auto"
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise wrong from None
        if number != float(value) or not math.isfinite(number) or number < least:
            raise wrong
        return number

    return check


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
Seed = Annotated[int, BeforeValidator(_not_bool), Field(ge=0, lt=2**64)]
Fraction = Annotated[float, BeforeValidator(_not_bool), Field(ge=0.0, le=1.0)]
Share = Annotated[float, BeforeValidator(_not_bool), Field(gt=0.0, le=1.0)]
Seconds = Annotated[float, BeforeValidator(_not_bool), Field(gt=0.0, allow_inf_nan=False)]
AutoOrCount = Annotated[int | Literal["auto"], PlainValidator(_auto_or(int, 1))]
AutoOrBudget = Annotated[int | Literal["auto"], PlainValidator(_auto_or(int, 0))]
AutoOrSeconds = Annotated[Seconds | Literal["auto"], Field(union_mode="left_to_right")]
AutoOrAmount = Annotated[float | Literal["auto"], PlainValidator(_auto_or(float, 0))]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class Section(BaseModel):
    """A frozen part of the spec that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class InputSpec(Section):
    source: Names
    format: InputFormat = "auto"
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    messages: str | None = None
    prompt: str | None = None
    template: str | None = Field(default=None, min_length=1)
    system: str | None = None
    custom_id: str | None = None
    keep: Literal["all"] | tuple[str, ...] = "all"
    limit: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] | None = None
    overlong: Literal["error", "truncate_left", "skip"] = "error"
    malformed: Literal["error", "refuse"] = "error"
    copy_limit_gib: Annotated[
        float, BeforeValidator(_not_bool), Field(ge=0.0, allow_inf_nan=False)
    ] = 50.0

    @field_validator("keep", mode="before")
    @classmethod
    def _keep_names(cls, value: object) -> object:
        if value == "all" or value is None:
            return "all"
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"must be all or a list of column names, got {value!r}")
        return tuple(value)

    @model_validator(mode="after")
    def _checked(self) -> InputSpec:
        if not self.source or not all(self.source):
            raise ValueError("source must name at least one file, folder, pattern or hub dataset")
        if self.messages is not None and self.prompt is not None:
            raise ValueError(
                f"input.messages ({self.messages!r}) and input.prompt ({self.prompt!r}) exclude "
                "each other: name one column"
            )
        if self.template is not None and self.format == "openai-batch":
            raise ValueError(
                "input.template is not for openai-batch, whose requests are the prompts"
            )
        if self.template is not None and (self.messages or self.prompt):
            raise ValueError(
                "input.template excludes input.messages and input.prompt: it makes the prompt"
            )
        return self


class TargetSpec(Section):
    path: str = Field(default="bundled", min_length=1)
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    block_length: Count | None = None
    mask_id: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] | None = None


class DrafterSpec(Section):
    """`kind: auto` without a path takes what fits the target; with one, the file says its kind."""

    kind: Literal["auto", "none", "ranking", "order"] = "auto"
    path: str | None = None

    @model_validator(mode="after")
    def _checked(self) -> DrafterSpec:
        if self.path is not None and self.kind in ("none", "ranking"):
            raise ValueError(f"kind {self.kind} takes no path, got {self.path!r}")
        if self.path is None and self.kind == "order":
            raise ValueError("kind order needs a path; auto takes the file trained for the target")
        return self


class ModelSpec(Section):
    target: TargetSpec = TargetSpec()
    drafter: DrafterSpec = DrafterSpec()
    chat_template: Literal["auto", "none"] = "auto"


class AdvancedSpec(Section):
    confidence: Literal["family", "max", "sampled", "sampled_tempered", "sampled_filtered"] = (
        "family"
    )
    noise_key: Literal["position_step", "position"] = "position_step"


class GenerationSpec(Section):
    """Nulls are taken from the checkpoint by `with_model_defaults`, then written back."""

    n: Count = 1
    seed: Seed = 0
    max_new_tokens: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=MAX_NEW_TOKENS)] = 256
    temperature: Annotated[float, BeforeValidator(_not_bool)] | None = None
    top_p: Annotated[float, BeforeValidator(_not_bool), Field(ge=LEAST_TOP_P, le=1.0)] | None = None
    top_k: Annotated[int, BeforeValidator(_not_bool), Field(ge=-1, le=MOST_TOP_K)] | None = None
    unmasking: Literal["single", "threshold"] = "single"
    threshold: Annotated[float, BeforeValidator(_not_bool), Field(gt=0.0, le=1.0)] | None = None
    stop: Names = ()
    stop_at: Literal["early", "block", "never"] = "early"
    per_row: Annotated[tuple[PerRow, ...], BeforeValidator(_one_or_many)] = ()
    advanced: AdvancedSpec = AdvancedSpec()

    @field_validator("temperature", mode="after")
    @classmethod
    def _temperature_in_range(cls, value: float | None) -> float | None:
        return None if value is None else checked_temperature(value)

    @field_validator("top_k", mode="after")
    @classmethod
    def _top_k_off(cls, value: int | None) -> int | None:
        return 0 if value == -1 else value

    @field_validator("stop", mode="after")
    @classmethod
    def _stop_texts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty stop text would end every sample at once")
        return value


class SpeculationSpec(Section):
    budget: AutoOrBudget = "auto"
    gamma: Annotated[float, BeforeValidator(_not_bool), Field(ge=0.0, lt=1.0)] = 0.0
    crossing: bool = True
    numerics: Literal["canonical", "fast"] = "canonical"


class EngineSpec(Section):
    max_sequences: AutoOrCount = "auto"


class OutputSpec(Section):
    path: str | None = None
    rows_per_part: AutoOrCount = "auto"
    compression: Literal["zstd", "lz4", "none"] = "zstd"
    prefix: str = ""
    include: tuple[OptionalColumn, ...] = ("token_ids", "commit_step", "usage")
    trajectory_every: Count = 4
    license: str | None = None

    @field_validator("path", mode="after")
    @classmethod
    def _a_directory(cls, value: str | None) -> str | None:
        if value is not None and (not value or "::" in value):
            raise ValueError(f"must be a folder or one URL, got {value!r}")
        if value is not None and value.startswith(("file:", "memory:")):
            raise ValueError(
                f"must be a folder's own path or the URL of a store that lasts, got {value!r}"
            )
        if value is not None and is_url(value) and value.endswith(ONE_FILE):
            raise ValueError(
                f"must be a job directory where it is a URL, got {value!r}; `spot-batch export` "
                "makes one file of it"
            )
        if value is not None and value.endswith((".arrow", ".csv", ".json")):
            raise ValueError(f"must be a folder, or one .jsonl or .parquet file, got {value!r}")
        return value

    @property
    def file(self) -> Path | None:
        """The one file that is published at the end, where `path` names one."""
        is_file = self.path is not None and self.path.endswith(ONE_FILE)
        return Path(self.path) if is_file and self.path is not None else None

    @field_validator("prefix", mode="after")
    @classmethod
    def _prefix_not_reserved(cls, value: str) -> str:
        if value.startswith("__spot_"):
            raise ValueError(f"names that start with __spot_ are reserved, got {value!r}")
        return value


class ResourcesSpec(Section):
    actors: AutoOrCount = "auto"
    gpus_per_actor: AutoOrAmount = "auto"
    cpu_threads: AutoOrCount = 1
    prefix_share: Share = 0.8
    prefix_gib: Annotated[float, BeforeValidator(_not_bool), Field(gt=0.0)] | None = None

    @property
    def num_threads(self) -> int:
        """Threads of an actor. `auto` is one, however many actors there are: it decides bits."""
        return 1 if self.cpu_threads == "auto" else self.cpu_threads


class SchedulingSpec(Section):
    order: Literal["longest_first", "input"] = "longest_first"
    lease_seconds: Seconds = 30.0
    publish_seconds: Seconds = 10.0
    checkpoint_seconds: Seconds = 60.0


class FailureSpec(Section):
    row_attempts: Count = 3
    max_error_fraction: Fraction = 0.01
    no_progress_seconds: AutoOrSeconds = "auto"
    actor_restarts_per_hour: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = 6


class EquivalenceSpec(Section):
    audit_fraction: Fraction = 0.01
    min_rows: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = 8
    on_fail: Literal["auto", "stop", "warn"] = "auto"


ALIASES = {
    "generation": {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "gen_length": "max_new_tokens",
    }
}
SHORT_FORMS: dict[str, Callable[[str], dict[str, object]]] = {
    "model": lambda text: {"target": {"path": text}},
    "model.target": lambda text: {"path": text},
    "model.drafter": lambda text: (
        {"kind": text} if text in ("auto", "none", "ranking") else {"path": text}
    ),
}


def spelled_out(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The tree with short forms and aliases replaced by the names the models know."""
    result: dict[str, Any] = {}
    aliases = ALIASES.get(path, {})
    for key, value in tree.items():
        name = aliases.get(key, key)
        if name in result:
            raise ValueError(f"{path}.{key}: {name} is given twice (an alias of the same field)")
        inner = f"{path}.{name}" if path else str(name)
        if inner in SHORT_FORMS and isinstance(value, str):
            value = SHORT_FORMS[inner](value)
        result[name] = spelled_out(value, inner) if isinstance(value, Mapping) else value
    return result


class JobSpec(Section):
    version: Literal[1] = 1
    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    input: InputSpec
    model: ModelSpec = ModelSpec()
    generation: GenerationSpec = GenerationSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    engine: EngineSpec = EngineSpec()
    output: OutputSpec = OutputSpec()
    resources: ResourcesSpec = ResourcesSpec()
    scheduling: SchedulingSpec = SchedulingSpec()
    failure: FailureSpec = FailureSpec()
    equivalence: EquivalenceSpec = EquivalenceSpec()

    @property
    def stops_on_difference(self) -> bool:
        """Whether a row that differs when decoded again withholds `_SUCCESS`. With fast numerics
        rows may differ: `auto` warns of it."""
        if self.equivalence.on_fail == "auto":
            return self.speculation.numerics == "canonical"
        return self.equivalence.on_fail == "stop"

    @model_validator(mode="before")
    @classmethod
    def _long_forms(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        # Before any other check: a complaint about the value would repeat it.
        for path, what in credentials_in(value, "", set()):
            raise ValueError(
                f"{path}: must not hold a credential ({what}): credentials stay out of the spec"
            )
        return spelled_out(value)

    @model_validator(mode="before")
    @classmethod
    def _of_requests(cls, value: object) -> object:
        """Rows that are OpenAI requests name their own columns, whatever else the spec says."""
        if not isinstance(value, Mapping) or not isinstance(value.get("input"), Mapping):
            return value
        if value["input"].get("format") != "openai-batch":
            return value
        columns = {"messages": "messages", "prompt": None, "custom_id": "custom_id"}
        generation = {**(value.get("generation") or {}), "per_row": get_args(PerRow)}
        return {**value, "input": {**value["input"], **columns}, "generation": generation}

    @model_validator(mode="after")
    def _trajectories_of_single(self) -> JobSpec:
        if "trajectory" in self.output.include and self.generation.unmasking != "single":
            raise ValueError("output.include: trajectory wants generation.unmasking single")
        return self

    @property
    def directory(self) -> Path:
        """The job directory: `output.path`, or beside the one file that it names.

        Of a URL it is the folder on this machine in which the job is worked in.
        """
        file = self.output.file
        if file is not None:
            return file.with_name(file.name + ".job")
        if self.output.path is None:
            return Path("out") / self.name
        return (
            local_folder(self.output.path) if is_url(self.output.path) else Path(self.output.path)
        )

    def rows_per_part(self, num_samples: int) -> int:
        """Samples to a part: from the spec and the pinned input alone, so that parts never move."""
        if self.output.rows_per_part != "auto":
            return self.output.rows_per_part
        return min(max(math.ceil(num_samples / 64), 256), 250_000)
