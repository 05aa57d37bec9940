"""Specs as people write them: YAML and overrides in, a checked spec or plain complaints out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel, ValidationError

from spot_batch.job.spec import ALIASES, SHORT_FORMS, JobSpec, SpecError, spelled_out


def load_spec(path: Path | None, overrides: Mapping[str, object] | None = None) -> JobSpec:
    """The checked spec of a YAML file (or none) with dotted overrides laid over it.

    Overrides win over the file; a later override wins over an earlier one of the same key.
    """
    tree: dict[str, Any] = {} if path is None else _read_yaml(path)
    if path is not None and "name" not in tree:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("-._")
        tree["name"] = stem or "job"
    try:
        tree = spelled_out(tree)
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


_TOO_DEEP = "nested too deeply, or holds itself"
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
    name = ALIASES.get(section, {}).get(last, last)
    path = f"{section}.{name}" if section else name
    if isinstance(value, str) and path in SHORT_FORMS:
        value = SHORT_FORMS[path](value)
        if path == "model" and isinstance(here.get(name), dict):
            here[name] = {**here[name], **value}  # a drafter given beside stays
            return
    here[name] = spelled_out(value, path) if isinstance(value, Mapping) else value


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
    for section, aliases in ALIASES.items():
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


def _first_given(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
