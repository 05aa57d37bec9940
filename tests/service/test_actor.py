"""An actor in this process, without ray, on the bundled target."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from spot_batch.checkpoints.weights import hash_weights
from spot_batch.inputs.prepare import PreparedSample, SamplePreparer
from spot_batch.jobdir.check import compare_audits
from spot_batch.jobdir.checkpoints import Checkpoints
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import StorageFull
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.scan import scan
from spot_batch.models.block import BlockTarget
from spot_batch.models.numerics import NumericsMismatch
from spot_batch.records.lending import Lease, News, Purpose, Receipt
from spot_batch.records.progress import LoadReport, unreported
from spot_batch.records.results import Begun, Completion, SampleStats
from spot_batch.records.sampling import Request
from spot_batch.service.actor import Actor, ActorInfo
from tests.service import pool
from tests.service.jobs import begin, prompts, small_spec, write_rows
from tests.tiny_models import write_target

SHORT: Mapping[str, object] = {"generation.max_new_tokens": 12, "resources.actors": 1}
AUTO: Mapping[str, object] = {"engine.max_sequences": 1, "speculation.budget": "auto"}


def make_job(
    folder: Path, rows: Sequence[object], overrides: Mapping[str, object] | None = None
) -> JobDirectory:
    spec = small_spec(write_rows(folder, rows), {**SHORT, **(overrides or {})})
    return begin(folder / "out", spec)[0]


@contextmanager
def acting(job: JobDirectory, index: int = 0) -> Iterator[Actor]:
    actor = Actor(job.root, index)
    assert isinstance(actor.load(60.0), ActorInfo)
    try:
        yield actor
    finally:
        actor.stop()


def lease(ids: Sequence[int], purpose: Purpose = "data") -> Lease:
    return Lease(sample_ids=tuple(ids), purpose=purpose)


def collect(actor: Actor, count: int, *leases: Lease, timeout_s: float = 60.0) -> list[Receipt]:
    """Receipts from the moment that these leases are lent until they cover `count` samples."""
    receipts = list(actor.exchange(leases, 0.0).receipts)
    end = time.monotonic() + timeout_s
    while sum(receipt.num_rows for receipt in receipts) < count:
        assert time.monotonic() < end, "waited in vain"
        receipts += actor.exchange((), 0.5).receipts
    return receipts


def rows_of(job: JobDirectory) -> list[dict[str, object]]:
    compact(job, 0)
    with pa.OSFile(str(job.data / job.part_name(0))) as source:
        rows: list[dict[str, object]] = pa.ipc.open_file(source).read_all().to_pylist()
    return rows


def test_leases_of_any_order_and_size_publish_the_same_rows(tmp_path: Path) -> None:
    forward = make_job(tmp_path / "a", prompts(6))
    with acting(forward) as actor:
        collect(actor, 6, lease(range(6)))
    backward = make_job(tmp_path / "b", prompts(6), {"engine.max_sequences": 2})
    with acting(backward) as actor:
        collect(actor, 6, *(lease([sample_id]) for sample_id in reversed(range(6))))
    assert rows_of(forward) == rows_of(backward)
    name = forward.part_name(0)
    assert (forward.data / name).read_bytes() == (backward.data / name).read_bytes()


def test_a_faulty_row_is_an_error_and_its_neighbours_are_rows(tmp_path: Path) -> None:
    rows = [*prompts(2), {"id": "empty", "question": ""}, {"id": "long", "question": "fig " * 5000}]
    job = make_job(tmp_path, rows)
    with acting(job) as actor:
        receipts = collect(actor, 4, lease(range(4)))
    assert sum(receipt.num_errors for receipt in receipts) == 2
    codes = sorted(code for receipt in receipts for code in receipt.errors.values())
    assert codes == ["empty_prompt", "too_long"]
    assert [row["id"] for row in rows_of(job)] == ["q-0", "q-1"]


def test_a_row_that_fits_no_memory_is_an_error_with_its_bytes(tmp_path: Path) -> None:
    """The bundled target takes 5,120 bytes a position: 128 of them fit, 256 do not."""
    rows = [{"question": "1 + 1?", "max_new_tokens": length} for length in (12, 200, 12)]
    few = {"resources.prefix_gib": 150 * 5_120 / 2**30, "generation.per_row": ["max_new_tokens"]}
    job = make_job(tmp_path, rows, few)
    with acting(job) as actor:
        receipts = collect(actor, 3, lease(range(3)))
    assert [code for receipt in receipts for code in receipt.errors.values()] == ["oom"]
    assert [row["row_index"] for row in rows_of(job)] == [0, 2]
    compact(job, 0)
    with pa.OSFile(str(job.errors / job.part_name(0))) as source:
        error = pa.ipc.open_file(source).read_all().to_pylist()[0]
    assert "max_new_tokens 200 take 1,310,720 bytes of prefix memory, there are" in str(error)
    assert "resources.prefix_share" in str(error)


def test_an_actor_asks_for_more_before_it_starves_and_only_once(tmp_path: Path) -> None:
    slow = {"scheduling.publish_seconds": 3600, "generation.max_new_tokens": 40}
    job = make_job(tmp_path, prompts(12), {**slow, "engine.max_sequences": 2})
    with acting(job) as actor:
        news = [actor.exchange([lease(range(12))], 60.0)]
        while sum(each.num_rows for one in news for each in one.receipts) < 12:
            news.append(actor.exchange((), 60.0))
    owed = [one.num_in_flight + one.num_waiting for one in news]
    assert any(0 < each <= 3 for each in owed), owed
    assert len(news) <= 4, "the first rows, a call for more, the rest"


def test_an_audit_beside_its_own_sample_gives_the_same_tokens(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(4))
    with acting(job) as actor:
        receipts = collect(actor, 6, lease([0, 1, 2, 3]), lease([1, 2], "audit"))
    assert {receipt.purpose for receipt in receipts} == {"data", "audit"}
    published = scan(job)
    assert list(published.audits) == [1, 2]
    assert len(published.data) == 4
    check = compare_audits(job).check
    assert (check.num_compared, check.num_differed) == (2, 0)


def test_temperature_and_seed_may_come_from_the_row(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "temperature": 0.0, "seed": 7} for _ in range(2)]
    job = make_job(tmp_path, rows, {"generation.per_row": ["temperature", "seed"]})
    with acting(job) as actor:
        collect(actor, 2, lease([0, 1]))
    first, second = rows_of(job)
    assert first["token_ids"] == second["token_ids"]
    assert first["seed"] == 7


def test_stopping_publishes_what_is_finished_and_gives_up_the_rest(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(8), {"engine.max_sequences": 1})
    actor = Actor(job.root, 0)
    first = collect(actor, 1, lease(range(8)))
    last = actor.stop()
    done = sum(receipt.num_rows for receipt in (*first, *last.receipts))
    assert 1 <= done < 8
    assert len(scan(job).data) == done


def test_what_ends_the_engine_is_raised_to_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(1))

    def full(*_: object, **__: object) -> Receipt:
        raise StorageFull(28, "no space left", "segments")

    monkeypatch.setattr("spot_batch.service.actor.publish_segment", full)
    actor = Actor(job.root, 0)
    with pytest.raises(StorageFull, match="no space left"):
        collect(actor, 1, lease([0]))


def test_an_idle_actor_reports_nothing_and_waits(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1))
    with acting(job) as actor:
        began = time.monotonic()
        news = actor.exchange((), 0.3)
        assert time.monotonic() - began >= 0.3
    assert news == News(elapsed_s=news.elapsed_s)


def test_the_first_actor_writes_down_its_arithmetic_and_another_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2))
    with acting(job):
        pass
    written = json.loads(job.numerics_path.read_text())
    assert written["numerics"] == "canonical"
    with acting(job, 1):  # the same machine computes the same bits
        pass
    job.numerics_path.write_text(json.dumps({**written, "probe": "other", "threads": 7}))
    with pytest.raises(NumericsMismatch, match=r"hardware differs.*threads 7 then, 1 here"):
        Actor(job.root, 2).load(60.0)


def test_fast_numerics_are_not_written_down(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2), {"speculation.numerics": "fast"})
    with acting(job):
        pass
    assert not job.numerics_path.exists()


def test_a_stop_text_cuts_the_generation(tmp_path: Path) -> None:
    whole = make_job(tmp_path / "whole", prompts(3))
    with acting(whole) as actor:
        collect(actor, 3, lease(range(3)))
    texts = [str(row["generation"]) for row in rows_of(whole)]
    stop = texts[0][3:5]
    cut = make_job(tmp_path / "cut", prompts(3), {"generation.stop": [stop]})
    with acting(cut) as actor:
        collect(actor, 3, lease(range(3)))
    rows = rows_of(cut)
    assert rows[0]["finish_reason"] == "stop"
    for row, text in zip(rows, texts, strict=True):
        assert row["generation"] == text.partition(stop)[0]


def test_a_latency_table_is_measured_once_for_a_kind_of_device(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), AUTO)
    with acting(job):
        pass
    (first,) = job.spot.glob("latency-*.json")
    before = first.read_bytes()
    with acting(job, 1):
        pass
    assert [path.read_bytes() for path in job.spot.glob("latency-*.json")] == [before]
    fixed = make_job(tmp_path / "fixed", prompts(1))
    with acting(fixed):
        pass
    assert not list(fixed.spot.glob("latency-*.json"))


def test_a_broken_latency_table_is_named(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), AUTO)
    with acting(job):
        pass
    (table,) = job.spot.glob("latency-*.json")
    table.write_text("{")
    with pytest.raises(ValueError, match=f"{table.name}: not a latency table"):
        Actor(job.root, 1).load(60.0)


def test_an_actor_goes_on_from_the_blocks_that_another_had_finished(tmp_path: Path) -> None:
    """The same rows as without, and fewer forwards than a beginning from nothing takes."""
    long = {
        "generation.max_new_tokens": 96,
        "generation.stop_at": "never",
        "scheduling.checkpoint_seconds": 0.001,
        "scheduling.publish_seconds": 1_000.0,
    }
    whole = make_job(tmp_path / "whole", prompts(2), long)
    with acting(whole) as actor:
        collect(actor, 2, lease(range(2)))
    job = make_job(tmp_path / "cut", prompts(2), long)
    with acting(job) as actor:
        actor.exchange([lease(range(2))], 0.0)
        while not list(job.checkpoints.glob("*.arrow")):
            time.sleep(0.01)
    assert not list(job.segments.iterdir())
    left = list(job.checkpoints.iterdir())
    begun = Checkpoints(job).find(range(2))
    assert begun
    with acting(job, 1) as actor:
        collect(actor, 2, lease(range(2)))
    assert rows_of(job) == rows_of(whole)
    assert list(job.checkpoints.iterdir()) == left  # its own is gone; the job's end clears all


def test_a_damaged_checkpoint_is_ignored(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1))
    begun = Begun(token_ids=(1, 2), commit_step=(0, 1), num_steps=2, stats=SampleStats())
    Checkpoints(job).write({0: begun})
    assert Checkpoints(job).find([0]) == {0: begun}
    (path,) = job.checkpoints.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:300] + bytes([data[300] ^ 1]) + data[301:])
    assert Checkpoints(job).find([0]) == {}


def test_what_was_finished_before_the_engine_fails_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"scheduling.publish_seconds": 3_600, "engine.max_sequences": 6}
    job = make_job(tmp_path, prompts(6), slow)
    answer = pool.answer

    def raising(request: Request) -> Completion:
        if request.sample_id == 4:
            raise ArithmeticError("at the fifth")
        return answer(request)

    monkeypatch.setattr(pool, "answer", raising)
    monkeypatch.setattr("spot_batch.service.actor.FIRST_ROWS", 1_000)
    actor = Actor(job.root, 0, load_engine=pool.load_stand_in)
    assert [each.sample_ids for each in collect(actor, 3, lease(range(6)))] == [(0, 1, 2)]
    with pytest.raises(ArithmeticError, match="at the fifth"):
        actor.exchange((), 60.0)
    assert list(scan(job).data) == [0, 1, 2]


def test_prompts_are_made_while_the_engine_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is not prepared before the first is decoded, which on one thread is never."""
    job = make_job(tmp_path, prompts(2), {"engine.max_sequences": 1})
    decoded = threading.Event()
    prepare, answer = SamplePreparer.prepare, pool.answer

    def slow(
        self: SamplePreparer, sample_ids: Sequence[int], *, draft_free: bool = False
    ) -> list[PreparedSample]:
        assert sample_ids[0] == 0 or decoded.wait(60.0), "nothing was decoded meanwhile"
        return prepare(self, sample_ids, draft_free=draft_free)

    def told(request: Request) -> Completion:
        decoded.set()
        return answer(request)

    monkeypatch.setattr(SamplePreparer, "prepare", slow)
    monkeypatch.setattr(pool, "answer", told)
    actor = Actor(job.root, 0, load_engine=pool.load_stand_in)
    assert sum(each.num_rows for each in collect(actor, 2, lease(range(2)))) == 2
    actor.stop()


def test_the_checkpoints_of_others_are_read_for_samples_that_were_begun_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(6), {"scheduling.checkpoint_seconds": 3_600})
    asked: list[int] = []
    find = Checkpoints.find

    def noting(self: Checkpoints, sample_ids: Sequence[int]) -> dict[int, Begun]:
        asked.extend(sample_ids)
        return find(self, sample_ids)

    monkeypatch.setattr(Checkpoints, "find", noting)
    actor = Actor(job.root, 0, load_engine=pool.load_stand_in)
    again = Lease(sample_ids=(3, 4, 5), begun=(4,))
    assert len(collect(actor, 6, lease(range(3)), again)) > 0
    actor.stop()
    assert asked == [4]


def test_memory_that_ends_in_the_head_costs_no_row_and_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak of a round lies behind its forward: there, too, the engine goes on with less."""
    whole = make_job(tmp_path / "whole", prompts(6))
    with acting(whole) as actor:
        collect(actor, 6, lease(range(6)))
    head, ended = BlockTarget.head, list[int]()

    def small(self: BlockTarget, rows: Tensor) -> Tensor:
        if len(rows) > 1:
            ended.append(len(rows))
            raise torch.OutOfMemoryError("there is room for one state")
        return head(self, rows)

    job = make_job(tmp_path / "short", prompts(6))
    actor = Actor(job.root, 0)
    assert isinstance(actor.load(60.0), ActorInfo)
    monkeypatch.setattr(BlockTarget, "head", small)
    collect(actor, 6, lease(range(6)))
    actor.stop()
    assert ended
    assert rows_of(job) == rows_of(whole)


def test_weights_are_read_for_their_hash_by_the_plan_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []

    def counting(path: Path, *, report: LoadReport = unreported) -> str:
        hashed.append(path)
        return hash_weights(path, report=report)

    monkeypatch.setattr("spot_batch.checkpoints.registry.hash_weights", counting)
    target = write_target(tmp_path / "target")
    job = make_job(tmp_path, prompts(1), {"model.target": str(target), **AUTO})
    assert hashed == [target]
    with acting(job):
        pass
    with acting(job, 1):
        pass
    assert hashed == [target]
