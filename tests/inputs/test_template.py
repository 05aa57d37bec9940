"""Prompts out of several columns, and templates and rows that do not fit each other."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.pin import pin_input
from spot_batch.inputs.reader import InputReader
from spot_batch.inputs.template import PromptTemplate, with_template
from spot_batch.inputs.template_process import TemplateProcess
from spot_batch.job.fingerprint import fingerprint
from spot_batch.job.spec import SpecError
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.input import PinnedInput
from spot_batch.results.export import ExportSpec, export
from tests.inputs.test_prepare import prepare
from tests.jobdir.jobs import make_job, make_outcomes, make_spec, write_jsonl
from tests.results.test_export import lines

ROWS = [
    {"id": "a", "q": "Why?", "facts": ["x", "y"], "deep": {"n": 1}},
    {"id": "b", "q": "{{ id }}", "facts": [], "deep": {"n": None}},
    {"id": "c", "q": None, "facts": None, "deep": None},
]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ q }} {{ facts | join(', ') }}", "Why? x, y"),
        ("{% for each in facts %}{{ loop.index }}{{ each }}{% endfor %}", "1x2y"),
        ("{% if q is none %}-{% else %}{{ deep.n + 1 }}{% endif %}", "2"),
        ("{{ row['q'] }}/{{ row.id }}", "Why?/a"),
        ("{{ q | default('nothing', true) }}", "Why?"),
    ],
)
def test_a_template_makes_the_text_of_a_row(template: str, text: str) -> None:
    assert PromptTemplate(template).render(ROWS[0]) == text


def test_text_of_a_row_is_no_template_and_a_null_no_text(tmp_path: Path) -> None:
    rows: list[object] = [*ROWS]
    template = "Say {{ q }}{% if facts %}!{% endif %}"
    made = prepare(tmp_path / "a.jsonl", rows, [0, 1, 2], input__template=template)
    assert "Say Why?!" in made[0].prompt_text
    assert "Say {{ id }}" in made[1].prompt_text
    error = made[2].error
    assert error is not None
    assert (error.code, error.stage) == ("bad_prompt", "prompt")
    assert error.message == "a.jsonl line 3: input.template: column 'q' is null"
    others = "{{ facts | default('none', true) }} {{ q | default('', true) }} {{ 'x' }}"
    assert PromptTemplate(others).render(ROWS[2]) == "none  x"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ deep.n }}", "writes a null"),
        ("{{ deep.missing }}", "has no attribute 'missing'"),
        ("{{ q.upper }}", "writes no text but builtin_function_or_method"),
        ("{{ facts | map('upper') }}", "writes no text but generator"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ facts.append(1) }}", "unsafe|not safely callable"),
        ("{{ q.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_what_a_row_cannot_be_made_into_is_a_fault_of_the_row(
    tmp_path: Path, template: str, message: str
) -> None:
    (made,) = prepare(tmp_path / "a.jsonl", [*ROWS], [1], input__template=template)
    assert made.error is not None
    assert made.error.code == "bad_prompt"
    assert any(part in made.error.message for part in message.split("|"))


def test_a_value_too_large_for_the_machine_is_a_fault_of_the_row(tmp_path: Path) -> None:
    (made,) = prepare(tmp_path / "a.jsonl", [*ROWS], [0], input__template="{{ q * 10**13 }}")
    assert made.error is not None
    assert made.error.code == "bad_prompt"
    assert made.error.message.endswith("input.template: makes a value too large")


def test_a_prompt_without_end_is_a_fault_of_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spot_batch.inputs.template.MOST_CHARS", 1_000)
    template = PromptTemplate("{% for i in range(2000) %}{{ q }}{% endfor %}")
    with pytest.raises(RowFault, match="over 1,000 characters"):
        template.render(ROWS[0])


def test_a_row_that_never_ends_is_one_error_and_the_next_is_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spot_batch.inputs.template_process.PATIENCE_S", 1.0)
    loops = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    template = TemplateProcess(loops)
    for _ in range(2):
        with pytest.raises(RowFault, match=r"input\.template: takes over 1 s") as caught:
            template.render({"n": 99_999})
        assert caught.value.code == "bad_prompt"
        assert template.render({"n": 3}) == "3"


def test_values_of_all_kinds_reach_a_template_and_too_large_ones_do_not() -> None:
    template = TemplateProcess("{{ a }} {{ b | length }} {{ c }} {{ d.e | center(w) | length }}")
    row = {"a": Decimal("1.50"), "b": b"\x00\xff", "c": date(2026, 11, 30), "d": {"e": "\ud800\n"}}
    assert template.render({**row, "w": 9}) == "1.50 2 2026-11-30 9"
    assert TemplateProcess("{{ e }}").render({"e": "\ud800\n"}) == "\ud800\n"
    with pytest.raises(RowFault, match="makes a value too large"):
        template.render({**row, "w": 3_000_000_000})
    assert template.render({**row, "w": 4}) == "1.50 2 2026-11-30 4"


def test_a_process_that_is_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = TemplateProcess("{{ q }}")
    assert template.render(ROWS[0]) == "Why?"
    assert template._running is not None
    template._running.process.kill()
    assert template.render(ROWS[0]) == "Why?"
    start = template._start

    def broken() -> object:
        running = start()
        running.process.kill()
        running.process.join()
        return running

    template._end()
    monkeypatch.setattr(template, "_start", broken)
    with pytest.raises(RowFault, match="ends the process that renders it"):
        template.render(ROWS[0])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ question }}", "no column 'question' in a.jsonl; its columns: 'id', 'q'"),
        ("{{ q }", "input.template: line 1: "),
        ("{% include 'secret' %}", "include, import and extends are not read"),
        ("{{ q | random }}", "No filter named 'random'"),
        ("{{ self }}", r"self is Jinja's own word; a column: row\['self'\]"),
        ("{{ lipsum() }}", "no column 'lipsum'"),
        ("prompts/mine.jinja", "neither a template .* nor a file that can be read"),
    ],
)
def test_what_fits_no_row_is_refused_before_a_job(
    tmp_path: Path, template: str, message: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(InputError, match=message):
        pin_input(with_template(make_spec(path, input__template=template)))


def test_a_template_excludes_a_prompt_column_and_requests() -> None:
    for other in ({"input__prompt": "q"}, {"input__messages": "m"}):
        with pytest.raises(SpecError, match=r"input\.template excludes input\.messages"):
            make_spec("x.jsonl", input__template="{{ q }}", **other)
    with pytest.raises(SpecError, match="not for openai-batch"):
        make_spec("x.jsonl", input__template="{{ q }}", input__format="openai-batch")


def test_the_text_of_a_file_is_what_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    file = tmp_path / "mine.jinja"
    file.write_text("Say {{ q }}\n")
    spec = with_template(make_spec(path, input__template=str(file)))
    assert spec.input.template == "Say {{ q }}\n"
    marks = {
        fingerprint(make_spec(path, **given), pin_input(make_spec(path, **given)).identity, {})[0]
        for given in (
            {"input__template": "Say {{ q }}"},
            {"input__template": "Tell {{ q }}"},
            {"input__prompt": "q"},
        )
    }
    assert len(marks) == 3
    file.write_text("the same for all\n")
    with pytest.raises(InputError, match="every prompt is the same"):
        with_template(make_spec(path, input__template=str(file)))


def test_only_the_columns_that_are_named_are_read(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x", "odd name": 2, "spoilt": 1}, {"a": 2, "b": "y", "spoilt": "no"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    def pinned(template: str) -> PinnedInput:
        return pin_input(make_spec(path, input__template=template, input__keep=["b"]))

    read = pinned("{{ a }}")
    assert (read.prompt_columns, InputReader(read).schema.names) == (("a",), ["a", "b"])
    assert read.num_faults == 0
    whole = pinned("{{ row['odd name'] }}")
    assert whole.prompt_columns == ("a", "b", "odd name", "spoilt")
    assert whole.num_faults == 1, "a column of another type in this row"


def test_columns_of_any_name_are_read_through_row(tmp_path: Path) -> None:
    names = ["self", "args", "context", "loop", "not", "a b", "range", "environment"]
    table = pa.table({name: [f"<{name}>"] for name in names})
    template = "".join(f"{{{{ row['{name}'] }}}}" for name in names)
    job = make_job(tmp_path, table, input__template=template + "{{ context }}{{ range }}")
    publish_segment(job, make_outcomes(job, [0]))
    finalize(job, check=None, facts=None)
    export(job, tmp_path / "x.jsonl", ExportSpec(format="jsonl", form="prompt-completion"))
    (row,) = lines(tmp_path / "x.jsonl")
    assert row["prompt"] == "".join(f"<{name}>" for name in names) + "<context><range>"
