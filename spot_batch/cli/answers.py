"""Reads a few prompt and answer pairs back for the screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.schema import ERROR
from spot_batch.jobdir.segments import BadSegment, read_segment

Pair = tuple[str, str]


def pairs_of_segment(job: JobDirectory, name: str) -> Iterator[Pair]:
    """The completions of a segment; nothing where it has been compacted away meanwhile."""
    try:
        _, batch = read_segment(
            job.segments / name, fingerprint=job.fingerprint, num_samples=job.num_samples
        )
    except (FileNotFoundError, BadSegment):
        return
    for row in batch.to_pylist():
        if row[ERROR] is None:
            yield _pair(job, row)


def first_pairs(job: JobDirectory, count: int) -> Iterator[Pair]:
    """The first completions of the dataset."""
    for part in range(job.num_parts):
        path = job.data / job.part_name(part)
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
            for index in range(reader.num_record_batches):
                for row in reader.get_batch(index).slice(0, count).to_pylist():
                    if count == 0:
                        return
                    count -= 1
                    yield _pair(job, row)


def _pair(job: JobDirectory, row: Mapping[str, Any]) -> Pair:
    answer = str(row[job.spec.output.prefix + "generation"])
    column = job.pinned.prompt_column
    if job.pinned.template_columns:
        column = job.spec.output.prefix + "rendered_prompt"
    if column not in row:
        return f"(row {row[job.spec.output.prefix + 'row_index']})", answer
    prompt = row[column]
    if isinstance(prompt, list):
        prompt = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt), answer
