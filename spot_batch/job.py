"""The job spec: what a person writes, checked once, and the fingerprint of what decides data/.

Every section is a frozen pydantic model that refuses unknown keys. `load_spec` reads YAML and
dotted overrides, and turns each complaint into one line that names the key, the value and the
nearest known key.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from spot_batch.remote import is_url, local_folder

NUMERICS_VERSION = 1  # raised whenever canonical numerics would give other bits
LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-4, 1e4  # beyond, float32 logits over it mean nothing
LEAST_TOP_P, MOST_TOP_K = 1e-6, 2**31 - 1
ONE_FILE = (".jsonl", ".parquet")  # endings of an output that is one file
MAX_NEW_TOKENS = 32_768  # a commit step is 16 bits wide in data/

Format = Literal["auto", "jsonl", "json", "parquet", "arrow", "csv", "hf", "openai-batch"]
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
AutoOrAmount = Annotated[float | Literal["auto"], PlainValidator(_auto_or(float, 0))]
Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class Section(BaseModel):
    """A frozen part of the spec that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class InputSpec(Section):
    source: Names
    format: Format = "auto"
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
                f"messages ({self.messages!r}) and prompt ({self.prompt!r}) exclude each other: "
                "name one column"
            )
        if self.template is not None and self.format == "openai-batch":
            raise ValueError("template is not for openai-batch, whose requests are the prompts")
        if self.template is not None and (self.messages or self.prompt):
            raise ValueError("template excludes messages and prompt: it makes the prompt itself")
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


def checked_temperature(value: float) -> float:
    """0, or what float32 logits can be divided by; ValueError for anything else."""
    if value == 0.0 or LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE:
        return value
    raise ValueError(
        f"must be 0 or from {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, got {value:g}"
    )


def checked_top_p(value: float) -> float:
    """A share that leaves at least one candidate; ValueError for anything else."""
    if LEAST_TOP_P <= value <= 1.0:
        return value
    raise ValueError(f"must be from {LEAST_TOP_P:g} to 1, got {value:g}")


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
    actor_restarts_per_hour: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = 6


class EquivalenceSpec(Section):
    audit_fraction: Fraction = 0.01
    min_rows: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = 8
    on_fail: Literal["stop", "warn"] = "stop"


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

    @model_validator(mode="before")
    @classmethod
    def _long_forms(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        # Before any other check: a complaint about the value would repeat it.
        for path, what in _credentials(value, "", set()):
            raise ValueError(
                f"{path}: must not hold a credential ({what}): credentials stay out of the spec"
            )
        return _spelled_out(value)

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


def load_spec(path: Path | None, overrides: Mapping[str, object] | None = None) -> JobSpec:
    """The checked spec of a YAML file (or none) with dotted overrides laid over it.

    Overrides win over the file; a later override wins over an earlier one of the same key.
    """
    tree: dict[str, Any] = {} if path is None else _read_yaml(path)
    if path is not None and "name" not in tree:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("-._")
        tree["name"] = stem or "job"
    try:
        tree = _spelled_out(tree)
        for dotted, value in (overrides or {}).items():
            _lay_over(tree, dotted, value)
    except RecursionError:
        raise SpecError(f"{path or 'the spec'}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise SpecError(str(error)) from None
    return check_spec(tree)


def check_spec(tree: Mapping[str, object]) -> JobSpec:
    """The spec of a nested mapping, or a SpecError with one line a complaint."""
    try:
        return JobSpec.model_validate(tree)
    except ValidationError as error:
        raise SpecError("\n".join(_complaints(error))) from None
    except RecursionError:
        raise SpecError(f"the spec: {_TOO_DEEP}") from None


def parse_override(text: str) -> tuple[str, object]:
    """`a.b=v` as (key, value), the value read as YAML would read it."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"--set wants key=value, got {text!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        return key.strip(), value
    except RecursionError:
        raise SpecError(f"{key.strip()}: {_TOO_DEEP}") from None


def dump_spec(spec: JobSpec) -> str:
    """The spec as YAML that `load_spec` reads back as the same spec."""
    tree = spec.model_dump(mode="json")
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100))


def with_model_defaults(
    spec: JobSpec,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> JobSpec:
    """The spec with its open fields taken from the checkpoint or its family; where these say
    nothing either, 1.0, off and 0.9."""
    given = spec.generation
    update = {
        "temperature": _first_given(given.temperature, temperature, 1.0),
        "top_p": _first_given(given.top_p, top_p, 1.0),
        "top_k": _first_given(given.top_k, top_k, 0),
        "threshold": _first_given(given.threshold, threshold, 0.9),
    }
    tree = spec.model_dump()
    tree["generation"].update(update)
    return check_spec(tree)


def fingerprint_fields(
    spec: JobSpec, input_identity: Mapping[str, object], model_identity: Mapping[str, object]
) -> dict[str, object]:
    """The fields that decide the bytes of data/, flat: nothing of drafter, budget or scheduling.

    `input_identity` must hold num_rows; both identities hold JSON values only.
    """
    of_input = {"keep", "system", "overlong"}
    if spec.input.template is not None:  # only then: jobs of before it keep their fingerprints
        of_input.add("template")
    num_rows = input_identity["num_rows"]
    assert isinstance(num_rows, int), f"input identity wants a whole num_rows, got {num_rows!r}"
    tree = {
        "input": {
            **input_identity,
            **spec.input.model_dump(mode="json", include=of_input),
        },
        "model": {
            **spec.model.target.model_dump(mode="json", include={"dtype"}),
            "chat_template": spec.model.chat_template,
            **model_identity,
        },
        "generation": spec.generation.model_dump(mode="json"),
        "speculation": {
            "numerics": spec.speculation.numerics,
            "numerics_version": NUMERICS_VERSION,
        },
        "resources": {"cpu_threads": spec.resources.num_threads},
        "output": {
            **spec.output.model_dump(
                mode="json", include={"compression", "prefix", "include", "trajectory_every"}
            ),
            "rows_per_part": spec.rows_per_part(num_rows * spec.generation.n),
        },
    }
    return dict(_flat(tree))


def fingerprint(
    spec: JobSpec, input_identity: Mapping[str, object], model_identity: Mapping[str, object]
) -> tuple[str, dict[str, object]]:
    """(sha256 of the deciding fields, the fields): equal fingerprints mean equal bytes of data/."""
    fields = fingerprint_fields(spec, input_identity, model_identity)
    return hash_fields(fields), fields


def hash_fields(fields: Mapping[str, object]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def diff_fields(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line a differing field: `generation.temperature: 0 (directory) != 1 (spec)`."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        mine, theirs = _shown(old, key), _shown(new, key)
        if mine != theirs:
            lines.append(f"{key}: {mine} (directory) != {theirs} (spec)")
    return lines


# -- credentials -----------------------------------------------------------------------------------

# One slash is enough: that is what a pathlib path leaves of a URL's two.
_USER = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]+:/{1,2})(?:[^/?#\s]*|[^/\s]*:[^/\s]*)@", re.I)
_SECRET_PARAMETER = re.compile(
    r"(?P<key>[?&;#](?P<name>[\w.%~-]*(?:token|secret|passw(?:or)?d|passphrase|pwd|signature"
    r"|credentials?|authorization|accesskey(?:id)?|apikey|(?<![a-z0-9])(?:key|sig|auth))))"
    r"=[^&\s]+",  # a quote may be part of it: rather star out the quote that ends it too
    re.I,
)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]+:/{1,2}\S+", re.I)


def redacted(text: str) -> str:
    """The text with users, passwords and secret parameters of URLs starred out."""
    return _SECRET_PARAMETER.sub(r"\g<key>=***", _USER.sub(r"\g<scheme>***@", text))


def _credentials(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """(key, kind of credential) of every URL in the tree that holds one; never the credential."""
    if isinstance(value, str):
        for url in _URL.findall(value):
            if _USER.search(url):
                yield path, "a user or password in a URL"
            for parameter in _SECRET_PARAMETER.finditer(url):
                yield path, f"{parameter['name']}= in a URL"
    elif isinstance(value, BaseModel):
        yield from _credentials(value.model_dump(), path, seen)
    elif isinstance(value, Mapping | list | tuple):
        if id(value) in seen:  # an anchor met again: once is enough, and it may hold itself
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from _credentials(key, f"a key of {path or 'the spec'}", seen)
                yield from _credentials(inner, f"{path}.{key}" if path else str(key), seen)
        else:
            for inner in value:
                yield from _credentials(inner, path, seen)


# -- reading ---------------------------------------------------------------------------------------

_TOO_DEEP = "nested too deeply, or holds itself"
_ALIASES = {
    "generation": {
        "max_tokens": "max_new_tokens",
        "max_completion_tokens": "max_new_tokens",
        "gen_length": "max_new_tokens",
    }
}
_SHORT_FORMS: dict[str, Callable[[str], dict[str, object]]] = {
    "model": lambda text: {"target": {"path": text}},
    "model.target": lambda text: {"path": text},
    "model.drafter": lambda text: (
        {"kind": text} if text in ("auto", "none", "ranking") else {"path": text}
    ),
}
_NOT_YET = frozenset(
    [
        "model.target.cache",
        "model.target.suffix",
        "output.rename",
        "engine.max_pieces",
        "engine.gpu_memory_utilization",
        "resources.accelerator",
        "resources.memory_gib",
        "resources.usd_per_gpu_hour",
        "resources.one_device_kind",
        "resources.runtime_env",
        "failure.no_progress_seconds",
        "equivalence.max_overhead",
        "equivalence.alpha",
    ]
)


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """SafeLoader takes the last of two equal keys in silence; this one refuses."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            if isinstance(key, str) and key != "<<":
                if key in seen:
                    line = key_node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"line {line}: the key {key!r} stands twice",
                        key_node.start_mark,
                    )
                seen.add(key)
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{path}: no such spec file") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a folder, not a spec file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise SpecError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise SpecError(f"{path}: {_TOO_DEEP}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: a spec is a mapping of sections, got {type(tree).__name__}")
    return tree


def _spelled_out(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The tree with short forms and aliases replaced by the names the models know."""
    result: dict[str, Any] = {}
    aliases = _ALIASES.get(path, {})
    for key, value in tree.items():
        name = aliases.get(key, key)
        if name in result:
            raise ValueError(f"{path}.{key}: {name} is given twice (an alias of the same field)")
        inner = f"{path}.{name}" if path else str(name)
        if inner in _SHORT_FORMS and isinstance(value, str):
            value = _SHORT_FORMS[inner](value)
        result[name] = _spelled_out(value, inner) if isinstance(value, Mapping) else value
    return result


def _lay_over(tree: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    here = tree
    for depth, part in enumerate(parents, start=1):
        path = ".".join(parents[:depth])
        inner = here.get(part)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ValueError(f"{dotted}: {path} is {inner!r}, which has no keys")
        here[part] = inner
        here = inner
    section = ".".join(parents)
    name = _ALIASES.get(section, {}).get(last, last)
    path = f"{section}.{name}" if section else name
    if isinstance(value, str) and path in _SHORT_FORMS:
        value = _SHORT_FORMS[path](value)
        if path == "model" and isinstance(here.get(name), dict):
            here[name] = {**here[name], **value}  # a drafter given beside stays
            return
    here[name] = _spelled_out(value, path) if isinstance(value, Mapping) else value


# -- complaining -----------------------------------------------------------------------------------


def _complaints(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        path = _dotted(item["loc"])
        kind, given = item["type"], item.get("input")
        if kind == "extra_forbidden":
            yield _unknown(path)
        elif kind == "missing":
            hint = " (in the spec, or with -i)" if path == "input" or path == "input.source" else ""
            yield f"{'input.source' if path == 'input' else path}: missing{hint}"
        elif kind == "value_error":
            yield f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        elif kind == "model_type":
            yield f"{path or 'spec'}: must be a section with keys of its own, got {given!r}"
        else:
            message = item["msg"].replace("Input should be", "must be")
            yield f"{path}: {message}, got {given!r}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return re.sub(r"\.(literal\['all'\]|tuple\[str, \.\.\.\])", "", "".join(parts)).lstrip(".")


def _unknown(path: str) -> str:
    if path in _NOT_YET:
        return f"{path}: not supported by this version; leave it out"
    parent, _, name = path.rpartition(".")
    known = list(_known_keys(JobSpec))
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if near:
        return f"{path}: unknown key; did you mean {siblings[near[0]]}?"
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(known)}
    for section, aliases in _ALIASES.items():
        elsewhere.update({alias: f"{section}.{real}" for alias, real in aliases.items()})
    near = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    if near:
        return f"{path}: unknown key; did you mean {elsewhere[near[0]]}?"
    return f"{path}: unknown key; known here: {', '.join(siblings) or 'none'}"


def _known_keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = f"{path}.{name}" if path else name
        yield inner
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _known_keys(field.annotation, inner)


def _flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from _flat(value, inner)
        else:
            yield inner, value


def _shown(fields: Mapping[str, object], key: str) -> str:
    return json.dumps(fields[key], ensure_ascii=False) if key in fields else "absent"


def _first_given(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
