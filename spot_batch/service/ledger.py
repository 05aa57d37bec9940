"""The books of a run: which samples are durable, which are lent, and which are left to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spot_batch.inputs.ids import audit_sample_ids, drawn_sample_ids
from spot_batch.jobdir.check import incomparable_ids
from spot_batch.jobdir.checkpoints import Checkpoints
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.intervals import IntervalSet
from spot_batch.jobdir.scan import scan
from spot_batch.records.lending import Lease, Receipt
from spot_batch.records.results import SKIP_CODES
from spot_batch.service.leases import LeasePool
from spot_batch.service.verdict import NUM_DRAWN, Verdict, verdict_on_the_drawn


class Ledger:
    """What a job directory holds when a run begins, kept up to date with what actors publish."""

    def __init__(self, job: JobDirectory) -> None:
        self._job = job
        published = scan(job, verify=True)
        self.durable = published.data
        self.audited = published.audits
        self.before = published.totals
        self.num_before = len(published.data)
        self.done_parts = {part.index for part in published.parts}
        self._incomparable = incomparable_ids(job)
        self.audits = self._choose_audits()
        drawn = _drawn(job) if job.num_samples >= 2 * NUM_DRAWN else frozenset()
        self._to_judge = {each for each in drawn if each not in published.data}
        self._num_judged, self._failed = 0, Counter[str]()
        taken = IntervalSet.of(sorted(self._to_judge))
        taken.update(published.data)
        self._pool = LeasePool(
            pending=taken.gaps(job.num_samples),
            first=sorted(self._to_judge),
            audits=sorted(each for each in self.audits if each not in published.audits),
            begun=Checkpoints(job).known_ids(),
            deaths_alone=max(1, job.spec.failure.row_attempts - 1),
        )

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to lend and nothing is owed."""
        return self._pool.done

    @property
    def num_unlent(self) -> int:
        return self._pool.num_unlent

    @property
    def num_left(self) -> int:
        return self._job.num_samples - len(self.durable)

    @property
    def num_here(self) -> int:
        """How many samples of data have become durable since the run began."""
        return len(self.durable) - self.num_before

    def has_work(self) -> bool:
        """Whether work is left, audits included that only now turn out to be needed."""
        if self.is_done:
            self._audit_others()
        return not self.is_done

    def lend(self, actor: int, *, room: int, num_actors: int) -> list[Lease]:
        """Leases for an actor until it has no more room or there is nothing for it."""
        return self._pool.fill(actor, room=room, num_actors=num_actors)

    def settle(self, receipts: Iterable[Receipt]) -> None:
        """What is published is done, whoever did it."""
        for receipt in receipts:
            done = self.durable if receipt.purpose == "data" else self.audited
            done.add_many(receipt.sample_ids)
            if receipt.purpose == "data":
                self._judge(receipt)
            self._pool.published(receipt.purpose, receipt.sample_ids)

    def early_verdict(self) -> Verdict | None:
        """Why the run should end though work is left; None while drawn samples are still owed."""
        if self._to_judge or self.is_done:
            return None
        may = self._job.spec.failure.max_error_fraction
        return verdict_on_the_drawn(self._failed, self._num_judged, max_error_fraction=may)

    def runs_alone(self, actor: int) -> bool:
        """Whether the actor holds nothing but suspects."""
        return self._pool.runs_alone(actor)

    def take_back(self, actor: int) -> None:
        """An actor is dead: what it had published and could not tell is durable, the rest of what
        it held is lent again."""
        published = scan(self._job)
        self.durable.update(published.data)
        self.audited.update(published.audits)
        self._to_judge = {each for each in self._to_judge if each not in published.data}
        self._pool.died(actor, {"data": published.data, "audit": published.audits})

    def take_given_up(self) -> Sequence[int]:
        """Samples that killed their actor each time they ran alone, for the caller to record."""
        return [each for purpose, each in self._pool.take_given_up() if purpose == "data"]

    def _judge(self, receipt: Receipt) -> None:
        """Count the drawn among the published, and how many of them failed."""
        judged = self._to_judge.intersection(receipt.sample_ids)
        self._to_judge -= judged
        self._num_judged += len(judged)
        codes = [receipt.errors[each] for each in judged if each in receipt.errors]
        self._failed.update(code for code in codes if code not in SKIP_CODES)

    def _choose_audits(self) -> frozenset[int]:
        spec = self._job.spec.equivalence
        return frozenset(
            audit_sample_ids(
                self._job.num_samples,
                fraction=spec.audit_fraction,
                min_rows=spec.min_rows,
                fingerprint=self._job.fingerprint,
                passed_over=self._incomparable,
            )
        )

    def _audit_others(self) -> None:
        """In place of audited samples that turned out to be error rows come the next by hash."""
        before, self._incomparable = self._incomparable, incomparable_ids(self._job)
        if len(self._incomparable) == len(before):
            return
        further = self._choose_audits() - self.audits
        self.audits |= further
        self._pool.add_audits([each for each in sorted(further) if each not in self.audited])


def _drawn(job: JobDirectory) -> frozenset[int]:
    """The samples by which a run is judged early, drawn from the whole input."""
    return drawn_sample_ids(job.num_samples, count=NUM_DRAWN, fingerprint=job.fingerprint)
