"""Finished parts are written while the job runs, by a ray task.

Apart from the actors: the task's process must not import torch for it.
"""

from __future__ import annotations

import logging
from typing import Any

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.parts import compact, delete_covered_segments
from spot_batch.jobdir.scan import read_part

logger = logging.getLogger(__name__)


class Compactor:
    """Writes finished parts while the job runs: one ray task in flight."""

    def __init__(self, job: JobDirectory, *, done: set[int]) -> None:
        self._job = job
        self._left = [part for part in range(job.num_parts) if part not in done]
        self._pending: Any = None

    def advance(self, durable: IntervalSet) -> None:
        """Take the running task's answer if there is one; start the next part that is whole.

        Raises StorageFull where there is no room for a part.
        """
        import ray

        if self._pending is not None:
            if not ray.wait([self._pending], timeout=0)[0]:
                return
            self._settle()
        whole = next(
            (part for part in self._left if durable.covers(self._job.part_ids(part))), None
        )
        if whole is not None:
            self._left.remove(whole)
            task = ray.remote(_compact_part).options(num_cpus=0, max_retries=0)
            self._pending = task.remote(str(self._job.root), whole)

    def wait(self) -> None:
        """Let the task in flight end; what it could not do, the end of the job does."""
        if self._pending is not None:
            self._settle()

    def _settle(self) -> None:
        import ray
        from ray.exceptions import RayError, RayTaskError

        pending, self._pending = self._pending, None
        try:
            ray.get(pending)
        except RayTaskError as error:
            if isinstance(error.cause, StorageFull):
                raise error.cause from None
            logger.warning("a part could not be written now: %s", error.cause)
        except RayError as error:
            logger.warning("a part could not be written now: %s", error)


def _compact_part(out: str, part: int) -> None:
    job = JobDirectory.open(out)
    parts = [compact(job, part)]
    for beside in (part - 1, part + 1):  # a segment may reach over the border
        neighbour = read_part(job, beside) if 0 <= beside < job.num_parts else None
        parts += [neighbour] if neighbour is not None else []
    delete_covered_segments(job, parts)
