"""How a command ends: one clear message and the right exit code, no traceback."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer

# One slash is what a pathlib path leaves of a URL's two.
_WAS_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Command = TypeVar("Command", bound=Callable[..., Any])


def plain_errors(command: Command) -> Command:
    """One clear message and the right exit code, where a person can do something about it."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        # Libraries keep quiet; the environment of ray and its workers is set in the driver.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        warnings.filterwarnings("ignore", module=r"transformers\.")
        logger, handler = logging.getLogger("spot_batch"), _Warnings(logging.WARNING)
        logger.addHandler(handler)
        try:
            _check_local(kwargs)
            code = command(*args, **kwargs)
        except ValueError as error:
            if os.environ.get("SPOT_BATCH_TRACEBACK"):  # for those who work on spot-batch
                raise
            _fail(str(error), 2)
        except OSError as error:
            from spot_batch.jobdir.files import StorageFull
            from spot_batch.service.progress import no_space

            if isinstance(error, StorageFull):
                _fail(no_space(error), 75)
            said = _said_of(error)
            if said is None or os.environ.get("SPOT_BATCH_TRACEBACK"):
                raise
            _fail(said, 2)
        except KeyboardInterrupt:
            _fail("interrupted", 75)
        finally:
            logger.removeHandler(handler)
        raise typer.Exit(int(code or 0))

    return wrapped  # type: ignore[return-value]


def _check_local(values: Mapping[str, object]) -> None:
    """ValueError for a URL given as a file of this machine: it would be a folder named `s3:`."""
    for name, value in values.items():
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, Path) and _WAS_URL.match(str(each)):
                option = name.replace("_", "-")
                raise ValueError(f"{option} wants a path on this machine, got the URL {each}")


class _Warnings(logging.Handler):
    """The package's warnings on stderr, one line each, unless a command logs everything."""

    def emit(self, record: logging.LogRecord) -> None:
        from spot_batch.terminal.screen import Screen

        if not logging.getLogger("spot_batch").isEnabledFor(logging.INFO):
            Screen(to_stderr=True).line(f"warning: {record.getMessage()}", style="yellow")


def _said_of(error: OSError) -> str | None:
    """One line about a path that cannot be used; None where the error names none."""
    if error.errno == errno.ENOENT:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the working directory is not there any more: go to another and try again"
    if not isinstance(error.filename, str | bytes):
        return None
    path = os.fsdecode(error.filename).replace("\n", "\\n")
    return f"{path}: {error.strerror}"


def _fail(message: str, code: int) -> NoReturn:
    from spot_batch.job.secrets import redacted
    from spot_batch.terminal.screen import printable

    sys.stderr.write(f"spot-batch: {printable(redacted(message))}\n")
    raise typer.Exit(code)
