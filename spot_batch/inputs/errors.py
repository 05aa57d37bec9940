"""What can be wrong with an input: the whole of it, or one row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """An input that no job can run on; the message names file, row or column."""


@contextmanager
def called(path: object, name: str) -> Iterator[None]:
    """Lets an InputError speak of `name`, which a person gave, where it speaks of `path`."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(str(path), name or str(path))) from error


class RowFault(ValueError):
    """One row that cannot be generated for: it becomes an error row, and the job goes on.

    `custom_id` is the row's own id where that much of it can be read.
    """

    def __init__(self, code: str, message: str, *, custom_id: str | None = None) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.custom_id = custom_id

    def of(self, custom_id: str | None) -> RowFault:
        """The same fault of a row whose id is known."""
        return RowFault(self.code, self.message, custom_id=custom_id)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"
