"""What can be wrong with an input: the whole of it, or one row."""

from __future__ import annotations


class InputError(ValueError):
    """An input that no job can run on; the message names file, row or column."""


class RowFault(ValueError):
    """One row that cannot be generated for: it becomes an error row, and the job goes on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
