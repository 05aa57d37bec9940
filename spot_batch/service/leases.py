"""Which sample ids go to which actor next, and what becomes of the ids of an actor that died.

Pure bookkeeping: no clock, no files, no ray. The driver tells it what was published and who died;
it answers with the next lease.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spot_batch.records.lending import Lease, Purpose

Work = tuple[Purpose, int]
_NOTHING: Mapping[Purpose, Container[int]] = {}

# Deaths among company before an id is run alone.
DEATHS_IN_COMPANY = 2
AUDIT_LEASE = 4
# An actor holds this many times its slots, waiting ones included, so that it never starves.
QUEUE_DEPTH = 2


def room_for(*, held: int, max_sequences: int, rows_per_s: float | None, lease_s: float) -> int:
    """How many more samples an actor may be lent that holds so many: no more than `lease_s` of work
    once its speed is known, but never an empty slot."""
    room = QUEUE_DEPTH * max_sequences - held
    if rows_per_s is None:
        return room
    return min(room, max(math.ceil(rows_per_s * lease_s), max_sequences - held))


@dataclass(slots=True)
class _Loan:
    """What one actor holds: work lent and not yet published, and whether it runs suspects alone."""

    work: set[Work] = field(default_factory=set)
    isolated: bool = False


class LeasePool:
    """Work still to be done, lent in small leases that shrink toward the end.

    Guided self-scheduling: a lease is at most a third of an actor's share of what is left, so
    that no actor sits on a long queue while the others are out of work. `first` go out before
    `pending`; of the samples in `begun`, an earlier run has left whole blocks behind.
    """

    def __init__(
        self,
        *,
        pending: Iterable[range],
        first: Sequence[int] = (),
        audits: Sequence[int] = (),
        begun: Iterable[int] = (),
        deaths_alone: int = 2,
    ) -> None:
        self._deaths_to_give_up = deaths_alone
        self._ranges: deque[range] = deque(range(each, each + 1) for each in first)
        self._ranges.extend(ids for ids in pending if len(ids))
        self._begun = set(begun)
        self._audits: deque[int] = deque(audits)
        self._suspects: deque[tuple[Work, ...]] = deque()
        self._loans: dict[int, _Loan] = {}
        self._holders: dict[Work, int] = {}
        self._deaths: dict[Work, int] = {}
        self._deaths_alone: dict[Work, int] = {}
        self._given_up: list[Work] = []
        self._isolator: int | None = None
        self._num_unlent = sum(len(ids) for ids in self._ranges)
        self._num_data = max(1, self._num_unlent)
        self._num_audits = len(self._audits)

    @property
    def num_unlent(self) -> int:
        """Work that no actor holds."""
        return self._num_unlent + len(self._audits) + sum(len(group) for group in self._suspects)

    @property
    def num_lent(self) -> int:
        return len(self._holders)

    @property
    def done(self) -> bool:
        return not self.num_unlent and not self.num_lent

    def add_audits(self, sample_ids: Sequence[int]) -> None:
        """More to decode again: they go out after those that wait already."""
        self._audits.extend(sample_ids)
        self._num_audits += len(sample_ids)

    def runs_alone(self, actor: int) -> bool:
        """Whether the actor holds nothing but suspects."""
        loan = self._loans.get(actor)
        return loan is not None and loan.isolated

    def take(self, actor: int, *, room: int, num_actors: int) -> Lease | None:
        """The next lease for an actor that can queue `room` more samples, or None."""
        loan = self._loans.setdefault(actor, _Loan())
        if loan.isolated:
            return None
        if self._suspects and self._isolator in (None, actor):
            # Suspects run alone: this actor gets nothing new until it is empty.
            self._isolator = actor
            return None if loan.work else self._lend_suspects(actor)
        share = -(-(self.num_unlent + self.num_lent) // num_actors)
        room = min(room, share - len(loan.work))
        if room < 1:
            return None
        if self._audits and self._audits_lag():
            size = min(room, AUDIT_LEASE)
            ids = tuple(self._audits.popleft() for _ in range(min(size, len(self._audits))))
            return self._lend(actor, "audit", ids)
        if not self._num_unlent:
            return None
        size = min(room, max(1, -(-self._num_unlent // (3 * num_actors))))
        return self._lend(actor, "data", self._pop_data(size))

    def fill(self, actor: int, *, room: int, num_actors: int) -> list[Lease]:
        """Leases for an actor until it has no more room or there is nothing for it."""
        leases: list[Lease] = []
        while (lease := self.take(actor, room=room, num_actors=num_actors)) is not None:
            room -= len(lease.sample_ids)
            leases.append(lease)
        return leases

    def published(self, purpose: Purpose, sample_ids: Iterable[int]) -> None:
        """These ids are durable, whoever made them: nobody owes them any more."""
        for sample_id in sample_ids:
            work = (purpose, sample_id)
            holder = self._holders.pop(work, None)
            if holder is None:
                continue
            loan = self._loans[holder]
            loan.work.discard(work)
            if loan.isolated and not loan.work:
                loan.isolated = False
                if self._isolator == holder:
                    self._isolator = None

    def died(self, actor: int, published: Mapping[Purpose, Container[int]] = _NOTHING) -> None:
        """Take back what an actor held, but for what is durable by now."""
        loan = self._loans.pop(actor, _Loan())
        alone = loan.isolated
        if self._isolator == actor:
            self._isolator = None
        for item in loan.work:
            del self._holders[item]
        work = sorted(
            (purpose, sample_id)
            for purpose, sample_id in loan.work
            if sample_id not in published.get(purpose, ())
        )
        self._begun.update(sample_id for purpose, sample_id in work if purpose == "data")
        if alone:
            self._split(tuple(work))
            return
        again: list[Work] = []
        suspects: list[Work] = []
        for item in work:
            self._deaths[item] = self._deaths.get(item, 0) + 1
            (suspects if self._deaths[item] >= DEATHS_IN_COMPANY else again).append(item)
        if suspects:
            self._suspects.append(tuple(suspects))
        self._return(again)

    def take_given_up(self) -> list[Work]:
        """Work that killed its actor each time it ran alone; the caller records the errors."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _audits_lag(self) -> bool:
        """Audits keep step with data, so that they neither delay the first rows nor the end."""
        data_left = self._num_unlent / self._num_data
        return not self._num_unlent or len(self._audits) > data_left * self._num_audits

    def _lend(self, actor: int, purpose: Purpose, sample_ids: tuple[int, ...]) -> Lease:
        work = [(purpose, sample_id) for sample_id in sample_ids]
        self._loans[actor].work.update(work)
        self._holders.update(dict.fromkeys(work, actor))
        begun = tuple(each for each in sample_ids if purpose == "data" and each in self._begun)
        return Lease(sample_ids=sample_ids, purpose=purpose, begun=begun)

    def _lend_suspects(self, actor: int) -> Lease:
        group = self._suspects.popleft()
        purpose = group[0][0]
        same = tuple(sample_id for kind, sample_id in group if kind == purpose)
        rest = tuple(item for item in group if item[0] != purpose)
        if rest:
            self._suspects.appendleft(rest)
        self._loans[actor].isolated = True
        return self._lend(actor, purpose, same)

    def _split(self, group: tuple[Work, ...]) -> None:
        """Halve a group that died alone; give up an id that died alone by itself."""
        if len(group) > 1:
            middle = len(group) // 2
            self._suspects.extend((group[:middle], group[middle:]))
            return
        for item in group:
            self._deaths_alone[item] = self._deaths_alone.get(item, 0) + 1
            if self._deaths_alone[item] >= self._deaths_to_give_up:
                self._given_up.append(item)
            else:
                self._suspects.append((item,))

    def _pop_data(self, size: int) -> tuple[int, ...]:
        ids: list[int] = []
        while self._ranges and len(ids) < size:
            head = self._ranges.popleft()
            taken = head[: size - len(ids)]
            ids.extend(taken)
            if len(taken) < len(head):
                self._ranges.appendleft(head[len(taken) :])
        self._num_unlent -= len(ids)
        return tuple(ids)

    def _return(self, work: Sequence[Work]) -> None:
        data = [sample_id for purpose, sample_id in work if purpose == "data"]
        for sample_id in reversed(data):
            self._ranges.appendleft(range(sample_id, sample_id + 1))
        self._num_unlent += len(data)
        self._audits.extendleft(sample_id for purpose, sample_id in work if purpose == "audit")
