"""Cells of a benchmark: each is measured once, here or on a cluster, and a folder can hold it."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar


class Row(Protocol):
    """A dataclass of figures that JSON can hold; `cell` says what they are figures of."""

    @property
    def cell(self) -> Hashable: ...


CellT = TypeVar("CellT", bound=Hashable)
RowT = TypeVar("RowT", bound=Row)
_Cell = TypeVar("_Cell", bound=Hashable, contravariant=True)
_Row = TypeVar("_Row", bound=Row, covariant=True)


class Benchmark(Protocol[_Cell, _Row]):
    """What all cells of a run share. It travels to where they are measured, and is opened there:
    only then are models loaded.

    What opening gives takes cells that share a recording, and gives their rows as they are found.
    """

    def open(self) -> Callable[[Sequence[_Cell]], Iterable[_Row]]: ...


class Spread(Protocol):
    """Measures groups of cells elsewhere, each whole, and gives their rows as groups are done."""

    def __call__(
        self, benchmark: Benchmark[CellT, RowT], groups: Sequence[Sequence[CellT]]
    ) -> AbstractContextManager[Iterator[Sequence[RowT]]]: ...


@dataclass(frozen=True, slots=True)
class TaskCell:
    """A recording of a task's prompts."""

    task: str
    temperature: float
    seed: int


def cell_of(kind: type[CellT], row: object) -> CellT:
    """The cell that a row is of: a row has all its fields."""
    return kind(**{each.name: getattr(row, each.name) for each in fields(kind)})  # type: ignore[arg-type]


class MeasuredCells(Generic[RowT]):
    """Measured rows by their cell, in the folder's `cells.jsonl` where one is given.

    The file's first line holds `facts`, what all its cells have in common; a row's line comes
    after it. One process at a time has it. `prompts`: the digest of each task's prompts; rows that
    name a task of other prompts are refused.
    """

    def __init__(
        self,
        folder: Path | None,
        read: Callable[..., RowT],
        facts: Mapping[str, object],
        *,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        """Raises ValueError naming the file where it is none of ours, of another run or in use."""
        self.rows: dict[Hashable, RowT] = {}
        self._file = None
        if folder is None:
            return
        if (folder / "_spot").exists():
            raise ValueError(f"{folder} is a job directory; {_ANOTHER}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "cells.jsonl"
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another process measures into it") from None
        self._file.seek(0)
        # What is behind the last line's end is torn: what wrote it was ended.
        whole, end, torn = self._file.read().rpartition(b"\n")
        if not end:
            if not json.dumps(facts).encode().startswith(torn):
                raise ValueError(f"{path}: is none of ours; {_ANOTHER}")
            self._file.truncate(0)
            self._append(facts)
            return
        first, *rest = (_object(path, at, line) for at, line in enumerate(whole.split(b"\n"), 1))
        _check_facts(folder, first, facts)
        self._file.truncate(len(whole) + len(end))  # only now is it known to be ours
        for number, each in enumerate(rest, 2):
            task, digest = str(each.get("task")), each.get("prompts")
            if prompts is not None and digest != prompts.get(task, digest):
                raise ValueError(f"{folder} holds cells of other prompts of {task}; {_ANOTHER}")
            try:
                row = read(**each)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: no row of this ({error})") from error
            self.rows[row.cell] = row

    def add(self, row: RowT) -> None:
        """Keep a row, on disk first."""
        if self._file is not None:
            self._append(asdict(row))  # type: ignore[call-overload]
        self.rows[row.cell] = row

    def _append(self, values: Mapping[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()


_ANOTHER = "give another --out"


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}: want an object, got {type(found).__name__}")
    return found


def _check_facts(folder: Path, before: Mapping[str, object], facts: Mapping[str, object]) -> None:
    now = json.loads(json.dumps(facts))
    for name in dict.fromkeys([*now, *before]):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{folder} holds cells of another run: {name} {_shown(before.get(name))}, "
                f"now {_shown(now.get(name))}; {_ANOTHER}"
            )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def run_cells(
    benchmark: Benchmark[CellT, RowT],
    groups: Sequence[Sequence[CellT]],
    measured: MeasuredCells[RowT],
    *,
    spread: Spread | None = None,
    is_done: Callable[[CellT, RowT], bool] = lambda cell, row: True,
) -> Iterator[RowT]:
    """Measure what is missing, keep it, and yield each new row.

    `is_done`: whether the row that a cell has is all that is wanted. Nothing is opened where
    nothing is missing.
    """
    missing = [
        left
        for group in groups
        if (
            left := [c for c in group if c not in measured.rows or not is_done(c, measured.rows[c])]
        )
    ]
    if not missing:
        return
    if spread is None:
        measure = benchmark.open()
        for group in missing:
            for row in measure(group):
                measured.add(row)
                yield row
        return
    with spread(benchmark, missing) as found:
        for rows in found:
            for row in rows:
                measured.add(row)
                yield row


def digest_of(texts: Sequence[str]) -> str:
    """16 hexadecimal digits that tell lists of texts apart."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()[:16]


def digest_of_files(*paths: Path) -> str:
    """16 hexadecimal digits that tell files' bytes apart."""
    found = hashlib.sha256()
    for path in paths:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
