"""Rows whose activations overflow are errors, and nothing else of a job changes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.parts import compact
from spot_batch.models import numerics
from spot_batch.models.block import BlockTarget
from spot_batch.models.numerics import Numerics, measure_numerics
from spot_batch.service.assemble import model_info
from tests.service.jobs import prompts
from tests.service.test_actor import acting, collect, lease, make_job

MARK = "~"
BAD = (1, 4, 9)


def overflowing(job: JobDirectory) -> None:
    """Decode a job's rows in an actor."""
    with acting(job) as actor:
        collect(actor, 12, lease(range(12)))
    compact(job, 0)


def table(path: Path) -> list[dict[str, object]]:
    with pa.OSFile(str(path)) as source:
        rows: list[dict[str, object]] = pa.ipc.open_file(source).read_all().to_pylist()
    return rows


def with_marks(
    rows: Sequence[Mapping[str, object]], bad: Container[int]
) -> list[Mapping[str, object]]:
    """The rows, of which some hold the token that overflows."""
    return [
        {**row, "question": f"{row['question']} {MARK}"} if at in bad else row
        for at, row in enumerate(rows)
    ]


def poison_the_mark(monkeypatch: pytest.MonkeyPatch, job: JobDirectory) -> None:
    """Once a target has passed its probe, the embedding of one token is not finite."""
    mark = load_tokenizer(model_info(job.spec).path)(MARK, add_special_tokens=False)

    def measured(target: BlockTarget) -> Numerics:
        found = measure_numerics(target)
        embedding = target.body.network.model.embed_tokens
        assert isinstance(embedding, torch.nn.Embedding)
        embedding.weight[mark["input_ids"][-1]] = torch.nan
        return found

    monkeypatch.setattr(numerics, "measure_numerics", measured)


def test_rows_that_overflow_are_the_same_errors_beside_the_same_rows_at_every_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = prompts(12)
    marked = with_marks(rows, BAD)
    settings: list[Mapping[str, object]] = [
        {"engine.max_sequences": 1, "speculation.budget": 0},
        {"engine.max_sequences": 5, "speculation.budget": 4},
    ]
    jobs = [make_job(tmp_path / str(at), marked, given) for at, given in enumerate(settings)]
    poison_the_mark(monkeypatch, jobs[0])
    for job in jobs:
        overflowing(job)
    names = [job.part_name(0) for job in jobs]
    data, others = ((job.data / name).read_bytes() for job, name in zip(jobs, names, strict=True))
    assert data == others
    errors, same = (table(job.errors / name) for job, name in zip(jobs, names, strict=True))
    assert errors == same
    assert [error["row_index"] for error in errors] == list(BAD)
    assert all("not_finite" in str(error) and "position" in str(error) for error in errors)
    sound = make_job(tmp_path / "sound", rows)
    monkeypatch.setattr(numerics, "measure_numerics", measure_numerics)
    overflowing(sound)
    whole = {row["row_index"]: row["generation"] for row in table(sound.data / sound.part_name(0))}
    for row in table(jobs[0].data / names[0]):
        assert row["generation"] == whole[row["row_index"]], "a neighbour was changed"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_300_rows_of_which_5_overflow_are_the_same_at_every_budget_and_number_of_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (0, 77, 150, 255, 299)
    marked = with_marks(prompts(300), bad)
    found = set()
    for at, (budget, num_actors) in enumerate(((0, 1), (8, 2), ("auto", 3))):
        job = make_job(tmp_path / str(at), marked, {"speculation.budget": budget})
        poison_the_mark(monkeypatch, job)
        with ExitStack() as stack:
            actors = [stack.enter_context(acting(job, index)) for index in range(num_actors)]
            for index, actor in enumerate(actors):
                actor.exchange([lease(range(index, 300, num_actors))], 0.0)
            for index, actor in enumerate(actors):
                collect(actor, len(range(index, 300, num_actors)), timeout_s=250.0)
        for part in range(job.num_parts):
            compact(job, part)
        names = [job.part_name(part) for part in range(job.num_parts)]
        errors = [row for name in names for row in table(job.errors / name)]
        assert [row["row_index"] for row in errors] == list(bad)
        assert {row["code"] for row in errors} == {"not_finite"}
        found.add((str(errors), *((job.data / name).read_bytes() for name in names)))
    assert len(found) == 1
