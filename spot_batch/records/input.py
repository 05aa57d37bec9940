"""What the input is, frozen when the job is submitted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

CHUNK_ROWS = 1_024  # of an input at a time, where its files allow that

PromptKind = Literal["messages", "prompt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One pinned file. `digest` says what it holds; size and mtime_ns say whether to look again.

    `origin` is the URL or the compressed file that `path` was kept from, "" for none;
    `origin_mark` says whether to look at it again.
    """

    path: str
    format: str
    size: int
    mtime_ns: int
    digest: str
    first_row: int
    num_rows: int
    origin: str = ""
    origin_mark: str = ""

    @property
    def name(self) -> str:
        """What a person calls it."""
        return PurePosixPath(self.origin or self.path).name


@dataclass(frozen=True, kw_only=True, slots=True)
class InputChunk:
    """Neighbouring rows that are read together: where they stand in their file.

    `offset` and `num_bytes` are bytes for formats of lines; for others `offset` is the number of a
    row group or batch, or of the rows before (CSV and JSON), and `num_bytes` is 0. `line` is the
    1-based line of the first row, 0 where lines mean nothing.
    """

    file: int
    first_row: int
    num_rows: int
    offset: int
    num_bytes: int
    line: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedInput:
    """What the input is, frozen when the job is submitted: actors read their rows by it.

    `copy` is the Arrow file beside the job that holds every row, in `chunks`; it is "" where the
    rows are read out of `files`, because they are too many to be copied. `schema` is the serialised
    Arrow schema of the whole input. `faults` are the first rows known to be unusable, `num_faults`
    how many there are (those of a table that is not copied show later). `template_columns` are
    those that `input.template` reads; `prompt_column` is "" then. `json_columns` hold JSON as text.
    """

    files: tuple[InputFile, ...]
    chunks: tuple[InputChunk, ...]
    num_rows: int
    schema: bytes
    prompt_column: str
    prompt_kind: PromptKind
    custom_id_column: str | None = None
    num_faults: int = 0
    faults: tuple[str, ...] = ()
    template_columns: tuple[str, ...] = ()
    copy: str = ""
    json_columns: tuple[str, ...] = ()

    @property
    def prompt_columns(self) -> tuple[str, ...]:
        """The columns that a prompt is made of."""
        return (self.prompt_column,) if self.prompt_column else self.template_columns

    @property
    def identity(self) -> dict[str, object]:
        """What of the input decides the output: content, never a path or a time."""
        digests = [file.digest for file in self.files]
        if len(digests) != 1:
            digests = [hashlib.sha256("\n".join(digests).encode()).hexdigest()]
        return {
            "digest": digests[0],
            "num_rows": self.num_rows,
            "prompt_column": self.prompt_column,
            "prompt_kind": self.prompt_kind,
            "custom_id_column": self.custom_id_column,
        }
