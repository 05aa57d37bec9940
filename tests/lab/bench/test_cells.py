"""MeasuredCells cells: a folder of something else is left as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_batch.lab.bench.cells import MeasuredCells

FACTS = {"command": "bench exact", "limit": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"question": "how many?"}', "is none of ours"),
        (b'{"question": "how many?"}\n{"question": "torn', "holds cells of another run"),
        (b"question\nhow many?", "line 1: not JSON"),
    ],
)
def test_a_file_of_something_else_keeps_every_byte(
    tmp_path: Path, text: bytes, message: str
) -> None:
    (tmp_path / "cells.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        MeasuredCells(tmp_path, dict, FACTS)
    assert (tmp_path / "cells.jsonl").read_bytes() == text


def test_a_job_directory_takes_no_cells(tmp_path: Path) -> None:
    (tmp_path / "_spot").mkdir()
    with pytest.raises(ValueError, match="is a job directory; give another --out"):
        MeasuredCells(tmp_path, dict, FACTS)
    assert [each.name for each in tmp_path.iterdir()] == ["_spot"]
