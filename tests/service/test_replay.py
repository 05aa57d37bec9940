"""A published sample again, from the directory alone."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from spot_batch.cli.main import app
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.files import OutputError
from spot_batch.service.replay import replay
from tests.service.jobs import prompts, run_here, small_spec, write_rows

SHORT = {"generation.max_new_tokens": 36, "input.custom_id": "id", "generation.n": 2}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobDirectory:
    folder = tmp_path_factory.mktemp("job")
    rows = write_rows(folder, [*prompts(3), {"id": "empty", "question": ""}])
    job = run_here(folder / "out", small_spec(rows, SHORT))
    rows.unlink()  # the published rows hold what their prompts were made of
    return job


def altered(job: JobDirectory, column: str, place: int, value: int) -> tuple[str, int]:
    """Changes one element of a list column of the first row; returns the row.

    The job loses its mark of success: a complete one refuses a part that is not as it was written.
    """
    path = job.data / job.part_name(0)
    with pa.ipc.open_file(path.read_bytes()) as reader:
        table = reader.read_all()
    values = table[column].to_pylist()
    values[0][place] = value
    table = table.set_column(
        table.column_names.index(column),
        table.schema.field(column),
        pa.array(values, table.schema.field(column).type),
    )
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    if job.is_complete:
        with pytest.raises(OutputError, match=f"data/{path.name}: .* makes it again"):
            replay(job, "q-0")
        job.success.unlink()
    return table["custom_id"][0].as_py(), table["sample_index"][0].as_py()


def test_a_published_sample_comes_out_the_same(job: JobDirectory) -> None:
    for row, sample in (("q-0", 0), ("q-2", 1)):
        again = replay(job, row, sample_index=sample)
        assert (again.differing, again.difference) == ((), None)
        assert again.num_tokens > 0
    shown = CliRunner().invoke(app, ["replay", str(job.root), "--row", "q-1", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["differing"] == []
    with pytest.raises(OutputError, match="no published sample 0 of a row with custom_id 'x'"):
        replay(job, "x")
    with pytest.raises(OutputError, match=r"sample 1 of row 'empty' .* in errors/: empty_prompt: "):
        replay(job, "empty", sample_index=1)


def test_another_token_is_the_first_difference_with_its_gap(job: JobDirectory) -> None:
    path = job.data / job.part_name(0)
    whole = path.read_bytes()
    row, sample = altered(job, "token_ids", 3, 5)
    again = replay(job, row, sample_index=sample)
    assert again.differing == ("token_ids",)
    assert again.difference is not None
    assert again.difference.published_token_id == 5
    assert again.difference.position == again.difference.published_position
    assert (again.difference.kind, again.difference.gap > 0) == ("token", True)
    path.write_bytes(whole)
    with pa.ipc.open_file(whole) as reader:
        steps = reader.read_all()["commit_step"][0].as_py()
    last = steps.index(max(steps))
    row, sample = altered(job, "commit_step", last, 0)
    again = replay(job, row, sample_index=sample)
    assert again.difference is not None
    assert again.difference.forward == 0
    shown = CliRunner().invoke(app, ["replay", str(job.root), "--row", row])
    assert shown.exit_code == 4
    assert "first at forward 0" in shown.output
    path.write_bytes(whole)
