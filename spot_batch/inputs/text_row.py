"""One row of a text format, as it was parsed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from spot_batch.inputs.errors import RowFault

RAW_CHARS = 4_000  # how much of an unreadable row is kept for its error row
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row as it was parsed, or why it could not be. `offset` is its first byte, 0 if unknown.

    `readable` is what of a row with a fault can be read nevertheless: its id is taken from there.
    """

    line: int
    offset: int
    num_bytes: int
    values: Mapping[str, object] | None
    fault: RowFault | None = None
    raw: str = ""
    readable: Mapping[str, object] | None = None


def is_encodable(value: object) -> bool:
    """Whether a value's text can be written as UTF-8: half of a surrogate pair cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
