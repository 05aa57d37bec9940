"""Job directories for the tests: real inputs, and outcomes that are a function of the sample id."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.job.fingerprint import fingerprint
from spot_batch.job.reading import load_spec, with_model_defaults
from spot_batch.job.spec import JobSpec
from spot_batch.jobdir.creation import create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.records.results import Completion, Outcome, RowError, SampleStats


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_job(
    root: Path, source: Path | pa.Table | Sequence[object], **overrides: object
) -> JobDirectory:
    """The job of an input in `root`/out; overrides are dotted, with __ for the dot."""
    root.mkdir(exist_ok=True)
    if isinstance(source, pa.Table):
        path = root / "rows.parquet"
        if not path.exists():
            pq.write_table(source, path)
    elif isinstance(source, Path):
        path = source
    else:
        path = write_jsonl(root / "rows.jsonl", source)
    spec = make_spec(path, **overrides)
    pinned = pin_input(spec, hub_dir=root / "out" / "_spot" / "input")
    mark, fields = fingerprint(spec, pinned.identity, {"weights": "w"})
    return create_or_open(root / "out", spec, fingerprint=mark, fields=fields, pinned=pinned)


def make_spec(path: Path | str, **overrides: object) -> JobSpec:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return with_model_defaults(load_spec(None, {"input.source": str(path), **given}))


def prompts(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"How much is {i}?", "level": i % 3} for i in range(count)]


def make_outcomes(
    job: JobDirectory, ids: Sequence[int], *, failed: Collection[int] = (), drafted: int = 3
) -> list[Outcome]:
    """What any actor makes of these samples; `drafted` is what depends on scheduling."""
    n = job.spec.generation.n
    read = InputReader(job.pinned).read([each // n for each in ids])
    return [
        Outcome(
            sample_id=each,
            custom_id=str(each // n),
            seed=0,
            result=RowError(code="oom", stage="decode", message=f"sample {each}", attempts=3)
            if each in failed
            else make_completion(each, drafted=drafted),
            rows=read.table,
            position=position,
            text="" if each in failed else f"sample {each} is {each * each} é😀",
            prompt_text=f"prompt {each}",
        )
        for position, each in enumerate(ids)
    ]


def make_completion(sample_id: int, *, drafted: int = 3) -> Completion:
    length = sample_id % 5
    return Completion(
        sample_id=sample_id,
        token_ids=tuple(range(sample_id, sample_id + length)),
        commit_step=tuple(range(length)),
        finish_reason="stop" if sample_id % 2 else "length",
        num_prompt_tokens=7,
        num_draft_free_forwards=length + 2,
        stats=SampleStats(num_forwards=length + 1, num_drafted=drafted, num_accepted=1),
    )


def changed(outcome: Outcome, text: str) -> Outcome:
    return replace(outcome, text=text)
