from __future__ import annotations

import datetime
import hashlib
import json
import logging
import multiprocessing
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spot_batch.jobdir.check import compare_audits
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import acquire_driver_lock
from spot_batch.jobdir.files import StorageFull, sha256_of
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import _write_part, compact, delete_covered_segments
from spot_batch.jobdir.scan import PART_KEY, scan
from spot_batch.jobdir.segments import publish_segment
from spot_batch.jobdir.summary import Summary
from spot_batch.records.progress import RunFacts
from spot_batch.records.results import CheckResult
from spot_batch.service.progress import Silent
from spot_batch.service.run import JobResult, result_of_complete, run_job
from tests.jobdir.jobs import changed, make_job, make_outcomes, prompts

ROOT = Path(__file__).parent.parent.parent
FACTS = RunFacts(drafter="none", target="bundled")


def sha256s(job: JobDirectory, folder: str = "data") -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((job.root / folder).glob("*.arrow"))
    }


def read(path: Path) -> pa.Table:
    with pa.ipc.open_file(path) as reader:
        return reader.read_all()


def hurtful_table(num_rows: int) -> pa.Table:
    """Nested, null-heavy and odd columns, over two parts' worth of rows."""
    some = [i % 3 != 0 for i in range(num_rows)]
    nested = pa.struct([("a", pa.list_(pa.string())), ("b", pa.struct([("c", pa.float64())]))])
    values: dict[str, pa.Array] = {
        "prompt": pa.array([f"p{i}" for i in range(num_rows)]),
        "maybe": pa.array([i if ok else None for i, ok in enumerate(some)], pa.int64()),
        "nothing": pa.nulls(num_rows),
        "flag": pa.array([(i % 2 == 0) if ok else None for i, ok in enumerate(some)]),
        "deep": pa.array(
            [
                {"a": ["x", None] * (i % 3), "b": {"c": i / 7}} if i % 4 else None
                for i in range(num_rows)
            ],
            nested,
        ),
        "big": pa.array([f"é{i}" if ok else None for i, ok in enumerate(some)], pa.large_string()),
        "when": pa.array([datetime.datetime(2026, 1, 1)] * num_rows, pa.timestamp("us", "UTC")),
        "exact": pa.array([Decimal(i) / 100 for i in range(num_rows)], pa.decimal128(12, 2)),
        "bytes": pa.array([bytes([i % 256]) * (i % 4) for i in range(num_rows)]),
        "extreme": pa.array([2**63 - 1, -(2**63)] * (num_rows // 2), pa.int64()),
        "nan": pa.array([float("nan"), float("-inf")] * (num_rows // 2)),
    }
    return pa.table(values)


def publish_in_pieces(job: JobDirectory, pieces: Iterable[Sequence[int]], drafted: int) -> None:
    for number, ids in enumerate(pieces):
        outcomes = make_outcomes(job, ids, failed={5, 11}, drafted=drafted + number)
        publish_segment(job, outcomes, actor=f"actor-{number}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobDirectory:
    job = make_job(tmp_path_factory.mktemp("whole"), hurtful_table(40), output__rows_per_part=17)
    publish_in_pieces(job, [range(40)], drafted=0)
    finalize(job, check=None, facts=FACTS)
    return job


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.randoms(use_true_random=False))
def test_bytes_of_a_part_do_not_depend_on_how_it_was_segmented(
    undisturbed: JobDirectory, tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    """Any cuts, any order, duplicates, other drafts: the same files."""
    ids = [*range(40), *(chance.randrange(40) for _ in range(chance.randrange(30)))]
    chance.shuffle(ids)
    pieces: list[list[int]] = []
    while ids:
        size = chance.randint(1, 20)
        pieces.append(sorted(set(ids[:size])))
        ids = ids[size:]
    job = make_job(tmp_path_factory.mktemp("cut"), hurtful_table(40), output__rows_per_part=17)
    publish_in_pieces(job, pieces, drafted=chance.randrange(9))
    parts = list(range(job.num_parts))
    chance.shuffle(parts)
    for part in parts:
        compact(job, part)
        if chance.random() < 0.5:
            delete_covered_segments(job, scan(job).parts)
    finalize(job, check=None, facts=FACTS)
    assert sha256s(job) == sha256s(undisturbed)
    assert sha256s(job, "errors") == sha256s(undisturbed, "errors")


def test_batches_hold_1024_rows_whatever_the_segments(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2_500), output__rows_per_part=2_500)
    for start in range(0, 2_500, 700):
        publish_segment(job, make_outcomes(job, range(start, min(start + 700, 2_500))))
    path = job.data / compact(job, 0).name
    with pa.ipc.open_file(path) as reader:
        sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    assert sizes == [1_024, 1_024, 452]


@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_kept_columns_come_out_as_they_went_in(tmp_path: Path, compression: str) -> None:
    table = hurtful_table(20)
    job = make_job(tmp_path, table, output__compression=compression)
    publish_segment(job, make_outcomes(job, range(20)))
    out = read(job.data / compact(job, 0).name)
    assert out.schema.names[: table.num_columns] == table.schema.names
    for name in table.schema.names:
        assert out.schema.field(name).type == table.schema.field(name).type
        if name == "nan":
            assert repr(out[name].to_pylist()) == repr(table[name].to_pylist())
        else:
            assert out[name].equals(table[name])


def test_every_sample_stands_once_in_data_or_in_errors(undisturbed: JobDirectory) -> None:
    data, errors = [
        pa.concat_tables(read(path) for path in sorted((undisturbed.root / folder).iterdir()))
        for folder in ("data", "errors")
    ]
    assert errors["row_index"].to_pylist() == [5, 11]
    assert errors["code"].to_pylist() == ["oom", "oom"]
    assert errors["request"].to_pylist() == ["prompt 5", "prompt 11"]
    assert data["row_index"].to_pylist() == [i for i in range(40) if i not in (5, 11)]
    assert [path.name for path in (undisturbed.root / "errors").iterdir()] == [
        "part-00000-of-00003.arrow"
    ]


def test_data_parts_hold_no_clock_host_or_actor(undisturbed: JobDirectory) -> None:
    with pa.ipc.open_file(undisturbed.data / undisturbed.part_name(0)) as reader:
        assert set(reader.schema.metadata) == set(undisturbed.schema.metadata)
    names = undisturbed.schema.names
    assert not {"actor", "host", "time", "num_drafted"} & set(names)


def test_a_completion_is_taken_before_an_error_and_then_the_first_name(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(4))
    publish_segment(job, make_outcomes(job, range(4), failed={0, 1, 2, 3}))
    publish_segment(job, make_outcomes(job, [1, 2]))
    part = compact(job, 0)
    assert (part.num_rows, part.num_errors) == (2, 2)
    assert read(job.data / part.name)["row_index"].to_pylist() == [1, 2]
    assert read(job.errors / part.name)["row_index"].to_pylist() == [0, 3]


def test_a_part_with_missing_samples_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10))
    with pytest.raises(ValueError, match=r"10 of its samples are not published \(0-9\)"):
        compact(job, 0)
    publish_segment(job, make_outcomes(job, [0, 1, 2, 7]))
    with pytest.raises(ValueError, match=r"6 of its samples are not published \(3-6,8-9\)"):
        compact(job, 0)


def test_finishing_with_missing_samples_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10))
    publish_segment(job, make_outcomes(job, [0, 1, 2, 7]))
    with pytest.raises(ValueError, match=r"6 samples are missing \(3-6,8-9\)"):
        finalize(job, check=None, facts=None)
    assert not job.is_complete


def test_compacting_again_touches_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10))
    publish_segment(job, make_outcomes(job, range(10)))
    first = compact(job, 0)
    path = job.data / first.name
    before = path.stat()
    publish_segment(job, make_outcomes(job, range(5), failed={1}))
    assert compact(job, 0) == first
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_segments_go_once_their_samples_are_all_in_parts(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10), output__rows_per_part=5)
    publish_segment(job, make_outcomes(job, range(3)))
    publish_segment(job, make_outcomes(job, range(3, 7)))
    publish_segment(job, make_outcomes(job, range(7, 10)))
    compact(job, 0)
    assert delete_covered_segments(job, scan(job).parts) == 1
    assert str(scan(job).data) == "0-9"
    compact(job, 1)
    assert delete_covered_segments(job, scan(job).parts) == 2
    assert str(scan(job).in_parts) == "0-9"


@pytest.mark.parametrize("stop_before", ["stats", "errors", "data"])
def test_a_compaction_that_was_cut_short_is_finished_with_the_same_copies(
    tmp_path: Path, stop_before: str
) -> None:
    """Between two attempts another copy appears that would have been taken first."""
    job = make_job(tmp_path / "a", prompts(10))
    publish_segment(job, make_outcomes(job, range(10), failed={2, 3}))
    name = compact(job, 0).name
    whole = sha256s(job) | sha256s(job, "errors")
    for folder in ("data", "errors", "stats")[: ["data", "errors", "stats"].index(stop_before) + 1]:
        (job.root / folder / name).unlink()
    publish_segment(job, make_outcomes(job, [2]))
    part = compact(job, 0)
    errors = read(job.errors / name)["row_index"].to_pylist()
    data = read(job.data / name)["row_index"].to_pylist()
    assert sorted(data + errors) == list(range(10))
    if stop_before == "stats":  # nothing of the first attempt is left
        assert errors == [3]
    else:
        assert errors == [2, 3]
        assert sha256s(job) | sha256s(job, "errors") == whole
    assert part.num_errors == len(errors)


@pytest.mark.parametrize("folder", ["data", "stats"])
@pytest.mark.parametrize("cut", [0, 100, -1, -20])
def test_a_damaged_part_is_made_again(
    tmp_path: Path, folder: str, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, prompts(10))
    publish_segment(job, make_outcomes(job, range(10), failed={4}))
    name = compact(job, 0).name
    whole = sha256s(job)
    delete_covered_segments(job, scan(job).parts)
    path = job.root / folder / name
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        assert len(scan(job).data) == 0
    assert f"data/{name}: does not count" in caplog.text
    publish_segment(job, make_outcomes(job, range(10), failed={4}, drafted=8))
    compact(job, 0)
    assert sha256s(job) == whole
    assert len(scan(job).in_parts) == 10


def flip(path: Path, place: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 0x10
    path.write_bytes(damaged)


def place_of_text(job: JobDirectory, text: bytes) -> int:
    """Where a generation stands in the first part: a byte whose change breaks no structure."""
    return (job.data / job.part_name(0)).read_bytes().index(text)


def test_a_part_with_one_other_byte_is_taken_away_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(tmp_path, prompts(10), output__rows_per_part=5, output__compression="none")
    publish_segment(job, make_outcomes(job, range(10)))
    for part in range(2):
        compact(job, part)
    whole = sha256s(job)
    delete_covered_segments(job, scan(job).parts)
    path = job.data / job.part_name(0)
    flip(path, place_of_text(job, b"sample 3 is"))
    assert str(scan(job).data) == "0-9"  # a light look does not see it
    with caplog.at_level(logging.WARNING):
        assert str(scan(job, verify=True).data) == "5-9"
    assert f"data/{path.name}: does not count" in caplog.text
    assert not path.exists()
    publish_segment(job, make_outcomes(job, range(5), drafted=8))
    finalize(job, check=None, facts=FACTS)
    assert sha256s(job) == whole


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_damaged_part_gets_no_mark_of_success_and_is_no_difference(
    tmp_path: Path, compression: str
) -> None:
    for place in range(0, 4_000, 250):
        root = tmp_path / str(place)
        job = make_job(root, prompts(20), output__compression=compression)
        publish_segment(job, make_outcomes(job, range(20)))
        publish_segment(job, make_outcomes(job, range(20)), purpose="audit")
        compact(job, 0)
        delete_covered_segments(job, scan(job).parts)
        path = job.data / job.part_name(0)
        flip(path, place % path.stat().st_size)
        assert compare_audits(job).check.num_differed == 0
        with pytest.raises(ValueError, match="20 samples are missing"):
            finalize(job, check=None, facts=FACTS)
        assert not job.is_complete


@pytest.mark.parametrize("folder", ["errors", "stats"])
def test_damage_beside_the_data_makes_the_part_again(tmp_path: Path, folder: str) -> None:
    outcomes = range(0, 10)
    size, place = 1, 0
    while place < size:  # all over the file: header, batch, footer
        job = make_job(tmp_path / str(place), prompts(10))
        publish_segment(job, make_outcomes(job, outcomes, failed={2, 7}))
        name = compact(job, 0).name
        path = job.root / folder / name
        size, before = path.stat().st_size, read(path)
        flip(path, place)
        again = make_outcomes(job, outcomes, failed={2, 7})
        if len(scan(job, verify=True).in_parts) == 0:
            publish_segment(job, again)
            finalize(job, check=None, facts=FACTS)
        else:  # padding, or metadata that nobody reads: only statistics have no hash
            assert folder == "stats"
        if folder == "errors":
            assert read(path) == before
        place += 331


def test_an_error_part_without_a_hash_is_opened_batch_by_batch(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10))
    publish_segment(job, make_outcomes(job, range(10), failed={2, 7}))
    name = compact(job, 0).name
    stats = read(job.stats / name)
    facts = json.loads(stats.schema.metadata[PART_KEY])
    assert facts.pop("errors_sha256") == sha256s(job, "errors")[name]
    older = {**stats.schema.metadata, PART_KEY: json.dumps(facts).encode()}
    with pa.ipc.new_file(job.stats / name, stats.schema.with_metadata(older)) as writer:
        writer.write_table(stats)
    assert len(scan(job, verify=True).in_parts) == 10
    path = job.errors / name
    flip(path, path.read_bytes().index(b"\x28\xb5\x2f\xfd"))  # the mark of a zstd frame
    assert len(scan(job, verify=True).in_parts) == 0


def finished(tmp_path: Path) -> JobDirectory:
    options: dict[str, object] = {"output__rows_per_part": 5, "equivalence__audit_fraction": 0}
    job = make_job(tmp_path, prompts(10), output__compression="none", **options)
    publish_segment(job, make_outcomes(job, range(10), failed={4}))
    finalize(job, check=None, facts=FACTS)
    return job


def run_again(job: JobDirectory) -> JobResult:
    with acquire_driver_lock(job) as lock:
        return run_job(job, FACTS, Silent(), lock=lock)


def test_a_complete_job_whose_parts_are_whole_stays_as_it_is(tmp_path: Path) -> None:
    job = finished(tmp_path)
    before = job.success.stat().st_ino, sha256s(job)
    assert run_again(job).message == "complete already"
    assert (job.success.stat().st_ino, sha256s(job)) == before


@pytest.mark.parametrize("damage", ["gone", "short", "flipped", "errors", "stats", "summary"])
def test_a_complete_job_that_was_damaged_goes_on_as_an_incomplete_one(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = finished(tmp_path)
    whole = sha256s(job) | sha256s(job, "errors")
    name = job.part_name(0)
    path = job.summary_path if damage == "summary" else job.data / name
    if damage in ("errors", "stats"):
        (job.root / damage / name).unlink()
    elif damage == "gone":
        path.unlink()
    elif damage == "flipped":
        flip(path, place_of_text(job, b"sample 3 is"))
    else:
        path.write_bytes(path.read_bytes()[:-9])
    if damage != "summary":  # what actors would publish again
        publish_segment(job, make_outcomes(job, range(5), failed={4}))
    with caplog.at_level(logging.WARNING):
        result = run_again(job)
    assert f"{path.name}: " in caplog.text
    assert "the job is not complete and goes on" in caplog.text
    assert result.message != "complete already"
    assert job.is_complete
    assert sha256s(job) | sha256s(job, "errors") == whole
    assert Summary.read(job.summary_path).totals.num_samples == 10


def test_a_complete_job_that_was_damaged_is_complete_no_more_until_made_again(
    tmp_path: Path,
) -> None:
    job = finished(tmp_path)
    (job.data / job.part_name(1)).unlink()
    assert result_of_complete(job) is None
    assert not job.is_complete
    assert str(scan(job).data) == "0-4"


def test_a_part_of_another_job_does_not_count(tmp_path: Path) -> None:
    ours, theirs = (
        make_job(tmp_path / name, prompts(4), generation__seed=seed)
        for seed, name in enumerate(("a", "b"))
    )
    publish_segment(theirs, make_outcomes(theirs, range(4)))
    name = compact(theirs, 0).name
    for folder in ("data", "stats"):
        (ours.root / folder / name).write_bytes((theirs.root / folder / name).read_bytes())
    assert len(scan(ours).data) == 0


def test_a_lost_error_part_brings_its_samples_back(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10))
    publish_segment(job, make_outcomes(job, range(10), failed={4}))
    name = compact(job, 0).name
    delete_covered_segments(job, scan(job).parts)
    (job.errors / name).unlink()
    assert len(scan(job).data) == 0


def _compact_all(root: str, seed: int) -> None:
    job = JobDirectory.open(root)
    parts = list(range(job.num_parts))
    random.Random(seed).shuffle(parts)
    for part in parts:
        compact(job, part)
        delete_covered_segments(job, scan(job).parts)


def test_compactors_that_race_take_the_same_copies(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(120), output__rows_per_part=10)
    for start in range(0, 120, 8):
        ids = range(start, min(start + 8, 120))
        publish_segment(
            job, make_outcomes(job, ids, failed={each for each in ids if each % 7 == 0})
        )
        publish_segment(
            job, make_outcomes(job, ids, failed={each for each in ids if each % 5 == 0})
        )
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_compact_all, args=(str(job.root), n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    finalize(job, check=None, facts=None)
    rows = [
        each
        for folder in ("data", "errors")
        for path in (job.root / folder).iterdir()
        for each in read(path)["row_index"].to_pylist()
    ]
    assert sorted(rows) == list(range(120))


def test_a_job_of_no_rows_has_one_part_with_the_full_schema(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    job = make_job(tmp_path, tmp_path / "empty.jsonl")
    summary = finalize(job, check=None, facts=FACTS)
    out = read(job.data / "part-00000-of-00001.arrow")
    assert out.num_rows == 0
    assert out.schema.equals(job.schema, check_metadata=True)
    assert summary.totals.num_samples == 0
    assert job.is_complete


def test_a_part_whose_samples_all_failed_is_empty(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(3))
    publish_segment(job, make_outcomes(job, range(3), failed={0, 1, 2}))
    summary = finalize(job, check=None, facts=FACTS)
    assert read(job.data / job.part_name(0)).num_rows == 0
    assert read(job.errors / job.part_name(0)).num_rows == 3
    assert summary.totals.num_failed == 3


def test_an_output_prefix_goes_before_every_column_of_ours(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(3), output__prefix="spot_")
    publish_segment(job, make_outcomes(job, range(3), failed={1}))
    publish_segment(job, make_outcomes(job, range(3)), purpose="audit")
    check = compare_audits(job).check
    finalize(job, check=check, facts=FACTS)
    out = read(job.data / job.part_name(0))
    assert out["spot_row_index"].to_pylist() == [0, 2]
    assert check.num_compared == 2
    assert read(job.errors / job.part_name(0)).schema.names[:2] == ["custom_id", "row_index"]


def test_finishing_leaves_results_and_removes_what_was_needed_on_the_way(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(10), output__rows_per_part=5)
    publish_segment(job, make_outcomes(job, range(10), failed={1}))
    (job.tmp / "1-abc").write_text("left by a crash")
    outside = tmp_path / "outside"
    outside.write_text("not ours")
    (job.tmp / "link").symlink_to(outside)
    (job.segments / "000000000000-000000000000-0.arrow").write_text("torn")
    first = finalize(job, check=CheckResult(num_compared=8, num_differed=0), facts=FACTS)
    assert list(job.segments.iterdir()) == list(job.tmp.iterdir()) == []
    assert outside.read_text() == "not ours"
    assert job.is_complete
    assert Summary.read(job.summary_path) == first
    assert first.totals.num_samples == 10
    assert first.totals.num_completions == 9
    assert first.totals.error_codes == {"oom": 1}
    assert finalize(job, check=first.check, facts=FACTS) == first


def test_a_failed_check_withholds_the_mark_of_success(tmp_path: Path) -> None:
    job = make_job(tmp_path / "a", prompts(3))
    publish_segment(job, make_outcomes(job, range(3)))
    failed = CheckResult(num_compared=3, num_differed=1, differing=(2,))
    finalize(job, check=failed, facts=FACTS)
    assert not job.is_complete
    assert "3 samples, chosen by hash, were decoded again draft-free: 1 differed." in (
        job.readme.read_text()
    )
    warned = make_job(tmp_path / "b", prompts(3), equivalence__on_fail="warn")
    publish_segment(warned, make_outcomes(warned, range(3)))
    finalize(warned, check=failed, facts=FACTS)
    assert warned.is_complete


@pytest.mark.parametrize("is_compacted", [False, True])
def test_audits_are_compared_field_by_field(tmp_path: Path, is_compacted: bool) -> None:
    job = make_job(tmp_path, prompts(30), output__rows_per_part=20)
    publish_segment(job, make_outcomes(job, range(30), failed={3}))
    if is_compacted:
        compact(job, 0)
    again = make_outcomes(job, [1, 3, 5, 25, 26], failed={5})
    again[3] = changed(again[3], "something else")
    publish_segment(job, again, purpose="audit")
    assert compare_audits(job).check == CheckResult(num_compared=3, num_differed=1, differing=(25,))


def test_audits_are_compared_by_text_where_tokens_are_not_kept(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(3), output__include=[])
    publish_segment(job, make_outcomes(job, range(3)))
    compact(job, 0)
    again = make_outcomes(job, [0, 1])
    again[1] = changed(again[1], "something else")
    publish_segment(job, again, purpose="audit")
    assert compare_audits(job).check == CheckResult(num_compared=2, num_differed=1, differing=(1,))


def test_the_check_of_a_large_job_takes_no_more_memory_than_that_of_a_small_one(
    tmp_path: Path,
) -> None:
    peaks = []
    for num_rows in (1_000, 8_000):
        job = make_job(tmp_path / str(num_rows), prompts(num_rows), output__rows_per_part=500)
        for start in range(0, num_rows, 250):
            outcomes = make_outcomes(job, range(start, start + 250))
            publish_segment(job, outcomes)
            publish_segment(job, outcomes, purpose="audit")
        for part in range(job.num_parts):
            compact(job, part)
        tracemalloc.start()
        assert compare_audits(job).check.num_compared == num_rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_the_end_of_a_job_hashes_every_part_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts(30), output__rows_per_part=10)
    publish_segment(job, make_outcomes(job, range(30)))
    publish_segment(job, make_outcomes(job, [3, 25]), purpose="audit")
    for part in range(3):
        compact(job, part)
    hashed: list[str] = []

    def counting(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr("spot_batch.jobdir.scan.sha256_of", counting)
    compared = compare_audits(job)
    finalize(job, check=compared.check, facts=None, verified=compared.verified)
    assert sorted(hashed) == [job.part_name(part) for part in range(3)]


def test_a_part_that_memory_is_too_short_to_verify_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished(tmp_path)

    def short(path: Path) -> str:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    with monkeypatch.context() as patch:
        patch.setattr("spot_batch.jobdir.scan.sha256_of", short)
        with pytest.raises(MemoryError):
            scan(job, verify=True)
    assert len(scan(job, verify=True).in_parts) == 10


def test_parts_beyond_a_hundred_thousand_sort_by_name(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2), generation__n=50_001, output__rows_per_part=1)
    assert job.num_parts == 100_002
    names = [job.part_name(part) for part in (9, 99_999, 100_000, 100_001)]
    assert names == sorted(names)
    few = make_job(tmp_path / "few", prompts(2), generation__n=50_000, output__rows_per_part=1)
    assert few.part_name(99_999) == "part-99999-of-100000.arrow"  # as it always was


def test_a_disk_that_fills_up_within_a_part_is_told_from_a_bug(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full, a disk that is always full")
    batch = pa.record_batch({"x": ["long text " * 10_000]})
    with pytest.raises(StorageFull, match="no space left"):
        _write_part(Path("/dev/full"), batch.schema, iter([batch]), "none")


KILLED = """
import sys
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from tests.jobdir.jobs import make_outcomes
job = JobDirectory.open(sys.argv[1])
print("ready", flush=True)
for start in range(0, 300, 6):
    publish_segment(job, make_outcomes(job, range(start, start + 6), failed={start}))
for part in range(job.num_parts):
    compact(job, part)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.25])
def test_a_killed_process_leaves_whole_files_or_none(tmp_path: Path, delay_s: float) -> None:
    want = make_job(tmp_path / "undisturbed", prompts(300), output__rows_per_part=50)
    publish_segment(want, make_outcomes(want, range(300), failed=range(0, 300, 6)))
    finalize(want, check=None, facts=None)
    job = make_job(tmp_path / "killed", prompts(300), output__rows_per_part=50)
    command = [sys.executable, "-c", KILLED, str(job.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        process.kill()
    missing = [each for gap in scan(job).data.gaps(300) for each in gap]
    if missing:
        publish_segment(job, make_outcomes(job, missing, failed=range(0, 300, 6)))
    finalize(job, check=None, facts=None)
    assert sha256s(job) == sha256s(want)
    assert sha256s(job, "errors") == sha256s(want, "errors")
    assert list(job.tmp.iterdir()) == []


def test_two_thousand_columns_pass_through(tmp_path: Path) -> None:
    row = {"prompt": "a", **{f"column {i}": i for i in range(2_000)}}
    job = make_job(tmp_path, [row, row])
    publish_segment(job, make_outcomes(job, range(2)))
    finalize(job, check=None, facts=FACTS)
    assert read(job.data / job.part_name(0))["column 1999"].to_pylist() == [1999, 1999]
