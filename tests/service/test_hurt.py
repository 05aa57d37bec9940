"""Rows that hurt, through a whole job: the real driver, actor and store, and a stand-in engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spot_batch
from spot_batch.inputs.errors import InputError
from spot_batch.job.spec import SpecError
from spot_batch.jobdir.creation import create_or_open
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.results.export import ExportSpec, export
from spot_batch.service.plan import plan_job
from spot_batch.service.progress import Exit
from tests.inputs.test_requests import request
from tests.jobdir.jobs import write_jsonl
from tests.service.jobs import small_spec
from tests.service.pool import drive

GOOD = {
    "plain": "How much is 1 + 1?",
    "PLAIN": "ids may differ in case only",
    "nul": "a\0b",
    "emoji": "👩‍🚀 and 😀?",
    "right to left": "كم يساوي واحد زائد واحد؟ \u202eabc",
    "special": "<mask> <|endoftext|> stay text",
}
HURT: dict[str, Any] = {
    "input.custom_id": "id",
    "output.prefix": "spot_",
    "output.rows_per_part": 4,
    "failure.max_error_fraction": 1.0,
    "equivalence.audit_fraction": 0,  # 10 MB of tokens take seconds: once is enough
    "equivalence.min_rows": 0,
}


def begin(out: Path, source: Path, overrides: dict[str, Any]) -> JobDirectory:
    plan = plan_job(small_spec(source, overrides), out)
    return create_or_open(
        out, plan.spec, fingerprint=plan.fingerprint, fields=plan.fields, pinned=plan.pinned
    )


def write_hurtful(folder: Path, num_bytes: int) -> Path:
    """A folder of two files; what hurts by its size or its form is in the first."""
    folder.mkdir()
    wide = {f"c{i}": i for i in range(2_000)}
    rows: list[dict[str, Any]] = [
        {"id": name, "prompt": text, "nested": None} for name, text in GOOD.items()
    ]
    rows[0] |= {"generation": "theirs", "int": 2**63 - 1, "float": math.nan, **wide}
    rows[1] |= {"int": -(2**63), "float": math.inf}
    lines = [json.dumps(row) for row in rows]
    lines += ['{"id": "empty", "prompt": ""}', '{"id": "half", "prompt": "\\ud83d"}']
    lines += [
        '{"id": "cut", "prompt": "x',
        json.dumps({"id": "long", "prompt": "long! " * (num_bytes // 6)}),
    ]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    later = {"id": "later", "prompt": "2 + 2?", "nested": {"x": {"y": [1, None]}}}
    write_jsonl(folder / "b.jsonl", [later])
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobDirectory:
    folder = tmp_path_factory.mktemp("hurt")
    job = begin(folder / "out", write_hurtful(folder / "in", 10 * 2**20), HURT)
    assert drive(job.root, timeout_s=200.0) == Exit.COMPLETE
    return job


def test_rows_that_hurt_are_completed_or_are_errors_that_name_them(job: JobDirectory) -> None:
    loaded = spot_batch.load(job.root)
    rows = {row["spot_custom_id"]: row for row in loaded}
    assert list(rows) == [*GOOD, "later"]
    assert {name: rows[name]["prompt"] for name in GOOD} == GOOD
    assert all(row["spot_generation"] is not None for row in rows.values())
    first = rows["plain"]
    assert (first["generation"], first["int"], first["c1999"]) == ("theirs", 2**63 - 1, 1_999)
    assert math.isnan(first["float"])
    assert (rows["PLAIN"]["int"], rows["PLAIN"]["float"]) == (-(2**63), math.inf)
    assert first["nested"] is None
    assert rows["later"]["nested"] == {"x": {"y": [1, None]}}
    errors = [
        (row["custom_id"], row["code"], row["message"].partition(":")[0])
        for row in spot_batch.load(job.root, "errors")
    ]
    assert errors == [
        ("empty", "empty_prompt", "a.jsonl line 7"),
        ("half", "bad_encoding", "a.jsonl line 8"),
        (None, "bad_json", "a.jsonl line 9"),
        ("long", "too_long", "a.jsonl line 10"),
    ]


def test_what_was_made_of_them_is_exported_in_every_form(job: JobDirectory, tmp_path: Path) -> None:
    names = [*GOOD, "later"]
    export(job, tmp_path / "x.parquet", ExportSpec(format="parquet"))
    table = pq.read_table(tmp_path / "x.parquet")
    assert table["spot_custom_id"].to_pylist() == names
    assert table["prompt"].to_pylist()[: len(GOOD)] == list(GOOD.values())
    export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl"))
    text = (tmp_path / "x.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    assert [row["prompt"] for row in rows][: len(GOOD)] == list(GOOD.values())
    assert (rows[0]["float"], rows[0]["int"]) == (None, 2**63 - 1)
    export(job, tmp_path / "saved", ExportSpec(format="hf"))
    assert datasets.load_from_disk(str(tmp_path / "saved"))["spot_custom_id"] == names
    export(job, tmp_path / "x.arrows", ExportSpec(format="arrow-stream"))
    with pa.ipc.open_stream(tmp_path / "x.arrows") as reader:
        assert reader.read_all()["nested"].to_pylist()[-1] == {"x": {"y": [1, None]}}
    spec = ExportSpec(format="jsonl", form="messages", where='"right to left" is null')
    with pytest.raises(ValueError, match=r'--where: .*column "right to left" not found'):
        export(job, tmp_path / "m.jsonl", spec)


def test_what_no_job_can_be_made_of_is_refused_and_named(tmp_path: Path) -> None:
    hurtful = write_hurtful(tmp_path / "in", 100)
    with pytest.raises(InputError, match=r"3 rows cannot be read .*a\.jsonl line 8: bad_encoding"):
        begin(tmp_path / "out", _with_line(hurtful, "{"), {**HURT, "input.malformed": "refuse"})
    with pytest.raises(SpecError, match=r"'generation' is also a column .*set output\.prefix"):
        begin(tmp_path / "out", hurtful, {**HURT, "output.prefix": ""})
    again = json.dumps({"id": "plain", "prompt": "twice"})
    message = r"'plain' stands twice in column 'id': a\.jsonl line 1 and b\.jsonl line 3"
    with pytest.raises(InputError, match=message):
        begin(tmp_path / "out", _with_line(hurtful, again), HURT)


def _with_line(folder: Path, line: str) -> Path:
    with (folder / "b.jsonl").open("a") as file:
        file.write(line + "\n")
    return folder


def test_a_struct_that_one_file_of_a_table_lacks_is_null_there(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "nested": [None]}), folder / "a.parquet")
    nested = pa.array([{"x": {"y": [1]}}])
    pq.write_table(pa.table({"prompt": ["b"], "nested": nested}), folder / "b.parquet")
    job = begin(tmp_path / "out", folder, {})
    assert drive(job.root) == Exit.COMPLETE
    assert spot_batch.load(job.root)["nested"] == [None, {"x": {"y": [1]}}]


def test_a_batch_file_of_vllms_form_is_answered_request_by_request(tmp_path: Path) -> None:
    short = {"max_completion_tokens": 16}
    rows = [
        request("request-1", **short),
        request("request-2", **short),
        request("request-3", **short, tools=[{"type": "function"}]),
        request("request-4", max_completion_tokens=0),
    ]
    path = write_jsonl(tmp_path / "batch.jsonl", rows)
    path.write_text(path.read_text() + '{"custom_id": "request-5", "method"\n')
    job = begin(tmp_path / "out", path, {"failure.max_error_fraction": 1.0})
    assert job.spec.input.format == "openai-batch"
    assert drive(job.root) == Exit.COMPLETE
    assert export(job, tmp_path / "out.jsonl", ExportSpec(format="openai-batch")) == 5
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for answer, sent in zip(answers[:2], rows, strict=False):
        assert answer["custom_id"] == sent["custom_id"]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["role"] == "assistant"
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
        counts = body["usage"]
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    failed = [(each["custom_id"], each["error"]["code"]) for each in answers[2:]]
    assert failed == [
        ("request-3", "bad_request"),
        ("request-4", "bad_request"),
        (None, "bad_json"),
    ]
    assert "body.max_completion_tokens must be" in answers[3]["error"]["message"]
    assert all(each["response"] is None for each in answers[2:])
