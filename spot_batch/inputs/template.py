"""Prompts out of several columns: `input.template`, Jinja over the columns of a row.

A person writes the template; the rows are somebody else's text, which is put into it and never read
as a template. It runs in Jinja's immutable sandbox, reads no file, and what would differ from one
run to the next (a random filter, the address of an object) is refused.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.job.reading import check_spec
from spot_batch.job.spec import JobSpec

ROW = "row"  # all columns by their names, also those that are no words: row["a name"]
MOST_CHARS = 64 << 20  # of one prompt: a loop may write without end

_MARKS = ("{{", "{%")
_PLAIN = (str, int, float, list, tuple, dict, datetime.date, datetime.time, datetime.timedelta)
_GLOBALS = ("range", "dict", "namespace")
TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)
"""What a template raises over a row that it cannot take, be it a job's own or a checkpoint's."""


class _Null(StrictUndefined):
    """A null column: false and none, and no text."""

    def __bool__(self) -> bool:  # type: ignore[override]
        return False


def with_template(spec: JobSpec) -> JobSpec:
    """The spec with the text of its template, where it names a file. Raises InputError.

    What holds no `{{` or `{%` is the name of a file: as a template it would be one prompt for all.
    """
    given = spec.input.template
    if given is None or any(mark in given for mark in _MARKS):
        return spec
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(
            f"input.template: {given!r} is neither a template (it holds no {{{{ or {{%) nor a file "
            f"that can be read ({why})"
        ) from None
    if not any(mark in text for mark in _MARKS):
        raise InputError(f"input.template: {given} holds no {{{{ or {{%: every prompt is the same")
    tree = spec.model_dump()
    tree["input"]["template"] = text
    return check_spec(tree)


class PromptTemplate:
    """A template and the columns that it reads; `columns` is None where it takes all of a row.

    Raises InputError for a text that is no template, or one that reads other templates.
    """

    def __init__(self, text: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined,
            finalize=_printed,
            optimized=False,  # nothing is worked out before a row is there
        )
        environment.globals = {name: environment.globals[name] for name in _GLOBALS}
        del environment.filters["random"]
        environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
        self._environment = environment
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise InputError(f"input.template: line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise InputError("input.template: nested too deeply") from None
        if any(True for _ in meta.find_referenced_templates(tree)):
            raise InputError("input.template: include, import and extends are not read")
        if any(name.name == "self" for name in tree.find_all(nodes.Name)):
            raise InputError(f"input.template: self is Jinja's own word; a column: {ROW}['self']")
        names = meta.find_undeclared_variables(tree)
        self._has_row = ROW in names
        self.named = tuple(sorted(names - {ROW} - set(_GLOBALS)))

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that must be there and are read; None for all that there are."""
        return None if self._has_row else self.named

    def render(self, values: Mapping[str, object]) -> str:
        """The text of a row; RowFault `bad_prompt` says what is wrong with it.

        Takes as long and as much memory as the template and the row ask for: `TemplateProcess`.
        """
        known = {
            name: _Null(f"column {name!r} is null") if value is None else value
            for name, value in values.items()
        }
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({ROW: known, **known}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MOST_CHARS:
                    raise RowFault("bad_prompt", f"input.template: over {MOST_CHARS:,} characters")
        except RowFault:
            raise
        except MemoryError:  # of one value: `q * n` with a row's own n
            raise RowFault("bad_prompt", "input.template: makes a value too large") from None
        except TEMPLATE_FAULTS as error:
            raise RowFault("bad_prompt", f"input.template: {error}") from None
        return "".join(pieces)


def _printed(value: Any) -> Any:
    """What `{{ }}` may write: values, not nulls, objects or functions."""
    if value is None:
        raise TypeError("writes a null; `| default('...', true)` gives it a text")
    if isinstance(value, (*_PLAIN, decimal.Decimal, StrictUndefined)):
        return value
    raise TypeError(f"writes no text but {type(value).__name__}")
