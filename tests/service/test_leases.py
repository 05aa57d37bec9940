from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from spot_batch.records.lending import Lease, Purpose
from spot_batch.service.leases import LeasePool, room_for

ROOM = 32


def finish(pool: LeasePool, lease: Lease) -> None:
    pool.published(lease.purpose, lease.sample_ids)


def lend_all(pool: LeasePool, actor: int, *, num_actors: int = 1) -> list[Lease]:
    """Leases until everything that this actor may have is lent and published."""
    leases = []
    while (lease := pool.take(actor, room=ROOM, num_actors=num_actors)) is not None:
        leases.append(lease)
        finish(pool, lease)
    return leases


def ids_of(leases: Sequence[Lease], purpose: Purpose) -> list[int]:
    return [each for lease in leases if lease.purpose == purpose for each in lease.sample_ids]


def test_every_id_is_lent_once_and_in_order() -> None:
    pool = LeasePool(pending=[range(0, 50), range(70, 100)], audits=[3, 71])
    leases = lend_all(pool, 0)
    assert ids_of(leases, "data") == [*range(0, 50), *range(70, 100)]
    assert ids_of(leases, "audit") == [3, 71]
    assert pool.done


def test_an_actor_is_lent_two_batches_or_so_much_time_but_never_an_empty_slot() -> None:
    def room(held: int, rows_per_s: float | None) -> int:
        return room_for(held=held, max_sequences=8, rows_per_s=rows_per_s, lease_s=30.0)

    assert room(0, None) == 16
    assert room(10, 100.0) == 6
    assert room(0, 0.3) == 9
    assert room(2, 0.01) == 6
    pool = LeasePool(pending=[range(40)])
    assert sum(len(each.sample_ids) for each in pool.fill(0, room=13, num_actors=1)) == 13
    assert pool.num_lent == 13


def test_leases_shrink_toward_the_end() -> None:
    leases = lend_all(LeasePool(pending=[range(1_000)]), 0, num_actors=4)
    sizes = [len(lease.sample_ids) for lease in leases]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == ROOM
    assert sizes[-1] == 1


def test_the_first_actor_leaves_a_share_for_those_that_still_start() -> None:
    pool = LeasePool(pending=[range(40)])
    while pool.take(0, room=100, num_actors=4) is not None:
        pass
    assert pool.num_lent == 10


def test_what_is_to_go_first_goes_first() -> None:
    pool = LeasePool(pending=[range(0, 3), range(5, 9)], first=[4, 9])
    assert ids_of(lend_all(pool, 0), "data") == [4, 9, 0, 1, 2, 5, 6, 7, 8]
    assert pool.done


def test_a_lease_names_what_another_actor_or_run_has_begun() -> None:
    pool = LeasePool(pending=[range(6)], begun=[5])
    first = pool.take(0, room=2, num_actors=1)
    assert first is not None
    assert first.begun == ()
    pool.died(0, {"data": {0}})
    again = pool.fill(1, room=ROOM, num_actors=1)
    assert [each for lease in again for each in lease.begun] == [1, 5]
    assert 0 not in ids_of(again, "data")


def test_audits_keep_step_with_data() -> None:
    leases = lend_all(LeasePool(pending=[range(300)], audits=range(0, 300, 10)), 0)
    first_audit = next(n for n, lease in enumerate(leases) if lease.purpose == "audit")
    assert leases[0].purpose == "data"
    assert first_audit <= 2
    assert leases[-1].purpose == "data" or len(leases[-1].sample_ids) <= 4


def test_ids_of_a_dead_actor_are_lent_again_but_not_what_it_published() -> None:
    pool = LeasePool(pending=[range(10)])
    lease = pool.take(0, room=ROOM, num_actors=1)
    assert lease is not None
    pool.published("data", lease.sample_ids[:1])
    pool.died(0)
    assert sorted(ids_of(lend_all(pool, 1), "data")) == list(range(1, 10))


def test_an_id_that_kills_every_actor_is_given_up_and_its_neighbours_are_not() -> None:
    poison = 13
    pool = LeasePool(pending=[range(40)], audits=[5])
    deaths, done = 0, set()
    given_up: list[int] = []
    for actor in range(100):
        while (lease := pool.take(actor, room=ROOM, num_actors=1)) is not None:
            if lease.purpose == "data" and poison in lease.sample_ids:
                pool.died(actor)
                deaths += 1
                break
            done |= set(lease.sample_ids) if lease.purpose == "data" else set()
            finish(pool, lease)
        given_up += [sample_id for _, sample_id in pool.take_given_up()]
        if pool.done:
            break
    assert given_up == [poison]
    assert done == set(range(40)) - {poison}
    assert deaths <= 10


def test_suspects_run_with_nothing_beside_them() -> None:
    pool = LeasePool(pending=[range(12)])
    for actor in (0, 1):
        assert pool.take(actor, room=4, num_actors=1) is not None
        pool.died(actor)
    beside = pool.take(2, room=2, num_actors=2)
    assert beside is not None
    assert beside.sample_ids == (0, 1, 2, 3)[: len(beside.sample_ids)]
    assert pool.take(2, room=2, num_actors=2) is None


@settings(max_examples=200, deadline=None)
@given(
    num_samples=st.integers(0, 120),
    num_actors=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["take", "finish", "die"])), max_size=200
    ),
)
def test_nothing_is_lost_whatever_dies(
    num_samples: int, num_actors: int, steps: list[tuple[int, str]]
) -> None:
    audits = list(range(0, num_samples, 7))
    pool = LeasePool(pending=[range(num_samples)], audits=audits, deaths_alone=2)
    held: dict[int, list[Lease]] = {}
    owed: set[tuple[Purpose, int]] = {("data", each) for each in range(num_samples)}
    owed |= {("audit", each) for each in audits}

    def settle(lease: Lease) -> None:
        finish(pool, lease)
        owed.difference_update((lease.purpose, each) for each in lease.sample_ids)

    for actor, action in steps:
        actor %= num_actors
        if action == "take":
            lease = pool.take(actor, room=8, num_actors=num_actors)
            if lease is not None:
                held.setdefault(actor, []).append(lease)
        elif action == "finish" and held.get(actor):
            settle(held[actor].pop())
        elif action == "die":
            held.pop(actor, None)
            pool.died(actor)
            owed.difference_update(pool.take_given_up())
    for actor in range(num_actors):
        for lease in held.pop(actor, []):
            settle(lease)
    for _ in range(4 * num_samples + 50):
        for actor in range(num_actors):
            lease = pool.take(actor, room=8, num_actors=num_actors)
            if lease is not None:
                settle(lease)
    assert not owed
    assert pool.done
