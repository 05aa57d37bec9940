"""`input.template` in a process of its own, which can be ended: a row may ask for a loop without
end, or for more memory than there is.

What comes back is JSON: it is made of the rows' text, and nothing is ever built of that.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from spot_batch.inputs.errors import RowFault
from spot_batch.inputs.template import PromptTemplate

PATIENCE_S = 20.0  # of one row, which takes a millisecond
MEMORY_BYTES = 2 << 30  # beyond what the process holds when it starts

_TEXT, _FAULT = "text", "fault"


@dataclass(frozen=True, slots=True)
class _Running:
    process: SpawnProcess
    rows: Connection


class TemplateProcess:
    """Renders rows by a template elsewhere. The process starts with the first row, anew after one
    that it did not outlive, and ends with this object or with the process that this is in."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._running: _Running | None = None

    def render(self, values: Mapping[str, object]) -> str:
        """The text of a row; RowFault `bad_prompt` says what is wrong with it."""
        for _ in range(2):  # what ended the process may have been anything: the row has two tries
            with suppress(EOFError, ConnectionError):
                return self._answer(values)
            self._end()
        raise RowFault("bad_prompt", "input.template: ends the process that renders it")

    def _answer(self, values: Mapping[str, object]) -> str:
        rows = (self._running or self._start()).rows
        rows.send(dict(values))
        if not rows.poll(PATIENCE_S):
            self._end()
            raise RowFault("bad_prompt", f"input.template: takes over {PATIENCE_S:.0f} s")
        kind, text = json.loads(rows.recv_bytes())
        if kind == _FAULT:
            raise RowFault("bad_prompt", text)
        return str(text)

    def _start(self) -> _Running:
        context = multiprocessing.get_context("spawn")  # who calls may have threads
        rows, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._text, theirs), daemon=True)
        process.start()
        theirs.close()
        running = self._running = _Running(process, rows)
        weakref.finalize(self, _end, running)
        rows.recv_bytes()  # it is there: from now on rows are timed
        return running

    def _end(self) -> None:
        if self._running is not None:
            _end(self._running)
        self._running = None


def _end(running: _Running) -> None:
    running.process.kill()
    running.process.join()
    running.rows.close()


def _serve(text: str, rows: Connection) -> None:
    """What the process runs: one answer a row, until there are no more."""
    template = PromptTemplate(text)
    _limit_memory()
    kind, answer = _TEXT, ""
    with suppress(EOFError, ConnectionError):
        while True:
            rows.send_bytes(json.dumps((kind, answer)).encode())
            values = rows.recv()
            try:
                kind, answer = _TEXT, template.render(values)
            except RowFault as fault:
                kind, answer = _FAULT, fault.message


def _limit_memory() -> None:
    """Where the system lets: a value too large is then a MemoryError, and nobody else's trouble."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
