"""Whether the files of a pinned input still hold what they held when they were pinned."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from spot_batch.inputs.copies import Origin
from spot_batch.inputs.errors import InputError
from spot_batch.inputs.text_files import LINES
from spot_batch.records.input import InputChunk, InputFile, PinnedInput


def check_unchanged(pinned: PinnedInput) -> None:
    """Raises InputError when what a job reads is gone or holds other bytes than it did.

    That is the job's own copy of the rows, where it has one: nobody changes it, and it is enough
    that it is there.
    """
    if pinned.copy:
        if not Path(pinned.copy).is_file():
            raise InputError(f"{pinned.copy}: gone since the job was submitted")
        return
    for number, file in enumerate(pinned.files):
        if file.origin:
            _check_origin(file, used_bytes(pinned, number))
        check_file(pinned, number)


def check_file(pinned: PinnedInput, number: int) -> tuple[int, int]:
    """The size and time of a file that is what it was; InputError for one that is not.

    One that was only touched, or written again with the same bytes, is.
    """
    file = pinned.files[number]
    now = size_and_time(Path(file.path))
    if now == (file.size, file.mtime_ns) or file.digest.startswith("hub:"):
        return now
    if digest_of_file(Path(file.path), used_bytes(pinned, number)) != file.digest:
        raise InputError(
            f"{file.path}: changed since the job was submitted "
            f"({file.size} bytes then, {now[0]} now)"
        )
    return now


def size_and_time(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise InputError(f"{path}: gone since the job was submitted") from None
    return stat.st_size, stat.st_mtime_ns


def used_bytes(pinned: PinnedInput, number: int) -> int | None:
    """How much of a file the job reads; None for all of it."""
    mine = [chunk for chunk in pinned.chunks if chunk.file == number]
    return used_bytes_of(pinned.files[number].format, mine)


def used_bytes_of(kind: str, chunks: Sequence[InputChunk]) -> int | None:
    """JSON lines are read to the last row that the job takes, other files wholly."""
    if kind not in LINES:
        return None
    return max((chunk.offset + chunk.num_bytes for chunk in chunks), default=0)


def digest_of_file(path: Path, num_bytes: int | None) -> str:
    with path.open("rb") as file:
        return _digest_of(file, num_bytes)


def _digest_of(file: IO[bytes], num_bytes: int | None) -> str:
    digest = hashlib.sha256()
    left = sys.maxsize if num_bytes is None else num_bytes
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def _check_origin(file: InputFile, num_bytes: int | None) -> None:
    """InputError where what a file was kept from is gone, or holds other bytes now."""
    now = Origin.of(file.origin)
    if now.mark == file.origin_mark:
        return
    with now.open() as stream:
        if _digest_of(stream, num_bytes) != file.digest:
            raise InputError(f"{file.origin}: changed since the job was submitted")
