from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import spot_batch
from spot_batch.job.fingerprint import diff_fields, fingerprint, fingerprint_fields
from spot_batch.job.reading import (
    check_spec,
    dump_spec,
    load_spec,
    parse_override,
    with_model_defaults,
)
from spot_batch.job.secrets import redacted
from spot_batch.job.spec import JobSpec, SpecError

INPUT_IDENTITY = {"digest": "d", "num_rows": 3, "prompt_column": "prompt"}
MODEL_IDENTITY = {"weights": "w"}


def spec(**overrides: object) -> JobSpec:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_spec(None, {"input.source": "prompts.jsonl", **given})


def mark(job: JobSpec) -> str:
    return fingerprint(job, INPUT_IDENTITY, MODEL_IDENTITY)[0]


def complaint(**overrides: object) -> str:
    with pytest.raises(SpecError) as caught:
        spec(**overrides)
    return str(caught.value)


def test_a_source_is_all_that_a_spec_needs() -> None:
    job = spec()
    assert job.input.source == ("prompts.jsonl",)
    assert job.model.target.path == "bundled"
    assert job.resources.cpu_threads == 1


def test_a_spec_without_a_source_says_what_is_missing() -> None:
    with pytest.raises(SpecError, match=r"input\.source: missing"):
        load_spec(None)


def test_the_yaml_that_a_spec_is_written_as_reads_back_as_the_same_spec(tmp_path: Path) -> None:
    job = with_model_defaults(
        spec(
            generation__stop=["\n\n", "é"],
            model__drafter="ranking",
            speculation__budget=0,
            generation__per_row=["seed"],
            input__keep=["a", "b"],
        )
    )
    path = tmp_path / "job.yaml"
    path.write_text(dump_spec(job))
    assert load_spec(path) == job


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    assert complaint(generation__temprature=1) == (
        "generation.temprature: unknown key; did you mean generation.temperature?"
    )
    assert complaint(temperature=1) == (
        "temperature: unknown key; did you mean generation.temperature?"
    )
    assert complaint(max_tokens=1) == (
        "max_tokens: unknown key; did you mean generation.max_new_tokens?"
    )
    assert "known here: max_sequences" in complaint(engine__qqq=1)


def test_a_key_of_a_later_version_is_refused_and_not_ignored() -> None:
    assert "output.rename: not supported by this version" in complaint(output__rename={})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("generation__n", 0, "generation.n: must be greater than or equal to 1, got 0"),
        ("generation__n", True, "generation.n: must be a number, got true"),
        ("generation__temperature", -1, "must be 0 or from 0.0001 to 10000, got -1"),
        ("generation__temperature", 1e39, "must be 0 or from 0.0001 to 10000, got 1e+39"),
        ("generation__temperature", 1e-38, "must be 0 or from 0.0001 to 10000, got 1e-38"),
        ("generation__temperature", float("nan"), "must be 0 or from 0.0001 to 10000, got nan"),
        ("generation__top_p", 1e-13, "generation.top_p: must be greater than or equal to 0.000001"),
        ("generation__top_k", 2**63, "generation.top_k: must be less than or equal"),
        ("generation__threshold", 0, "generation.threshold: must be greater than 0"),
        ("generation__temperature", "hot", "generation.temperature: must be a valid number"),
        (
            "generation__top_p",
            0,
            "generation.top_p: must be greater than or equal to 0.000001, got 0",
        ),
        ("generation__max_new_tokens", 40_000, "generation.max_new_tokens: must be less than"),
        ("generation__per_row", ["top_k"], "generation.per_row[0]: must be 'temperature', 'top_p'"),
        ("generation__stop", [""], "generation.stop: an empty stop text"),
        ("generation__seed", -1, "generation.seed: must be greater than or equal to 0"),
        ("speculation__budget", "some", "speculation.budget: must be auto or a whole number"),
        ("resources__actors", 0, "resources.actors: must be auto or a whole number of at least 1"),
        ("resources__actors", 1.5, "resources.actors: must be auto or a whole number"),
        ("model__target__dtype", "int3", "model.target.dtype: must be 'auto', 'float32'"),
        ("model__drafter", {"kind": "ranking", "path": "x"}, "model.drafter: kind ranking takes"),
        ("input__keep", 3, "input.keep: must be all or a list of column names, got 3"),
        ("input__source", [], "input: source must name at least one file"),
        ("input__source", "https://me:secret@host/x", "input.source: must not hold a credential"),
        ("output__path", "x.arrow", "output.path: must be a folder, or one .jsonl"),
        ("output__path", "zip://a::s3://bucket/x", "output.path: must be a folder or one URL"),
        ("output__path", "file:///data/x", "output.path: must be a folder's own path or"),
        ("output__path", "memory://x", "output.path: must be a folder's own path or the URL of a"),
        ("output__path", "s3://bucket/x.jsonl", "output.path: must be a job directory where it is"),
        ("output__prefix", "__spot_x", "output.prefix: names that start with __spot_"),
        ("name", "a/b", "name: String should match pattern"),
        ("generation", 5, "generation: must be a section"),
        ("version", 2, "version: must be 1, got 2"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key: str, value: object, message: str) -> None:
    assert message in complaint(**{key: value})


def test_a_complaint_about_a_password_does_not_repeat_it() -> None:
    assert "secret" not in complaint(input__source="https://me:secret@host/x")


@pytest.mark.parametrize("key", ["model__target__path", "input__system", "generation__stop"])
@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://user:s3cret@host/m", "a user or password"),
        ("https://user:s3cret#?@host/m", "a user or password"),
        ("https://s3cret@host/m", "a user or password"),
        ("https://host/x?a=1&token=s3cret", "token="),
        ("https://host/x?X-Amz-Signature=s3cret", "X-Amz-Signature="),
        ("https://host/x?api_key=s3cret", "api_key="),
        ("s3://host/x?AWSAccessKeyId=s3cret", "AWSAccessKeyId="),
        ("https://host/x#password=s3cret", "password="),
        ("https://host/x?sig=s3cret'quoted", "sig="),
    ],
)
def test_a_credential_anywhere_is_refused_by_its_key_and_not_repeated(
    key: str, url: str, kind: str
) -> None:
    said = complaint(**{key: url})
    assert key.replace("__", ".") + ": must not hold a credential" in said
    assert kind in said
    assert "s3cret" not in said
    shown = redacted(f"got {url!r}, and more")
    assert "s3cret" not in shown
    assert "quoted" not in shown
    assert shown.endswith("and more")


@pytest.mark.parametrize(
    "harmless",
    [
        "https://host:8080/a@b",
        "https://host/x?monkey=1&max_tokens=5&design=2",
        "C:/Users@home",
        "what token=1 means",
        "file:///data/a@b.jsonl",
        "me@host.org",
    ],
)
def test_what_is_no_credential_is_taken_and_shown_as_it_is(harmless: str) -> None:
    assert spec(input__system=harmless).input.system == harmless
    assert redacted(harmless) == harmless


@pytest.mark.parametrize(
    "text",
    [
        "input: &a {source: q.jsonl, extra: *a}",
        "input: " + "{a: " * 3_000 + "1" + "}" * 3_000,
        "input: " + "[" * 3_000 + "]" * 3_000,
    ],
)
def test_a_spec_without_a_bottom_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="nested too deeply, or holds itself"):
        load_spec(path)


def test_an_override_without_a_bottom_is_refused() -> None:
    with pytest.raises(SpecError, match=r"input\.source: nested too deeply"):
        parse_override("input.source=" + "[" * 3_000)
    with pytest.raises(SpecError, match="holds itself"):
        spec(**dict([parse_override("input__extra=&a {b: *a}")]))


def test_messages_and_prompt_exclude_each_other() -> None:
    assert "exclude each other" in complaint(input__messages="a", input__prompt="b")


def test_overrides_win_over_the_file_whatever_the_alias(tmp_path: Path) -> None:
    path = tmp_path / "a job.yaml"
    path.write_text("input: {source: a.jsonl}\nmodel: bundled\ngeneration: {max_new_tokens: 9}\n")
    job = load_spec(
        path, {"generation.max_tokens": 5, "model.target.dtype": "float32", "input.limit": 2}
    )
    assert job.generation.max_new_tokens == 5
    assert job.model.target.path == "bundled"
    assert job.model.target.dtype == "float32"
    assert job.name == "a-job"


def test_naming_another_model_keeps_the_drafter_that_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("input: {source: a}\nmodel: {target: x, drafter: none}\n")
    job = load_spec(path, {"model": "bundled"})
    assert (job.model.target.path, job.model.drafter.kind) == ("bundled", "none")


def test_a_field_given_under_two_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("input: {source: a}\ngeneration: {max_tokens: 1, max_new_tokens: 2}\n")
    with pytest.raises(SpecError, match="max_new_tokens is given twice"):
        load_spec(path)


def test_a_key_that_stands_twice_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("input: {source: a}\nname: x\nname: y\n")
    with pytest.raises(SpecError, match="line 3: the key 'name' stands twice"):
        load_spec(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "a spec is a mapping"),
        ("a: [", "not YAML"),
        ("input: {source: a}\nx: 1", "x: unk"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_spec(path)


def test_a_spec_file_that_is_missing_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nope\.yaml: no such spec file"):
        load_spec(tmp_path / "nope.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"bad\.yaml: not UTF-8"):
        load_spec(tmp_path / "bad.yaml")


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(SpecError, match=r"generation\.n is 3, which has no keys"):
        load_spec(None, {"input.source": "a", "generation.n": 3, "generation.n.x": 1})


def test_set_reads_values_as_yaml_does() -> None:
    assert parse_override("speculation.budget=0") == ("speculation.budget", 0)
    assert parse_override("generation.stop=[a, b]") == ("generation.stop", ["a", "b"])
    assert parse_override("generation.temperature=1e-3")[1] == "1e-3"
    assert spec(generation__temperature="1e-3").generation.temperature == 1e-3
    with pytest.raises(SpecError, match="wants key=value"):
        parse_override("speculation.budget")


def test_short_forms_mean_the_long_ones() -> None:
    job = spec(model={"target": "x/y", "drafter": "d/r"}, generation__stop="END")
    assert job.model.target.path == "x/y"
    assert (job.model.drafter.kind, job.model.drafter.path) == ("auto", "d/r")
    assert job.generation.stop == ("END",)
    assert spec(generation__top_k=-1).generation.top_k == 0


def test_open_sampling_fields_are_taken_from_the_checkpoint_then_from_the_rule() -> None:
    taken = with_model_defaults(spec(), temperature=0.7, top_k=20).generation
    assert (taken.temperature, taken.top_p, taken.top_k) == (0.7, 1.0, 20)
    given = with_model_defaults(spec(generation__temperature=0), temperature=0.7).generation
    assert given.temperature == 0.0
    assert with_model_defaults(spec()).generation.temperature == 1.0


def test_an_open_threshold_is_taken_from_the_family_and_a_given_one_is_kept() -> None:
    assert spec().generation.threshold is None
    assert with_model_defaults(spec(), threshold=0.95).generation.threshold == 0.95
    given = with_model_defaults(spec(generation__threshold=0.7), threshold=0.95).generation
    assert given.threshold == 0.7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model__drafter", "none"),
        ("speculation__budget", 0),
        ("speculation__gamma", 0.1),
        ("speculation__crossing", False),
        ("resources__actors", 7),
        ("engine__max_sequences", 3),
        ("scheduling__publish_seconds", 1),
        ("failure__row_attempts", 9),
        ("equivalence__audit_fraction", 0.5),
        ("output__path", "elsewhere"),
        ("output__license", "mit"),
        ("input__source", "moved/prompts.jsonl"),
        ("name", "other"),
    ],
)
def test_what_cannot_change_the_output_leaves_the_fingerprint(key: str, value: object) -> None:
    assert mark(spec(**{key: value})) == mark(spec())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generation__seed", 1),
        ("generation__n", 2),
        ("generation__temperature", 0.5),
        ("generation__stop", ["x"]),
        ("generation__max_new_tokens", 8),
        ("generation__advanced__noise_key", "position"),
        ("speculation__numerics", "fast"),
        ("resources__cpu_threads", 2),
        ("input__system", "Be brief."),
        ("input__keep", ["prompt"]),
        ("input__overlong", "skip"),
        ("model__chat_template", "none"),
        ("model__target__dtype", "bfloat16"),
        ("output__compression", "none"),
        ("output__rows_per_part", 300),
        ("output__include", ["usage"]),
        ("output__prefix", "spot_"),
    ],
)
def test_what_can_change_the_output_changes_the_fingerprint(key: str, value: object) -> None:
    assert mark(spec(**{key: value})) != mark(spec())


def test_input_and_model_are_part_of_the_fingerprint() -> None:
    job = spec()
    other_input = fingerprint(job, {**INPUT_IDENTITY, "digest": "e"}, MODEL_IDENTITY)[0]
    other_model = fingerprint(job, INPUT_IDENTITY, {"weights": "v"})[0]
    assert len({mark(job), other_input, other_model}) == 3


def test_a_difference_is_told_field_by_field() -> None:
    old = fingerprint_fields(spec(generation__temperature=0), INPUT_IDENTITY, MODEL_IDENTITY)
    new = fingerprint_fields(
        spec(generation__temperature=1, generation__n=2), INPUT_IDENTITY, {"weights": "w", "x": 1}
    )
    assert diff_fields(old, new) == [
        "generation.n: 1 (directory) != 2 (spec)",
        "generation.temperature: 0.0 (directory) != 1.0 (spec)",
        "model.x: absent (directory) != 1 (spec)",
    ]


def test_parts_are_sized_by_the_number_of_samples_alone() -> None:
    assert spec().rows_per_part(10) == 256
    assert spec().rows_per_part(64_000) == 1_000
    assert spec().rows_per_part(10**9) == 250_000
    assert spec(output__rows_per_part=5).rows_per_part(10**9) == 5


def test_a_dumped_spec_names_every_key_that_is_known() -> None:
    tree = yaml.safe_load(dump_spec(spec()))
    assert check_spec(tree) == spec()
    assert set(tree) == set(JobSpec.model_fields)


def test_the_package_and_its_metadata_agree_on_the_version() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'version = "{spot_batch.__version__}"' in project.read_text()


def test_memory_for_prefixes_is_a_share_or_so_many_gib() -> None:
    assert spec().resources.prefix_share == 0.8
    assert spec(resources__prefix_gib=2.5).resources.prefix_gib == 2.5
    assert mark(spec(resources__prefix_gib=1)) == mark(spec(resources__prefix_share=0.2))
    assert "resources.prefix_share" in complaint(resources__prefix_share=0)
    assert "resources.prefix_share" in complaint(resources__prefix_share=1.5)
    assert "resources.prefix_gib" in complaint(resources__prefix_gib=0)
    assert "resources.prefix_gib" in complaint(resources__prefix_gib=True)


def test_the_order_of_leases_decides_no_bytes() -> None:
    assert spec().scheduling.order == "longest_first"
    assert mark(spec(scheduling__order="input")) == mark(spec())
    assert "scheduling.order" in complaint(scheduling__order="shortest")
