from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.unchanged import check_unchanged
from spot_batch.job.fingerprint import fingerprint
from spot_batch.job.reading import load_spec
from spot_batch.job.spec import SpecError
from spot_batch.jobdir import creation
from spot_batch.jobdir.creation import check_usable, create, create_or_open
from spot_batch.jobdir.directory import JobDirectory, SpecConflict
from spot_batch.jobdir.files import OutputError, StorageFull, write_durably
from spot_batch.jobdir.layout import Layout
from tests.jobdir.jobs import make_job, make_spec, prompts, write_jsonl


def test_a_directory_alone_says_what_its_job_is(tmp_path: Path) -> None:
    made = make_job(tmp_path, prompts(5), generation__n=2)
    job = JobDirectory.open(tmp_path / "out")
    assert job.spec == made.spec
    assert job.pinned == made.pinned
    assert job.fingerprint == made.fingerprint
    assert job.num_samples == 10
    assert job.schema.equals(made.schema, check_metadata=True)


def test_the_same_spec_goes_on_with_the_directory(tmp_path: Path) -> None:
    first = make_job(tmp_path, prompts(5))
    again = make_job(tmp_path, prompts(5), resources__actors=3, model__drafter="none")
    assert again.fingerprint == first.fingerprint
    assert JobDirectory.open(again.root).spec.resources.actors == 3


def test_an_input_that_moved_is_the_same_input(tmp_path: Path) -> None:
    first = make_job(tmp_path, prompts(5))
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy(tmp_path / "rows.jsonl", tmp_path / "elsewhere" / "renamed.jsonl")
    again = make_job(tmp_path, Path(moved))
    assert again.fingerprint == first.fingerprint
    assert again.pinned.files[0].path == str(moved)


def test_another_spec_is_refused_field_by_field(tmp_path: Path) -> None:
    make_job(tmp_path, prompts(5), generation__temperature=0)
    with pytest.raises(SpecConflict) as caught:
        make_job(tmp_path, prompts(6), generation__temperature=0.5)
    message = str(caught.value)
    assert "generation.temperature: 0.0 (directory) != 0.5 (spec)" in message
    assert "input.num_rows: 5 (directory) != 6 (spec)" in message
    assert "input.digest" in message


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"not empty and not a job directory \(it holds 'thesis"):
        make_job(tmp_path, prompts(1))
    assert [entry.name for entry in out.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputError, match="is a file; the output is a folder"):
        make_job(tmp_path, prompts(1))
    with pytest.raises(OutputError, match="a file stands in the way"):
        check_usable(Layout(tmp_path / "out" / "deeper"))


def test_a_link_in_place_of_the_inner_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "_spot").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="is a link; refused"):
        check_usable(Layout(tmp_path / "out"))


def test_an_empty_folder_is_ours_to_use(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert make_job(tmp_path, prompts(1)).num_samples == 1


def test_a_folder_without_a_job_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is not a job directory"):
        JobDirectory.open(tmp_path)


def test_a_directory_of_a_later_format_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1))
    (job.spot / "format").write_text("9\n")
    with pytest.raises(OutputError, match="written in format 9; this version reads 1"):
        JobDirectory.open(job.root)


def test_a_creation_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(3))
    job.fingerprint_path.unlink()  # it is written last
    assert not Layout(job.root).exists
    assert make_job(tmp_path, prompts(3)).fingerprint == job.fingerprint


class Stopped(BaseException):
    """As a kill: nothing in between handles it."""


@pytest.mark.parametrize("step", ["write_atomically", "mkdir"])
def test_a_creation_that_was_stopped_anywhere_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    owner = Path if step == "mkdir" else creation
    real = getattr(owner, step)
    num_stops = 0
    while True:
        root = tmp_path / str(num_stops)
        spec = make_spec(write_jsonl(tmp_path / "rows.jsonl", prompts(3)))
        pinned = pin_input(spec)
        mark, fields = fingerprint(spec, pinned.identity, {"weights": "w"})
        left = num_stops

        def stopping(*args: object, **named: object) -> object:
            nonlocal left
            if left == 0:
                raise Stopped
            left -= 1
            return real(*args, **named)

        job = Layout(root)
        check_usable(job)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(owner, step, stopping)
                create(job, spec, fingerprint=mark, fields=fields, pinned=pinned)
        except Stopped:
            num_stops += 1
        else:
            break
        again = create_or_open(root, spec, fingerprint=mark, fields=fields, pinned=pinned)
        assert (again.num_samples, again.fingerprint) == (3, mark)
        assert all(folder.is_dir() for folder in (again.data, again.stats, again.audit))
    assert num_stops >= 6


def test_empty_folders_of_our_names_alone_are_ours_to_use(tmp_path: Path) -> None:
    """As an earlier version left them when it was stopped before it wrote `_spot/format`."""
    for name in ("data", "stats", "audit", "_spot/tmp"):
        (tmp_path / "a" / "out" / name).mkdir(parents=True)
    assert make_job(tmp_path / "a", prompts(1)).num_samples == 1
    (tmp_path / "b" / "out" / "data").mkdir(parents=True)
    (tmp_path / "b" / "out" / "data" / "mine.csv").write_text("x")
    with pytest.raises(OutputError, match=r"not a job directory \(it holds 'data'\)"):
        make_job(tmp_path / "b", prompts(1))


def test_a_creation_cut_short_by_a_later_version_is_not_taken_over(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1))
    job.fingerprint_path.unlink()
    (job.spot / "format").write_text("9\n")
    with pytest.raises(OutputError, match="written in format 9; this version reads 1"):
        make_job(tmp_path, prompts(1))


def test_an_output_that_cannot_be_written_is_named() -> None:
    blocked = Path("/sys/spot-batch-test")  # refuses everybody, root too
    if not blocked.parent.is_dir():
        pytest.skip("needs Linux's /sys, which refuses root too")
    with pytest.raises(OutputError, match="/sys/spot-batch-test: cannot be written"):
        check_usable(Layout(blocked))


def test_a_full_disk_is_told_from_a_bug() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs Linux's /dev/full, a disk that is always full")
    with pytest.raises(StorageFull, match="no space left; what is published is kept") as caught:
        write_durably(full, b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == "/dev/full"


def test_a_column_named_as_one_of_ours_needs_a_prefix(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "generation": "b"}]
    with pytest.raises(SpecError, match="output column 'generation' is also a column of the input"):
        make_job(tmp_path / "a", rows)
    job = make_job(tmp_path / "b", rows, output__prefix="spot_")
    assert job.schema.names[:4] == ["prompt", "generation", "spot_custom_id", "spot_row_index"]
    assert "generation" not in make_job(tmp_path / "c", rows, input__keep=["prompt"]).kept


def test_the_source_of_custom_id_or_seed_is_that_column(tmp_path: Path) -> None:
    rows = [{"custom_id": "x", "seed": 4, "prompt": "a"}]
    job = make_job(tmp_path, rows, input__custom_id="custom_id", generation__per_row=["seed"])
    assert job.kept == ["prompt"]
    assert job.schema.names.count("custom_id") == 1
    assert job.schema.names.count("seed") == 1


def test_a_reserved_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'__spot_error': names that start with __spot_"):
        make_job(tmp_path, [{"prompt": "a", "__spot_error": 1}])


def test_kept_columns_stand_in_the_order_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": 1, "y": 2, "z": 3}]
    assert make_job(tmp_path, rows, input__keep=["z", "x"]).schema.names[:3] == [
        "z",
        "x",
        "custom_id",
    ]


def test_optional_columns_are_as_the_spec_says(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), output__include=["rendered_prompt"])
    assert job.schema.names[2:] == [
        "custom_id",
        "row_index",
        "sample_index",
        "generation",
        "finish_reason",
        "seed",
        "rendered_prompt",
        "text_lossy",
    ]


def test_parts_cover_every_sample_once(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(7), generation__n=3, output__rows_per_part=4)
    ids = [each for part in range(job.num_parts) for each in job.part_ids(part)]
    assert ids == list(range(21))
    assert all(each in job.part_ids(job.part_of(each)) for each in ids)
    assert job.part_name(2) == "part-00002-of-00006.arrow"


def test_schema_metadata_holds_what_decides_the_output_and_nothing_else(tmp_path: Path) -> None:
    metadata = make_job(tmp_path, prompts(1)).schema.metadata
    assert set(metadata) == {
        b"spot_batch.fingerprint",
        b"spot_batch.model",
        b"spot_batch.version",
    }
    assert b'"weights":"w"' in metadata[b"spot_batch.model"]


def test_a_moved_directory_keeps_the_input_that_it_holds(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"prompt": ["a", "b"]}).save_to_disk(tmp_path / "saved")
    job = make_job(tmp_path, tmp_path / "saved")
    assert Path(job.pinned.files[0].path).is_relative_to(job.hub_input)
    moved = JobDirectory.open(shutil.move(job.root, tmp_path / "moved"))
    check_unchanged(moved.pinned)
    assert InputReader(moved.pinned).read([1]).table["prompt"].to_pylist() == ["b"]


def test_no_path_of_this_machine_stands_in_the_card(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts(1), model__target="/models/secret/place")
    assert str(tmp_path) not in job.readme.read_text()
    assert "/models/secret" not in job.readme.read_text()


def test_fingerprints_do_not_depend_on_where_or_when(tmp_path: Path) -> None:
    marks = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = write_jsonl(tmp_path / name / f"{name}.jsonl", prompts(3))
        os.utime(path, (1_000, len(marks)))
        spec = make_spec(path)
        marks.append(fingerprint(spec, pin_input(spec).identity, {})[0])
    assert marks[0] == marks[1]


def test_pinned_inputs_survive_the_directory_whatever_their_size(tmp_path: Path) -> None:
    table = pa.table({"prompt": [str(i) for i in range(5_000)]})
    job = make_job(tmp_path, table)
    again = JobDirectory.open(job.root)
    assert again.pinned == replace(job.pinned)
    assert load_spec(job.spec_path) == job.spec
