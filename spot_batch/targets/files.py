"""The small files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spot_batch.targets.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError where it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: want a JSON object, got {type(value).__name__}")
    return value
