from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spot_batch.inputs
from spot_batch.inputs.ids import audit_sample_ids, noise_key
from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.prepare import PreparedSample, SamplePreparer
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.render import PromptRenderer
from spot_batch.jobdir.parts import compact
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.results import ROW_CODES, Completion, RowError, SampleStats
from tests.inputs.tiny import tiny_tokenizer
from tests.jobdir.jobs import make_job, make_spec, write_jsonl


def preparer(path: Path, *, max_context: int = 512, **overrides: object) -> SamplePreparer:
    spec = make_spec(path, **overrides)
    pinned = pin_input(spec)
    renderer = PromptRenderer(
        spec, pinned, tiny_tokenizer(), max_context=max_context, block_length=32
    )
    return SamplePreparer(
        spec,
        pinned,
        InputReader(pinned),
        renderer,
        stop_ids=(1, 2),
        confidence="sampled_tempered",
    )


def prepare(
    path: Path, rows: list[object], ids: list[int], **overrides: object
) -> list[PreparedSample]:
    return preparer(write_jsonl(path, rows), **overrides).prepare(ids)  # type: ignore[arg-type]


def test_a_sample_is_its_row_and_its_place_among_the_rows_samples(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": f"p{i}", "id": f"r{i}"} for i in range(3)]
    made = prepare(
        tmp_path / "a.jsonl",
        rows,
        [4, 0, 5],
        generation__n=2,
        generation__seed=9,
        generation__max_new_tokens=40,
        input__custom_id="id",
    )
    assert [sample.custom_id for sample in made] == ["r2", "r0", "r2"]
    requests = [sample.request for sample in made]
    assert all(requests)
    first, _, third = requests
    assert first is not None
    assert third is not None
    assert first.prompt_ids == third.prompt_ids
    assert first.noise_key == noise_key(9, "r2", 0)
    assert third.noise_key == noise_key(9, "r2", 1)
    assert first.params.max_new_tokens == 40
    assert first.params.stop_ids == (1, 2)
    assert first.params.confidence == "sampled_tempered"
    assert made[0].rows["prompt"][made[0].position].as_py() == "p2"


def test_rows_override_what_the_spec_lets_them(tmp_path: Path) -> None:
    rows: list[object] = [
        {"prompt": "a", "temperature": 0, "seed": 5, "max_new_tokens": 7.0},
        {"prompt": "b", "temperature": 0.5, "seed": None, "max_new_tokens": None},
    ]
    columns = ["temperature", "seed", "max_new_tokens"]
    made = prepare(tmp_path / "a.jsonl", rows, [0, 1], generation__per_row=columns)
    first, second = (sample.request for sample in made)
    assert first is not None
    assert second is not None
    assert (first.params.temperature, first.params.max_new_tokens, made[0].seed) == (0.0, 7, 5)
    assert (second.params.temperature, second.params.max_new_tokens, made[1].seed) == (0.5, 256, 0)
    assert first.noise_key == noise_key(5, "0", 0)
    ignored = prepare(tmp_path / "b.jsonl", rows, [0])[0].request
    assert ignored is not None
    assert ignored.params.temperature == 1.0


def test_a_row_that_breaks_the_tokenizer_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in ("a", "poison", "b")])
    made = preparer(path)
    encode = PromptRenderer._ids

    def breaks(self: PromptRenderer, text: str) -> list[int]:
        if "poison" in text:
            raise OverflowError("no room")
        return encode(self, text)

    monkeypatch.setattr(PromptRenderer, "_ids", breaks)
    first, second, third = made.prepare([0, 1, 2])
    assert first.request is not None
    assert third.request is not None
    assert second.error is not None
    assert (second.error.code, second.error.message) == (
        "bad_prompt",
        "a.jsonl line 2: OverflowError: no room",
    )


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("temperature", -1, "column 'temperature' must be 0 or from 0.0001 to 10000, got -1"),
        (
            "temperature",
            1e300,
            "column 'temperature' must be 0 or from 0.0001 to 10000, got 1e+300",
        ),
        ("temperature", True, "column 'temperature' must be a number, got True"),
        ("temperature", "hot", "column 'temperature' must be a number, got 'hot'"),
        (
            "max_new_tokens",
            0,
            "column 'max_new_tokens' must be a whole number from 1 to 32768, got",
        ),
        ("max_new_tokens", 1.5, "column 'max_new_tokens' must be a whole number from 1 to 32768"),
        ("seed", -1, "column 'seed' must be a whole number from 0 to 18446744073709551615, got -1"),
    ],
)
def test_a_bad_override_is_a_fault_of_its_row(
    tmp_path: Path, column: str, value: object, words: str
) -> None:
    rows: list[object] = [{"prompt": "a", column: value}]
    (sample,) = prepare(tmp_path / "a.jsonl", rows, [0], generation__per_row=[column])
    assert sample.request is None
    assert sample.error is not None
    assert sample.error.code == "bad_override"
    assert sample.error.message.startswith(f"a.jsonl line 1: {words}")


def test_faults_name_file_and_line_and_keep_what_was_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"prompt": "fine", "id": "x"}\n{"prompt": "", "id": "y"}\n{"prompt"\n'
        b'{"prompt": "no id", "id": null}\n{"prompt": "' + b"long " * 600 + b'", "id": "z"}\n'
    )
    made = preparer(tmp_path / "a.jsonl", input__custom_id="id").prepare(range(5))
    errors = [sample.error for sample in made]
    assert errors[0] is None
    found = [(error.code, error.stage, error.message) for error in errors if error is not None]
    assert found[0] == ("empty_prompt", "prompt", "a.jsonl line 2: column 'prompt' is empty")
    assert found[1][:2] == ("bad_json", "input")
    assert found[1][2].startswith("a.jsonl line 3: not JSON: Expecting ':' delimiter")
    assert found[2] == ("bad_custom_id", "prompt", "a.jsonl line 4: column 'id' is empty")
    assert found[3][:2] == ("too_long", "prompt")
    assert [sample.custom_id for sample in made] == ["x", "y", None, None, "z"]
    assert made[2].prompt_text == '{"prompt"'
    assert made[4].prompt_text.startswith("long long")


def test_audits_ask_for_no_drafts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (sample,) = preparer(path).prepare([0], draft_free=True)
    assert sample.request is not None
    assert sample.request.draft_free


def test_prepared_samples_become_rows_with_their_input_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tag": {"x": [1]}}, {"prompt": "", "tag": None}, {"prompt": "c"}]
    job = make_job(tmp_path, rows, output__include=["rendered_prompt", "usage"])
    renderer = PromptRenderer(
        job.spec, job.pinned, tiny_tokenizer(), max_context=512, block_length=32
    )
    reader = InputReader(job.pinned)
    made = SamplePreparer(
        job.spec, job.pinned, reader, renderer, stop_ids=(), confidence="sampled"
    ).prepare([2, 1, 0])
    done = Completion(
        sample_id=0,
        token_ids=(1, 2),
        commit_step=(1, 0),
        finish_reason="stop",
        num_prompt_tokens=3,
        num_draft_free_forwards=2,
        stats=SampleStats(),
    )
    outcomes = [
        sample.outcome(sample.error)
        if isinstance(sample.error, RowError)
        else sample.outcome(replace(done, sample_id=sample.sample_id), "text")
        for sample in made
    ]
    publish_segment(job, outcomes)
    part = compact(job, 0)
    with pa.ipc.open_file(job.data / part.name) as file:
        data = file.read_all().to_pylist()
    assert [row["tag"] for row in data] == [{"x": [1]}, None]
    assert data[0]["rendered_prompt"].startswith("<|im_start|>user\na<|im_end|>")
    assert data[1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "draft_free_forwards": 2,
    }
    with pa.ipc.open_file(job.errors / part.name) as file:
        (error,) = file.read_all().to_pylist()
    assert error["message"] == "rows.jsonl line 2: column 'prompt' is empty"
    assert (error["row_index"], error["attempts"]) == (1, 1)


@given(st.integers(0, 2**64 - 1), st.text(), st.integers(0, 1_000))
def test_a_noise_key_is_64_bits_and_moves_with_each_of_its_parts(
    seed: int, custom_id: str, index: int
) -> None:
    custom_id = custom_id.encode("utf-8", "replace").decode()
    key = noise_key(seed, custom_id, index)
    assert 0 <= key < 2**64
    others = {
        noise_key((seed + 1) % 2**64, custom_id, index),
        noise_key(seed, custom_id + "x", index),
        noise_key(seed, custom_id, index + 1),
    }
    assert key not in others
    assert len(others) == 3


def test_noise_keys_never_change_between_versions() -> None:
    assert noise_key(0, "0", 0) == NOISE_KEY_OF_ZERO
    assert noise_key(2**64 - 1, "é", 7) == NOISE_KEY_OF_MUCH


NOISE_KEY_OF_ZERO = 8178626787187923256
NOISE_KEY_OF_MUCH = 16356627304590562487


def test_audits_are_chosen_by_hash() -> None:
    def chosen(count: int, **options: object) -> tuple[int, ...]:
        given = {"fraction": 0.01, "min_rows": 8, "fingerprint": "f" * 64, **options}
        return audit_sample_ids(count, **given)  # type: ignore[arg-type]

    assert len(chosen(64)) == 8
    assert len(chosen(5_000)) == 50
    assert chosen(3) == (0, 1, 2)
    assert chosen(0) == ()
    assert chosen(100, fraction=0.0) == ()
    assert chosen(5_000) == chosen(5_000) != chosen(5_000, fingerprint="e" * 64)
    assert set(chosen(5_000)) != set(range(50))
    first = chosen(64)
    others = chosen(64, passed_over=set(first[:3]))
    assert len(others) == 8
    assert set(first[3:]) < set(others)
    assert chosen(3, passed_over={0, 1, 2}) == ()


@pytest.mark.parametrize(
    ("line", "custom_id", "code"),
    [
        ('{"id": "mine", "prompt": 5}', "mine", "bad_type"),
        ('{"id": "mine", "prompt": "\\ud800"}', "mine", "bad_encoding"),
        ('{"id": "mine", "prompt": ""}', "mine", "empty_prompt"),
        ('{"id": "mine", "prompt": "x", "top_p": 7}', "mine", "bad_override"),
        ('{"id": 17, "prompt": "x"}', "17", "bad_type"),
        ('{"id": "\\ud800", "prompt": "x"}', None, "bad_encoding"),
        ('{"id": "", "prompt": "x"}', None, "bad_custom_id"),
        ('{"id": "mine", "prompt"', None, "bad_json"),
    ],
)
def test_an_error_row_has_its_own_id_or_none(
    tmp_path: Path, line: str, custom_id: str | None, code: str
) -> None:
    """The row's number would be the id of the row that is really named 1."""
    good = '{"id": "1", "prompt": "p", "top_p": 0.5}\n'
    (tmp_path / "a.jsonl").write_text(good + line + "\n")
    spec = {"input__custom_id": "id", "generation__per_row": ["top_p"]}
    made = preparer(tmp_path / "a.jsonl", **spec).prepare([0, 1])  # type: ignore[arg-type]
    assert made[1].error is not None
    assert [made[0].custom_id, made[1].custom_id, made[1].error.code] == ["1", custom_id, code]
    (tmp_path / "b.jsonl").write_text(good + line + "\n")
    (numbered,) = preparer(tmp_path / "b.jsonl").prepare([1])
    assert numbered.custom_id == "1", "no column of ids: the number is the id"


def test_an_error_row_of_a_table_has_its_own_id(tmp_path: Path) -> None:
    text = pa.array([b"good", b"bad \xff"], pa.binary()).view(pa.string())
    ids = pa.array([b"a", b"b"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "id": ids}), tmp_path / "a.parquet")
    made = preparer(tmp_path / "a.parquet", input__custom_id="id").prepare([0, 1])
    assert made[1].error is not None
    assert [made[0].custom_id, made[1].custom_id] == ["a", "b"]
    assert made[1].error.code == "bad_encoding"


def test_every_fault_of_a_row_is_known_as_one_that_no_retry_mends() -> None:
    """`retry` goes by the code alone."""
    folder = Path(spot_batch.inputs.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    codes = re.findall(r'(?:RowFault\(|failed\(|code=|_CODE = |_BAD_OVERRIDE = )\s*"(\w+)"', text)
    of_the_engine = {"not_finite"}
    assert set(codes) == ROW_CODES - of_the_engine
