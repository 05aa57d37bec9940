"""Commands that start no Ray: what is refused and why, and what is shown."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from spot_batch.cli import running, specs
from spot_batch.cli.job_screen import JobScreen, LoadLines, show_results
from spot_batch.cli.main import app
from spot_batch.job.reading import load_spec
from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.driver_lock import DriverAlive, DriverWatch, acquire_driver_lock
from spot_batch.jobdir.events import write_heartbeat
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.layout import Layout
from spot_batch.jobdir.segments import publish_segment
from spot_batch.records.progress import ActorLoading, Heartbeat, LoadProgress, SilentActor
from spot_batch.records.results import CheckResult
from spot_batch.service.progress import describe
from spot_batch.terminal.screen import Screen, printable
from tests.jobdir.jobs import make_outcomes, write_jsonl
from tests.service.jobs import begin


class Done:
    """What a command did, its output and complaints apart."""

    def __init__(self, arguments: Sequence[str | Path], *, given: str | None = None) -> None:
        result = CliRunner().invoke(app, [str(each) for each in arguments], input=given)
        self.code, self.shown, self.wrong = result.exit_code, result.stdout, result.stderr


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + {n}?"}) + "\n" for n in range(5)))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "{out}", "-o", "s3://rows/x.jsonl"],
        ["submit", "-i", "{rows}", "-o", "{out}", "--save-spec", "s3://rows/x.yaml"],
        ["init", "gs://rows/x.yaml"],
        ["calibrate", "spiffy", "{out}", "-o", "memory://x.json"],
    ],
)
def test_a_url_is_no_folder_of_this_machine(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = Done([each.format(out=tmp_path / "out", rows=rows) for each in arguments])
    assert done.code == 2
    assert "wants a path on this machine, got the URL" in done.wrong
    assert [each.name for each in tmp_path.iterdir()] == [rows.name]


def test_help_is_fast_because_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'ray', 'transformers', 'pyarrow', 'datasets', 'pydantic'}"
    script = f"import sys, spot_batch.cli.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-i", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["-i", "{rows}", "--prompt", "quest"], ["'quest'", "'question'"]),
        (["-i", "{rows}", "--set", "generation.temprature=1"], ["generation.temperature"]),
        (["-i", "{rows}", "--set", "speculation"], ["key=value"]),
        (["-i", "{rows}", "--model", "./nowhere"], ["./nowhere", "no such folder"]),
        (["-i", "{rows}", "--drafter", "./nowhere"], ["nowhere"]),
        (["-i", "{rows}", "--temperature", "-1"], ["generation.temperature", "-1"]),
        (["-i", "{rows}", "--actors", "none"], ["resources.actors", "none"]),
        (["nowhere.yaml"], ["nowhere.yaml", "no such spec"]),
        ([], ["input.source", "missing"]),
    ],
)
def test_what_a_person_got_wrong_is_named_in_one_message(
    rows: Path, tmp_path: Path, arguments: list[str], named: list[str]
) -> None:
    given = [each.format(rows=rows) for each in arguments]
    done = Done(["submit", "-o", tmp_path / "out", *given])
    assert done.code == 2, done.shown + done.wrong
    assert "Traceback" not in done.wrong
    assert done.wrong.startswith("spot-batch: ")
    for word in named:
        assert word in done.wrong


def test_rows_of_equal_ids_are_refused_with_both_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n')
    done = Done(["submit", "-i", path, "-o", tmp_path / "out", "--set", "input.custom_id=id"])
    assert done.code == 2
    assert "line 1" in done.wrong
    assert "line 2" in done.wrong


def test_a_job_of_no_rows_is_complete_at_once_and_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("")
    out = tmp_path / "out"
    command = ["submit", "-i", path, "-o", out, "--json"]
    done = Done(command)
    assert done.code == 0, done.shown + done.wrong
    assert json.loads(done.shown)["summary"]["totals"]["num_samples"] == 0
    job = JobDirectory.open(out)
    with pa.OSFile(str(job.data / job.part_name(0))) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.num_rows == 0
    assert {"generation", "token_ids", "usage"} <= set(table.column_names)
    again = Done(command)
    assert json.loads(again.shown)["message"] == "complete already"
    other = Done([*command, "--max-new-tokens", "7"])
    assert other.code == 2
    assert "generation.max_new_tokens: 256 (directory) != 7 (spec)" in other.wrong


def test_a_folder_of_something_else_is_left_alone(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    done = Done(["submit", "-i", rows, "-o", out])
    assert done.code == 2
    assert "thesis.tex" in done.wrong
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_dry_run_shows_the_prompt_and_writes_nothing(rows: Path, tmp_path: Path) -> None:
    done = Done(["submit", "-i", rows, "-o", tmp_path / "out", "--dry-run"])
    assert done.code == 0, done.wrong
    assert "0 + 0?" in done.shown
    assert "tokens:" in done.shown
    assert "drafter" in done.shown
    assert not (tmp_path / "out").exists()


def test_a_template_is_shown_as_its_first_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "one", "b": 2}\n')
    (tmp_path / "mine.jinja").write_text("{{ a }} and {{ b }}?\n")
    for given in ("{{ a }} and {{ b }}?", str(tmp_path / "mine.jinja")):
        for command in (["validate"], ["submit", "--dry-run", "-o", tmp_path / "out"]):
            done = Done([*command, "-i", path, "--template", given])
            assert done.code == 0, done.wrong
            assert "prompts by input.template, of columns: 'a', 'b'" in done.shown
            assert "one and 2?" in done.shown
    wrong = Done(["validate", "-i", path, "--template", "{{ c }}"])
    assert (wrong.code, "no column 'c' in rows.jsonl" in wrong.wrong) == (2, True)


@pytest.mark.parametrize("beside", ["input", "context"])
def test_a_column_left_out_beside_instruction_is_named_with_what_takes_it(
    beside: str, tmp_path: Path
) -> None:
    row = json.dumps({"instruction": "Add them.", beside: "1 2"}) + "\n"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(row)
    done = Done(["validate", "-i", tmp_path / "in"])
    shown = " ".join(done.shown.split())
    template = f"{{{{ instruction }}}} {{{{ {beside} }}}}"
    assert "2 rows of 2 files" in shown
    assert f"'{beside}' is left out of them; --template '{template}' takes both" in shown
    done = Done(["validate", "-i", tmp_path / "in", "--template", template])
    assert "Add them. 1 2" in done.shown


def test_a_saved_spec_is_the_same_job(rows: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.yaml"
    out = ["-o", tmp_path / "out", "--dry-run", "--json"]
    first = Done(["submit", "-i", rows, "--seed", "7", "--save-spec", saved, *out])
    second = Done(["submit", saved, *out])
    assert first.code == second.code == 0, first.wrong + second.wrong
    assert json.loads(first.shown)["fingerprint"] == json.loads(second.shown)["fingerprint"]
    assert Done(["submit", "-i", rows, "--save-spec", saved, *out]).code == 0
    before = rows.read_bytes()
    wrong = Done(["submit", "-i", rows, "--save-spec", rows, *out])
    assert (wrong.code, rows.read_bytes()) == (2, before)
    assert "rows.jsonl is there already, and is no spec" in wrong.wrong


def test_validate_renders_prompts_and_counts_rows_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one?"}\n{"text": ""}\n{"text": "three?"}\n')
    done = Done(["validate", "-i", path])
    assert done.code == 3, done.wrong
    assert Done(["validate", "-i", path, "--set", "failure.max_error_fraction=0.5"]).code == 0
    assert "one?" in done.shown
    assert "three?" in done.shown
    assert "1 of 3 rows cannot be used: empty_prompt, the first: rows.jsonl line 2" in done.shown
    assert "a job ends with exit code 3 (failure.max_error_fraction is 0.01)" in done.shown
    document = json.loads(Done(["validate", "-i", path, "--json"]).shown)
    assert document["faults"] == {"empty_prompt": 1}
    assert (document["exit_code"], document["num_unreadable"]) == (3, 0)
    assert document["columns"]["generation"] == "string"


def test_what_is_left_out_beside_an_instruction_is_said(tmp_path: Path) -> None:
    rows = [{"instruction": "Add.", "input": "1 and 2", "output": "3"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    done = Done(["submit", "-i", path, "-o", tmp_path / "out", "--dry-run"])
    assert "prompts in column 'instruction' ('input' is left out of them; --template" in done.shown
    both = [*("--template", "{{ instruction }} {{ input }}"), "-o", tmp_path / "out", "--dry-run"]
    assert "Add. 1 and 2" in Done(["submit", "-i", path, *both]).shown


def test_the_standard_input_and_a_column_of_messages(tmp_path: Path) -> None:
    rows = json.dumps({"text": "no", "chat": [{"role": "user", "content": "one?"}]}) + "\n"
    done = Done(
        ["submit", "-i", "-", "--messages", "chat", "-o", tmp_path / "out", "--dry-run"],
        given=rows,
    )
    assert done.code == 0, done.wrong
    assert "1 rows, prompts in column 'chat'" in done.shown
    assert "one?" in done.shown


def test_validate_and_submit_count_the_same_unreadable_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one?"}\n{"text"\n{"text": ""}\n')
    done = Done(["validate", "-i", path])
    planned = Done(["submit", "-i", path, "-o", tmp_path / "out", "--dry-run"])
    line = "3 rows, prompts in column 'text'; 1 row is unreadable, the first: rows.jsonl line 2"
    assert line in done.shown
    assert line in planned.shown
    assert "unreadable: rows.jsonl line 2: bad_json" in done.shown
    assert "1 of 3 rows cannot be used: empty_prompt, the first: rows.jsonl line 3" in done.shown
    assert "cannot be used: bad_json" not in done.shown


@pytest.mark.parametrize("command", [["validate"], ["submit", "--dry-run", "-o", "out"]])
def test_a_compressed_input_is_looked_at_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with gzip.open("rows.jsonl.gz", "wt") as file:
        file.write('{"text": "one?"}\n')
    done = Done([*command, "-i", "rows.jsonl.gz"])
    assert done.code == 0, done.wrong
    assert "one?" in done.shown
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl.gz"]


def test_a_refused_submit_leaves_nothing(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write('{"text": "one?", "generation": 1}\n')
    for wrong in (["--prompt", "no"], []):  # the second: a column of ours
        done = Done(["submit", "-i", tmp_path / "rows.jsonl.gz", "-o", tmp_path / "out", *wrong])
        assert done.code == 2, done.wrong
        assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl.gz"]
    (tmp_path / "out").mkdir()
    assert Done(["submit", "-i", "nowhere.jsonl", "-o", tmp_path / "out"]).code == 2
    assert list((tmp_path / "out").iterdir()) == []


def test_status_reads_the_directory_alone(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("")
    out = tmp_path / "out"
    assert Done(["submit", "-i", path, "-o", out]).code == 0
    done = Done(["status", out, "--json"])
    assert json.loads(done.shown)["state"] == "complete"
    assert "rows 0/0" in Done(["status", out]).shown
    missing = Done(["status", tmp_path])
    assert missing.code == 2
    assert "not a job directory" in missing.wrong


def test_init_writes_a_spec_that_loads_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    assert Done(["init", path]).code == 0
    assert load_spec(path).name == "my-job"
    again = Done(["init", path])
    assert again.code == 2
    assert "is there already" in again.wrong


def test_the_packaged_specs_load_and_say_what_they_are() -> None:
    names = [path.stem for path in specs.packaged()]
    assert {"quickstart", "gsm8k"} <= set(names)
    for path in specs.packaged():
        assert load_spec(path).name == path.stem
        assert specs.about(path)
    assert "gsm8k" in Done(["jobs"]).shown
    assert (
        "bundled model answers the packaged kinds of problem only" in Done(["jobs", "gsm8k"]).shown
    )


def test_another_input_is_not_read_the_way_of_the_packaged_one(rows: Path, tmp_path: Path) -> None:
    done = Done(["submit", "gsm8k", "-i", rows, "-o", tmp_path / "out", "--dry-run"])
    assert done.code == 0, done.wrong
    assert "5 rows" in done.shown


def test_text_cannot_speak_to_the_terminal() -> None:
    assert printable("\x1b[31mred\x07\u202eab\n\t[bold]") == "\\x1b[31mred\\x07\\u202eab\n\t[bold]"


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3_000])
def test_a_path_that_cannot_be_is_one_line_with_the_path(rows: Path, name: str) -> None:
    for command in (["submit", "-i", rows, "-o", name], ["status", name], ["submit", name]):
        done = Done(command)
        assert done.code == 2, done.wrong
        assert name[:200] in done.wrong
        assert done.wrong.startswith("spot-batch: ")
        assert done.wrong.count("\n") == 1


def test_the_trace_of_an_unusable_path_is_there_for_those_who_want_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPOT_BATCH_TRACEBACK", "1")
    result = CliRunner().invoke(app, ["submit", "x" * 300])
    assert isinstance(result.exception, OSError)


def test_a_working_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    script = (
        "import os; from spot_batch.cli.main import app; "
        f"os.mkdir({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
        "app(['submit', '-i', 'q.jsonl'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("spot-batch: the working directory is not there any more")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["-i", "{rows}", "--model", "https://user:s3cret@host/m"],
        ["-i", "{rows}", "--drafter", "https://s3cret@host/m"],
        ["-i", "https://host/x.jsonl?token=s3cret"],
        ["-i", "{rows}", "-o", "https://user:s3cret@host/out"],
        ["-i", "{rows}", "--save-spec", "https://user:s3cret@host/spec.yaml"],
        ["-i", "{rows}", "--set", "https://user:s3cret@host"],
        ["-i", "{rows}", "--set", "input.sorce=https://user:s3cret@host"],
        ["-i", "{rows}", "--set", "generation.temperature=https://user:s3cret@host"],
        ["https://user:s3cret@host/spec.yaml"],
    ],
)
def test_a_secret_is_shown_nowhere(rows: Path, tmp_path: Path, arguments: list[str]) -> None:
    given = [each.format(rows=rows) for each in arguments]
    done = Done(["submit", "-o", tmp_path / "out", *given])
    assert done.code == 2
    assert done.wrong.startswith("spot-batch: ")
    assert "s3cret" not in done.shown + done.wrong


def test_a_screen_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.line("from https://user:s3cret@host/x")
    screen.facts([("output", "https:/user:s3cret@host/x?token=s3cret")])
    assert capsys.readouterr().out == (
        "from https://***@host/x\noutput  https:/***@host/x?token=***\n"
    )


def test_a_complete_job_without_its_parts_is_not_called_complete(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("")
    out = tmp_path / "out"
    assert Done(["submit", "-i", path, "-o", out]).code == 0
    job = JobDirectory.open(out)
    (job.data / job.part_name(0)).unlink()
    done = Done(["status", out, "--json"])
    assert done.code == 0
    document = json.loads(done.shown)
    assert document["state"] == "damaged"
    assert document["damage"] == f"data/{job.part_name(0)}: is gone"
    shown = Done(["status", out]).shown
    assert f"damaged: data/{job.part_name(0)}: is gone" in shown
    assert f"to go on: spot-batch resume {out}" in shown


def test_an_actor_that_loads_is_named_by_status_and_on_the_screen(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = begin(tmp_path / "out", load_spec(None, {"input.source": str(rows)}))
    loading = ActorLoading(1, LoadProgress("loading", 3_140_000_000, 16_381_470_720))
    heartbeat = Heartbeat(
        state="starting",
        num_samples=5,
        num_durable=0,
        loading=(loading,),
        drafted_per_round=2.314,
        drafting_share=0.84,
    )
    with acquire_driver_lock(job):
        write_heartbeat(job, heartbeat)
        shown = Done(["status", job.root]).shown
        document = json.loads(Done(["status", job.root, "--json"]).shown)
    assert "actor 1   loading target 3.1 of 16.4 GB" in shown
    assert "2.31 drafted slots a sample a round, in 84 % of rounds; budget auto" in shown
    assert document["drafting_share"] == 0.84
    assert document["loading"] == [
        {
            "actor": 1,
            "progress": {
                "stage": "loading",
                "num_bytes": 3_140_000_000,
                "num_bytes_total": 16_381_470_720,
            },
        }
    ]
    assert "actor 1 " not in Done(["status", job.root]).shown, "its driver is gone"
    monkeypatch.setattr("spot_batch.cli.job_screen.PLAIN_LINE_S", 0.0)
    with JobScreen(Screen(), job) as screen:
        screen.update(heartbeat)
        screen.update(heartbeat)
        assert capsys.readouterr().out == "starting …\nactor 1: loading target 3.1 of 16.4 GB\n"


def test_files_that_take_long_are_said_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = LoadLines(Screen())
    at_once(LoadProgress("checking", 1, 2))
    at_once(LoadProgress("waiting"))
    monkeypatch.setattr("spot_batch.cli.job_screen.LOAD_QUIET_S", -1.0)
    later = LoadLines(Screen())
    for num_bytes in range(1, 10):
        later(LoadProgress("downloading", num_bytes * 10**9, 9 * 10**9))
    assert capsys.readouterr().out == (
        "waiting for another process's download …\ndownloading 1.0 of 9.0 GB …\n"
    )


def _ended(at: float) -> Heartbeat:
    return Heartbeat(
        state="failed", num_samples=0, num_durable=0, time=at, exit_code=3, message="last words"
    )


@pytest.mark.parametrize(("age_s", "taken"), [(60.0, False), (-1e-3, True)])
def test_the_last_word_of_an_earlier_run_is_not_that_of_the_driver_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, taken: bool
) -> None:
    job = Layout(tmp_path / "out")
    with acquire_driver_lock(job) as lease:
        job.spot.mkdir(parents=True, exist_ok=True)
        write_heartbeat(job, _ended(time.time() - age_s))
        monkeypatch.setattr(running.time, "sleep", lambda _: lease.release())
        found = running.follow(Screen(), job, DriverWatch())
    assert (found is not None) == taken


def test_another_job_begun_while_following_is_a_conflict_and_not_its_exit_code(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "none.jsonl", tmp_path / "out"
    path.write_text("")

    def driven(_: Layout, **__: object) -> None:
        raise DriverAlive(str(out), os.getpid(), "here", 0.0)

    def follow(*_: object) -> Heartbeat:
        with monkeypatch.context() as own:
            own.setattr(running, "acquire_driver_lock", acquire_driver_lock)
            assert Done(["submit", "-i", path, "-o", out]).code == 0
        return _ended(time.time())

    monkeypatch.setattr(running, "acquire_driver_lock", driven)
    monkeypatch.setattr(running, "follow", follow)
    done = Done(["submit", "-i", rows, "-o", out])
    assert done.code == 2
    assert "(directory) != " in done.wrong


@pytest.mark.parametrize(
    ("taken", "said"), [(75, "25 saved (25.0 %)"), (103, "3 more, since what is made again")]
)
def test_forwards_made_again_after_a_stop_are_not_called_saved(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: int, said: str
) -> None:
    job, _ = begin(tmp_path / "out", load_spec(None, {"input.source": str(rows)}))
    publish_segment(job, make_outcomes(job, range(5)))
    done = finalize(job, check=CheckResult(num_compared=0, num_differed=0), facts=None)
    totals = replace(done.totals, num_forwards=taken, num_draft_free_forwards=100)
    show_results(Screen(), job, replace(done, totals=totals), None)
    shown = capsys.readouterr().out
    assert said in shown
    assert "No sample was compared" in shown


REFUSED = ["validate", "dry run", "submit"]


def refused(how: str, *arguments: object) -> Done:
    more = ["submit", "--dry-run"] if how == "dry run" else [how]
    return Done([*more, *arguments])


@pytest.mark.parametrize("how", REFUSED)
def test_an_output_that_submit_refuses_is_found_before(
    rows: Path, tmp_path: Path, how: str
) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.tex").write_text("")
    file = tmp_path / "taken.jsonl"
    file.write_text("")
    for output, message in (
        (strange, "is not empty and not a job directory (it holds 'thesis.tex')"),
        (file, "is there already; give another output"),
        (file / "out", "taken.jsonl"),
    ):
        done = refused(how, "-i", rows, "-o", output)
        assert done.code == 2, done.shown
        assert message in done.wrong
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [rows.name, "strange", "taken.jsonl"]
    )
    assert [each.name for each in strange.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("how", REFUSED)
def test_a_directory_of_another_job_is_found_before(tmp_path: Path, how: str) -> None:
    path, out = tmp_path / "none.jsonl", tmp_path / "out"
    path.write_text("")
    assert Done(["submit", "-i", path, "-o", out]).code == 0
    done = refused(how, "-i", path, "-o", out, "--seed", "7")
    assert done.code == 2
    assert "generation.seed" in done.wrong
    assert refused(how, "-i", path, "-o", out).code == 0


@pytest.mark.parametrize("how", REFUSED)
def test_a_column_that_the_one_file_cannot_hold_is_found_before(tmp_path: Path, how: str) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / "answers.parquet"
    path.write_text('{"prompt": "one?", "odd": {}}\n')
    done = refused(how, "-i", path, "-o", out)
    assert done.code == 2, done.shown
    assert "column 'odd' is struct<>, which Parquet cannot hold" in done.wrong
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("how", REFUSED)
def test_a_length_beyond_the_context_is_found_before(rows: Path, tmp_path: Path, how: str) -> None:
    done = refused(how, "-i", rows, "-o", tmp_path / "out", "--max-new-tokens", "2048")
    assert done.code == 2, done.shown
    said = (
        "generation.max_new_tokens: 2,048 leave no room for a prompt: bundled has 2,048 positions"
    )
    assert said in done.wrong
    assert "at most 2,047 go" in done.wrong


def test_rows_that_cannot_be_read_are_counted_by_code(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "one?"}\n{"text"\n[1]\n{"text": "\xff"}\n')
    done = Done(["validate", "-i", path])
    assert "3 of 4 rows are unreadable: bad_json 2, bad_encoding 1" in done.shown
    document = json.loads(Done(["validate", "-i", path, "--json"]).shown)
    assert document["unreadable_codes"] == {"bad_json": 2, "bad_encoding": 1}


def test_status_names_a_silent_actor_and_explains_forwards_beyond_draft_free(
    tmp_path: Path,
) -> None:
    path, out = tmp_path / "none.jsonl", tmp_path / "out"
    path.write_text("")
    assert Done(["submit", "-i", path, "-o", out]).code == 0
    job = Layout(out)
    beat = replace(
        _ended(time.time()),
        state="running",
        exit_code=None,
        num_forwards_saved=-100,
        silent=(SilentActor(3, 90.0),),
    )
    write_heartbeat(job, beat)
    said = "forwards 100 more, since what is made again after a stop counts twice"
    assert said in Done(["status", out]).shown
    assert "silent" not in Done(["status", out]).shown, "nothing runs here any more"
    assert "actor 3 silent for" in describe(beat)
