"""A job whose place is an object store: lost with its machine, gone on with on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from spot_batch.job.remote import local_folder
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.mirror import folder_of
from spot_batch.service.progress import Exit
from tests.service.jobs import (
    data_hash,
    flags,
    kill_group,
    prompts,
    run_here,
    small_spec,
    start,
    wait_until,
    write_rows,
)

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.exact]

URL = "s3://rows/runs/figs"
LONGER = {"generation.max_new_tokens": 96, "resources.actors": 1}


def test_a_job_in_an_object_store_outlives_its_machine(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path, prompts(48))
    undisturbed = run_here(tmp_path / "undisturbed", small_spec(rows, LONGER))

    def has_segment() -> bool:
        listed = s3.list_objects_v2(Bucket="rows", Prefix="runs/figs/_spot/segments/")
        return any(each["Key"].endswith(".arrow") for each in listed.get("Contents", ()))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = start(["submit", "-i", str(rows), "-o", URL, *flags(LONGER)], tmp_path)
    try:
        wait_until(has_segment)
        status = start(["status", URL, "--json"], tmp_path)
        assert json.loads(status.communicate(timeout=60)[0])["driver_alive"]
    finally:
        kill_group(first)
    assert not Layout(local_folder(URL)).is_complete, "the job was too short"
    shutil.rmtree(tmp_path / "one")  # the machine and its disk are gone, its input too
    rows.unlink()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    again = start(["resume", URL], tmp_path)
    shown, wrong = again.communicate(timeout=200)
    assert again.returncode == Exit.COMPLETE, shown + wrong
    assert f"spot_batch.load('{URL}')" in shown
    there = pyarrow.dataset.dataset(f"{URL}/data", format="ipc").to_table()
    assert there["row_index"].to_pylist() == list(range(48))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))
    assert data_hash(folder_of(URL)) == data_hash(undisturbed.root)
    exported = start(["export", URL, "-o", "exported.jsonl"], tmp_path)
    assert "48 rows" in exported.communicate(timeout=60)[0]
    write_rows(tmp_path, prompts(48))
    over = start(["submit", "-i", str(rows), "-o", URL, *flags({"generation.seed": 7})], tmp_path)
    _, wrong = over.communicate(timeout=60)
    assert over.returncode == Exit.BAD_INPUT
    assert "generation.seed: 0 (directory) != 7 (spec)" in wrong
