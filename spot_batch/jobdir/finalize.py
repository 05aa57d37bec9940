"""The end of a job: every id accounted for, then the card, the summary and `_SUCCESS`."""

from __future__ import annotations

import logging
from collections.abc import Collection

from spot_batch.jobdir.card import CardFacts, render_card
from spot_batch.jobdir.directory import TOOL_VERSION, JobDirectory
from spot_batch.jobdir.files import clear_folder, write_atomically
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.scan import scan
from spot_batch.jobdir.summary import Summary, Totals
from spot_batch.records.progress import RunFacts
from spot_batch.records.results import CheckResult

logger = logging.getLogger(__name__)


def finalize(
    job: JobDirectory,
    *,
    check: CheckResult | None,
    facts: RunFacts | None,
    verified: Collection[int] = (),
) -> Summary:
    """Publishes what is left to publish and marks the job complete; ValueError where ids miss.

    Every part is read and compared with its hash, but for those whose bytes were `verified` by the
    caller just now.
    `_SUCCESS` is withheld where the check found a difference and the spec stops on one.
    May be called again: a complete job stays as it is but for card and summary.
    """
    published = scan(job, verify=True, verified=verified)
    if len(published.data) != job.num_samples:
        job.success.unlink(missing_ok=True)
        gaps = IntervalSet(published.data.gaps(job.num_samples))
        raise ValueError(f"{job.root}: {len(gaps)} samples are missing ({str(gaps)[:200]})")
    job.reach("finalize.scanned")
    found = {part.index: part for part in published.parts}
    parts = [found.get(index) or compact(job, index) for index in range(job.num_parts)]
    job.reach("finalize.compacted")
    assert sum(part.num_rows + part.num_errors for part in parts) == job.num_samples
    names = {part.name for part in parts}
    for path in sorted(job.data.iterdir()):
        if path.name not in names:
            logger.warning("data/%s: not a part of this job; readers of data/ see it", path.name)
    totals = sum((part.totals for part in parts), start=Totals())
    summary = Summary(
        name=job.spec.name,
        fingerprint=job.fingerprint,
        version=TOOL_VERSION,
        num_rows=job.pinned.num_rows,
        totals=totals,
        reproducible=job.spec.speculation.numerics == "canonical",
        check=check,
        facts=facts,
    )
    write_card(job, summary)
    job.reach("finalize.card")
    write_atomically(job.summary_path, summary.to_json().encode(), tmp=job.tmp)
    job.reach("finalize.summary")
    for folder in (job.segments, job.checkpoints, job.tmp):  # first: nobody cleans a finished job
        clear_folder(folder)
    job.reach("finalize.cleared")
    differed = check is not None and check.num_differed > 0
    if differed and job.spec.stops_on_difference:
        job.success.unlink(missing_ok=True)
    else:
        write_atomically(job.success, b"", tmp=job.tmp)
    job.reach("finalize.success")
    return summary


def write_card(job: JobDirectory, summary: Summary | None = None) -> None:
    """README.md: of a finished job with its summary, of a running one without."""
    card = render_card(
        CardFacts(
            spec=job.spec,
            fingerprint=job.fingerprint,
            fields=job.fields,
            pinned=job.pinned,
            has_errors=job.errors.is_dir() and any(job.errors.glob("*.arrow")),
            summary=summary,
        )
    )
    write_atomically(job.readme, card.encode(), tmp=job.tmp)
