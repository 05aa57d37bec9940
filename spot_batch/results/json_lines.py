"""Rows as lines of JSON, with every value that JSON has a word for.

`datasets` fails at bytes and writes times as milliseconds; so these are our own.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, rows: Iterable[object]) -> int:
    """One line a row, in UTF-8; how many there were."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(as_json(row) + "\n")
            count += 1
    return count


def as_json(row: object) -> str:
    """One line; what JSON has no word for is text (times, decimals, bytes) or null (NaN)."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value
