"""Makes `format-1/`: a job directory as this version writes it, which every later one must open.

Run it once a format, never again: python -m tests.data.make_format_1 FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from tests.jobdir.jobs import make_job, make_outcomes, prompts


def make(folder: Path) -> None:
    """Six rows: the first part written with an error, the second half published as a segment."""
    job = make_job(folder, prompts(6), output__rows_per_part=3)
    publish_segment(job, make_outcomes(job, range(4), failed={1}))
    compact(job, 0)
    shutil.rmtree(job.tmp)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
