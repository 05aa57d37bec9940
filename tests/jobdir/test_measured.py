"""What the first actor of a kind measured is everybody's, also where files cannot be linked."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from spot_batch.jobdir import files
from spot_batch.jobdir.measured import claim_numerics, keep_latency, read_latency
from tests.jobdir.jobs import make_job, prompts

NUM_ACTORS = 4


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, final: Path) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(files.os, "link", link)


@pytest.mark.parametrize("has_links", [True, False])
def test_actors_that_claim_at_once_work_by_the_same_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    job = make_job(tmp_path, prompts(1))
    real, turns = Path.exists, itertools.count()

    def slow(path: Path) -> bool:  # everybody has looked before anybody writes, one by one
        found = real(path)
        if path == job.numerics_path:
            time.sleep(0.1 * next(turns))
        return found

    if not has_links:
        refuse_links(monkeypatch)
        monkeypatch.setattr(Path, "exists", slow)
    start, claims = threading.Barrier(NUM_ACTORS), {}

    def claim(actor: int) -> None:
        start.wait()
        claims[actor] = claim_numerics(job, {"hash": actor})

    actors = [threading.Thread(target=claim, args=(actor,)) for actor in range(NUM_ACTORS)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join()
    assert len(claims) == NUM_ACTORS
    assert len({claim["hash"] for claim in claims.values()}) == 1
    assert sorted(path.name for path in job.spot.glob("*numerics*")) == ["numerics.json"]


def test_what_a_crash_left_of_a_claim_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(1))
    (job.spot / ".numerics.json.mine").touch()
    refuse_links(monkeypatch)
    monkeypatch.setattr(files, "ABANDONED_S", 0.05)
    assert claim_numerics(job, {"hash": 1}) == {"hash": 1}


def test_the_first_table_of_a_kind_of_device_is_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1))
    assert read_latency(job, {"device": "a"}) is None
    assert keep_latency(job, {"device": "a"}, "first") == "first"
    assert keep_latency(job, {"device": "a"}, "second") == "first"
    assert keep_latency(job, {"device": "b"}, "other") == "other"
    assert read_latency(job, {"device": "a"}) == "first"
