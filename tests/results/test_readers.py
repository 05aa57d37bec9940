"""Everybody's readers open what we write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import datasets
import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest
import yaml
from pyarrow import feather

import spot_batch
from spot_batch.jobdir.card import describe_check
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError, sha256_of
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.progress import RunFacts
from tests.jobdir.jobs import make_job, make_outcomes, prompts
from tests.jobdir.test_parts import hurtful_table

ROWS = 100


def finished(root: Path, source: object, *, rows_per_part: int, failed: set[int]) -> JobDirectory:
    job = make_job(root, source, output__rows_per_part=rows_per_part, output__license="mit")  # type: ignore[arg-type]
    publish_segment(job, make_outcomes(job, range(job.num_samples), failed=failed))
    finalize(job, check=None, facts=RunFacts(drafter="none", target="bundled"))
    return job


@pytest.fixture(scope="module", params=[ROWS, 2], ids=["one part", "fifty parts"])
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> JobDirectory:
    return finished(
        tmp_path_factory.mktemp("job"),
        hurtful_table(ROWS),
        rows_per_part=request.param,
        failed={0, 1, 7},  # with two rows a part, the first part is empty
    )


WANT = [i for i in range(ROWS) if i not in (0, 1, 7)]


def test_load_dataset_reads_the_directory(job: JobDirectory, tmp_path: Path) -> None:
    read = datasets.load_dataset(str(job.root), cache_dir=str(tmp_path))
    assert list(read) == ["train"]
    assert read["train"]["row_index"] == WANT
    assert read["train"][0]["deep"] == {"a": ["x", None, "x", None], "b": {"c": 2 / 7}}
    assert read["train"].features["when"].dtype == "timestamp[us, tz=UTC]"
    errors = datasets.load_dataset(str(job.root), "errors", cache_dir=str(tmp_path))
    assert errors["train"]["row_index"] == [0, 1, 7]


def test_load_dataset_streams_the_directory(job: JobDirectory) -> None:
    read = datasets.load_dataset(str(job.root), split="train", streaming=True)
    assert [row["row_index"] for row in read] == WANT


def test_pyarrow_reads_the_data(job: JobDirectory) -> None:
    read = pyarrow.dataset.dataset(job.data, format="ipc")
    assert read.to_table(columns=["row_index"])["row_index"].to_pylist() == WANT
    some = read.to_table(filter=pyarrow.dataset.field("generation") == "sample 3 is 9 é😀")
    assert some["row_index"].to_pylist() == [3]
    assert read.schema.field("big").type == pa.large_string()


def test_polars_scans_the_data(job: JobDirectory) -> None:
    read = polars.scan_ipc(str(job.data / "*.arrow")).collect()
    assert read["row_index"].to_list() == WANT
    assert read["usage"].struct.field("prompt_tokens").to_list() == [7] * len(WANT)


def test_duckdb_queries_the_data(job: JobDirectory) -> None:
    rows = pyarrow.dataset.dataset(job.data, format="ipc")
    found = duckdb.sql("select row_index, deep.b.c from rows where maybe is null order by 1")
    want = [(row, row / 7 if row % 4 else None) for row in WANT if row % 3 == 0]
    assert found.fetchall() == want
    del rows


def test_pandas_and_feather_read_each_part(job: JobDirectory) -> None:
    parts = sorted(job.data.glob("*.arrow"))
    frames = [pandas.read_feather(path) for path in parts]
    assert [row for frame in frames for row in frame["row_index"]] == WANT
    tables = [feather.read_table(path, memory_map=True) for path in parts]
    assert [row for table in tables for row in table["row_index"].to_pylist()] == WANT


def test_load_gives_a_dataset_of_each_kind(job: JobDirectory) -> None:
    data = spot_batch.load(job.root)
    assert isinstance(data, datasets.Dataset)
    assert data["row_index"][:] == WANT
    assert data.data.table.schema.field("big").type == pa.large_string()
    assert spot_batch.load(job.root, "errors")["code"][:] == ["oom"] * 3
    assert sum(spot_batch.load(job.root, "stats")["is_error"]) == 3


def test_load_does_not_copy_what_is_not_compressed(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(2_000), output__compression="none")
    publish_segment(job, make_outcomes(job, range(2_000)))
    finalize(job, check=None, facts=None)
    before = pa.total_allocated_bytes()
    read = spot_batch.load(job.root)
    assert pa.total_allocated_bytes() - before < 10_000
    assert read[1_999]["row_index"] == 1_999


@pytest.mark.parametrize("which", ["data", "errors", "stats"])
def test_no_rows_are_a_dataset_too(tmp_path: Path, which: str) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    job = make_job(tmp_path, tmp_path / "empty.jsonl")
    finalize(job, check=None, facts=None)
    read = spot_batch.load(job.root, which)  # type: ignore[arg-type]
    assert isinstance(read, datasets.Dataset)
    assert len(read) == 0
    assert "row_index" in read.column_names
    if which == "data":
        assert polars.scan_ipc(str(job.data / "*.arrow")).collect().height == 0
        assert pyarrow.dataset.dataset(job.data, format="ipc").count_rows() == 0


def test_a_job_that_still_runs_is_loaded_only_on_demand(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(9), output__rows_per_part=3)
    publish_segment(job, make_outcomes(job, range(3, 7), failed={4}))
    compact(job, 1)
    with pytest.raises(OutputError, match="not complete yet; partial=True"):
        spot_batch.load(job.root)
    assert spot_batch.load(job.root, partial=True)["row_index"][:] == [3, 5]
    read = datasets.load_dataset(str(job.root), cache_dir=str(tmp_path / "cache"))
    assert read["train"]["row_index"] == [3, 5]


def test_data_opens_on_the_way_and_published_parts_stay(tmp_path: Path) -> None:
    """At a quarter, half and three quarters of a job, and at its end."""
    job = make_job(tmp_path, hurtful_table(40), output__rows_per_part=5)
    seen: dict[str, str] = {}
    for done in (10, 20, 30, 40):
        publish_segment(job, make_outcomes(job, range(done - 10, done), failed={3, 17}))
        for part in range(done // 5):
            compact(job, part)
        if done == 40:
            finalize(job, check=None, facts=None)
        read = datasets.load_dataset(str(job.root), cache_dir=str(tmp_path / f"cache-{done}"))
        want = [row for row in range(done) if row not in (3, 17)]
        assert read["train"]["row_index"][:] == want
        now = {path.name: sha256_of(path) for path in job.data.iterdir()}
        assert seen.items() <= now.items()
        seen = now
    assert len(seen) == 8


def test_an_unknown_kind_of_result_is_refused(job: JobDirectory) -> None:
    with pytest.raises(ValueError, match="must be data, errors or stats, got 'logs'"):
        spot_batch.load(job.root, "logs")  # type: ignore[arg-type]


def test_the_card_names_errors_only_where_there_are_some(tmp_path: Path) -> None:
    for name, failed in (("with", {1}), ("without", set[int]())):
        job = finished(tmp_path / name, prompts(3), rows_per_part=256, failed=failed)
        head = yaml.safe_load(job.readme.read_text().split("---")[1])
        names = [config["config_name"] for config in head["configs"]]
        assert names == (["default", "errors"] if failed else ["default"])
        assert head["license"] == "mit"


def test_text_from_outside_cannot_break_out_of_the_card(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        [{"a|b`c": "x"}],
        input__prompt="a|b`c",
        input__system="```\n---\n# injected\n<script>alert(1)</script> \x1b[31m",
        output__license="mit\ninjected: true",
    )
    card = job.readme.read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert "injected" not in head
    assert "\n# injected" not in card
    assert "\x1b" not in card
    assert "`` a¦b`c ``" in card or "``a¦b`c``" in card


def test_the_check_in_words_names_a_few_of_those_that_differ() -> None:
    from spot_batch.records.results import CheckResult

    words = describe_check(
        CheckResult(num_compared=50, num_differed=30, differing=tuple(range(30)))
    )
    assert words.startswith(
        "50 samples, chosen by hash, were decoded again draft-free: 30 differed"
    )
    assert words.endswith("18, 19 and 10 more.")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, spot_batch, spot_batch.records.results; "
        "print([m for m in ('torch', 'ray', 'datasets', 'pyarrow', 'transformers') "
        "if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_store_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, spot_batch.jobdir.parts, spot_batch.inputs.pin, spot_batch.inputs.prepare; "
        "print([m for m in ('torch', 'ray', 'datasets', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
