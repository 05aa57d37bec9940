"""What a row or a request may say of its own sampling: checked alike, whoever says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spot_batch.inputs.errors import RowFault


def whole(value: Any, shown: str, low: int, high: int, *, code: str) -> int | None:
    """A whole number within bounds, or None for none; RowFault `code` for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{shown} must be a whole number from {low} to {high}, got {value!r}"
        raise RowFault(code, message)
    return value


def number(value: Any, shown: str, check: Callable[[float], float], *, code: str) -> float | None:
    """A number that `check` takes, or None for none; RowFault `code` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RowFault(code, f"{shown} must be a number, got {value!r}")
    try:
        return check(float(value))
    except (ValueError, OverflowError) as error:
        raise RowFault(code, f"{shown} {error}") from None


def texts(value: Any, shown: str, *, code: str) -> list[str] | None:
    """One text or a list of them, none empty, or None; RowFault `code` for anything else."""
    if value is None:
        return None
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise RowFault(code, f"{shown} must be texts, none empty, got {value!r}")
    return found
