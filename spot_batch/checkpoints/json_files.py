"""The small files of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spot_batch.checkpoints.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: want a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """A JSON object's fields, of the kinds that are wanted; ModelError names file and field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(name, default)
        if type(value) is not int or value < least:
            raise self._wrong(name, f"a whole number of at least {least}", value)
        return value

    def number(
        self, name: str, default: float | None = None, *, above: float | None = None
    ) -> float:
        value = self._value(name, default)
        is_number = type(value) in (int, float) and math.isfinite(value)
        if not is_number or (above is not None and value <= above):
            bound = "" if above is None else f" above {above:g}"
            raise self._wrong(name, f"a number{bound}", value)
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._wrong(name, "true or false", value)
        return value

    def _value(self, name: str, default: object) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def _wrong(self, name: str, wanted: str, value: object) -> ModelError:
        return ModelError(f"{self.where}: {name} must be {wanted}, got {value!r}")
