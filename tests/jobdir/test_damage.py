"""Parts that are gone or not what was written: every reader names the file and what mends it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import spot_batch
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.scan import fault_of_parts
from spot_batch.jobdir.segments import publish_segment
from spot_batch.results.export import ExportFormat, ExportSpec, export
from tests.jobdir.jobs import make_job, make_outcomes, prompts


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    job = make_job(tmp_path, prompts(10), output__rows_per_part=4)
    publish_segment(job, make_outcomes(job, range(10), failed={5}))
    finalize(job, check=None, facts=None)
    return job


def gone(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def garbage(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def another_table(path: Path) -> None:
    with pa.ipc.new_file(path, pa.schema([("x", pa.int64())])) as writer:
        writer.write_table(pa.table({"x": [1, 2, 3, 4]}))


DAMAGES = [gone, truncated, garbage, another_table]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("folder", ["data", "errors", "stats"])
def test_no_reader_takes_a_complete_job_for_whole(
    job: JobDirectory, tmp_path: Path, folder: str, damage: Callable[[Path], None]
) -> None:
    path = job.root / folder / job.part_name(1)
    damage(path)
    message = re.escape(str(path)) + f": .*; `spot-batch resume {job.root}` makes it again"
    formats: tuple[ExportFormat, ...] = ("parquet", "jsonl", "hf", "arrow-stream", "openai-batch")
    for kind in formats:
        with pytest.raises(OutputError, match=message):
            export(job, tmp_path / "x", ExportSpec(format=kind))
    for partial in (False, True):
        with pytest.raises(OutputError, match=message):
            spot_batch.load(job.root, "errors", partial=partial)
    assert not (tmp_path / "x").exists()
    fault = fault_of_parts(job, verify=False)
    assert fault is not None
    assert fault.startswith(f"{folder}/{path.name}: ")


def test_a_snapshot_has_what_is_published_and_names_what_cannot_be_read(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(9), output__rows_per_part=3)
    publish_segment(job, make_outcomes(job, range(3, 9), failed={4}))
    for part in (1, 2):
        compact(job, part)
    assert spot_batch.load(job.root, partial=True)["row_index"] == [3, 5, 6, 7, 8]
    assert len(spot_batch.load(job.root, "errors", partial=True)) == 1
    path = job.data / job.part_name(1)
    truncated(path)
    with pytest.raises(OutputError, match=re.escape(str(path))):
        spot_batch.load(job.root, partial=True)
