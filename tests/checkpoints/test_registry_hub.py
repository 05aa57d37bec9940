"""Hub ids: each file comes down once a node, and what goes wrong is one sentence.

Against a hub on the loopback address; every caller is a process of its own, as actors are.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.hub import download, find_folder
from spot_batch.checkpoints.report import describe_target
from spot_batch.models.block import check_network
from tests.checkpoints.hub import GATED, MAIN, OLD, OPEN, Hub, environment, files_of, serving
from tests.families import write_checkpoint

SCRIPT = """
import json, sys
from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.hub import commit_of, locate
def said(progress):
    of = [progress.num_bytes, progress.num_bytes_total]
    print(json.dumps({"stage": progress.stage, "of": of}))
for target, revision in json.loads(sys.argv[1]):
    try:
        path = locate(target, revision=revision, **({"report": said} if sys.argv[2:] else {}))
        print(json.dumps({"path": str(path), "commit": commit_of(path)}))
    except ModelError as error:
        print(json.dumps({"error": str(error)}))
"""
SPOT_BATCH = Path(sys.executable).with_name("spot-batch")
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nobody listens


class Caller:
    """A process that locates targets one after the other; it may say how far it is."""

    def __init__(
        self,
        home: Path,
        endpoint: str,
        *asked: tuple[str, str | None],
        offline: bool = False,
        reports: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", SCRIPT, json.dumps(asked), *(["reports"] * reports)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(home, endpoint, offline=offline),
        )

    def next_line(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line: dict[str, object] = json.loads(self._process.stdout.readline())
        return line

    def answers(self) -> list[dict[str, str]]:
        out, wrong = self._process.communicate(timeout=200)
        assert self._process.returncode == 0, wrong
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    return files_of(write_checkpoint(folder, "sdar", num_shards=2))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_one_process_downloads_the_other_waits_and_then_the_cache_is_enough(
    files: dict[str, bytes], home: Path
) -> None:
    hub = Hub({MAIN: files}, is_held=True)
    with serving(hub) as endpoint:
        loader = Caller(home, endpoint, (OPEN, None), reports=True)
        hub.wait_for_download()
        waiter = Caller(home, endpoint, (OPEN, None), reports=True)
        assert waiter.next_line() == {"stage": "waiting", "of": [0, 0]}
        hub.release()
        *reports, first = loader.answers()
        (second,) = waiter.answers()
    size = sum(map(len, files.values()))
    assert reports[-1] == {"stage": "downloading", "of": [size, size]}
    assert {report["stage"] for report in reports} == {"downloading"}
    assert first == second
    assert first["commit"] == MAIN
    assert Path(first["path"]).is_relative_to(home)
    assert hub.downloads == dict.fromkeys(files, 1)
    assert hub.heads == dict.fromkeys(files, 1), "the other asked for what was there"
    assert files_of(Path(first["path"])) == files
    (offline,) = Caller(home, UNREACHABLE, (OPEN, None), offline=True).answers()
    assert offline == first
    rows = home / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?"}\n')
    validated = subprocess.run(
        [SPOT_BATCH, "validate", "-i", rows, "--model", OPEN, "--json"],
        capture_output=True,
        text=True,
        env=environment(home, UNREACHABLE, offline=True),
    )
    assert validated.returncode == 0, validated.stderr
    spec = json.loads(validated.stdout)["spec"]
    assert spec["model"]["target"]["revision"] == MAIN, "actors may start when the hub has moved on"


def test_a_revision_is_what_comes_and_what_cannot_come_is_one_sentence(
    files: dict[str, bytes], home: Path
) -> None:
    old = {**files, "config.json": files["config.json"] + b"\n"}
    hub = Hub({MAIN: files, OLD: old})
    with serving(hub) as endpoint:
        tagged, gated, missing, unknown = Caller(
            home, endpoint, (OPEN, "v1"), (GATED, None), ("someone/else", None), (OPEN, "v9")
        ).answers()
        assert tagged["commit"] == OLD
        assert files_of(Path(tagged["path"])) == old
        assert gated["error"] == (
            f"{GATED}: the repository is gated: accept its terms at {endpoint}/{GATED} and log in "
            "with `hf auth login` (or set HF_TOKEN)"
        )
        assert missing["error"].startswith("someone/else: no local folder, and no such repository")
        assert unknown["error"] == f"{OPEN}: the repository has no revision 'v9'"
    pinned, moved = Caller(home, UNREACHABLE, (OPEN, OLD), (OPEN, None)).answers()
    assert pinned == tagged, "a commit that is here needs no hub"
    assert f"and {UNREACHABLE} cannot be reached" in moved["error"]


def test_offline_and_not_in_the_cache_is_one_sentence(home: Path) -> None:
    (answer,) = Caller(home, UNREACHABLE, (OPEN, None), offline=True).answers()
    assert answer["error"] == (
        f"{OPEN}: no local folder, not complete in the cache {home / 'hub'}, and HF_HUB_OFFLINE is "
        "set"
    )


def test_a_check_fetches_small_files_alone(files: dict[str, bytes], home: Path) -> None:
    hub = Hub({MAIN: files})
    with serving(hub) as endpoint:
        checked = subprocess.run(
            [SPOT_BATCH, "targets", "check", OPEN, "--json"],
            capture_output=True,
            text=True,
            env=environment(home, endpoint),
        )
    assert checked.returncode == 0, checked.stderr
    document = json.loads(checked.stdout)
    assert (document["source"], document["commit"]) == ("hub", MAIN)
    assert document["weights"]["stored"] is None
    assert set(hub.downloads) == {name for name in files if not name.endswith(".safetensors")}
    assert document["warnings"] == [
        f"{OPEN}: block length 4 of config.json is taken; the repository's name says 8"
    ]


def test_what_is_cached_is_checked_by_its_files_and_may_be_incomplete(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--SDAR-tiny-b8"
    snapshot = cached / "snapshots" / MAIN
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(MAIN)
    for name in files:
        if "00002" not in name:
            (snapshot / name).write_bytes(files[name])
    begun = describe_target(OPEN, check=check_network)
    assert (begun.source, begun.info.commit, begun.weights.stored) == ("cache", MAIN, None)
    for name in files:
        (snapshot / name).write_bytes(files[name])
    whole = describe_target(OPEN, check=check_network)
    assert whole.weights.stored is not None
    assert whole.info.weight_hash


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ModelError, match=r"no space left in .* set HF_HOME to a larger disk"):
        download(OPEN)


def test_a_name_that_is_no_hub_id_is_not_asked_for() -> None:
    with pytest.raises(ModelError, match="no such folder"):
        find_folder("some/where/else")
    with pytest.raises(ModelError, match=r"and no hub id \("):
        download("a--b/c..d")


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="a folder has no revisions, got 'v1'"):
        find_folder(str(tmp_path), revision="v1")
