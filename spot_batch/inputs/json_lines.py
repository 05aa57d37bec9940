"""Small files of JSON lines that a command reads whole: every fault is named with its line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, the object there) of each line that is not blank.

    Raises ValueError naming the file, and the line where it is no object in UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 ({error})") from error
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        except RecursionError as error:
            raise ValueError(f"{where}: nested too deeply") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{where}: want an object, got {type(fields).__name__}")
        yield where, fields
