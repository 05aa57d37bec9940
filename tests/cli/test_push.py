"""`export --push-to-hub`, against a hub on the loopback address that takes what it is sent."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from spot_batch.jobdir.directory import JobDirectory
from spot_batch.jobdir.finalize import finalize
from spot_batch.jobdir.segments import publish_segment
from tests.checkpoints.hub import TOKEN, environment
from tests.jobdir.jobs import make_job, make_outcomes, prompts
from tests.service.jobs import SPOT_BATCH

REPOSITORY, COMMIT = "someone/rows", "c" * 40


class Repositories:
    """What was created and committed: one repository at most, its visibility and its files."""

    def __init__(self) -> None:
        self.is_private: bool | None = None
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}  # by hash: sent before the commit that names them


def _answer(asked: BaseHTTPRequestHandler, hub: Repositories) -> tuple[int, object]:
    here = f"http://{asked.headers['Host']}"
    path = asked.path.partition("?")[0].strip("/")
    body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
    if asked.headers.get("Authorization") != f"Bearer {TOKEN}" and asked.command != "PUT":
        return 401, {"error": "who are you?"}
    if path == "api/whoami-v2":
        return 200, {"type": "user", "name": "someone", "auth": {}}
    if path.startswith("large/"):
        hub.large[path.removeprefix("large/")] = body
        return 200, {}
    if path.endswith("lfs/objects/batch"):
        objects = [
            {**each, "actions": {"upload": {"href": f"{here}/large/{each['oid']}", "header": {}}}}
            for each in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    if path == "api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if path == "api/repos/create":
        if hub.is_private is None:
            given = json.loads(body)  # in the words of older clients and of newer ones
            hub.is_private = given.get("private") is True or given.get("visibility") == "private"
        return 200, {"url": f"{here}/datasets/{REPOSITORY}", "name": REPOSITORY}
    if hub.is_private is None or REPOSITORY not in path:
        return 404, {"error": "not found"}
    what = path.partition(REPOSITORY)[2].strip("/")
    if what.startswith("preupload"):
        files = [
            {"path": each["path"], "uploadMode": _mode(each["path"]), "shouldIgnore": False}
            for each in json.loads(body)["files"]
        ]
        return 200, {"files": files}
    if what.startswith("commit"):
        for line in body.splitlines():
            kind, value = json.loads(line).values()
            if kind == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                hub.files[value["path"]] = hub.large[value["oid"]]
        url = f"{here}/datasets/{REPOSITORY}/commit/{COMMIT}"
        return 200, {"commitUrl": url, "commitOid": COMMIT, "hookOutput": "", "success": True}
    if what.startswith("tree"):
        return _tree(hub, folder="/".join(what.split("/")[2:]))
    if what.startswith("resolve"):
        name = "/".join(what.split("/")[2:])
        return (200, hub.files[name]) if name in hub.files else (404, {"error": "no such entry"})
    return 200, {
        "id": REPOSITORY,
        "sha": COMMIT,
        "private": hub.is_private,
        "siblings": [{"rfilename": name} for name in hub.files],
    }


def _mode(name: str) -> str:
    return "lfs" if name.endswith(".parquet") else "regular"


def _tree(hub: Repositories, *, folder: str) -> tuple[int, object]:
    """Files and folders below a folder."""
    inside = {name: data for name, data in hub.files.items() if name.startswith(folder)}
    if folder and not inside:
        return 404, {"error": "no such entry"}
    folders = {name.rpartition("/")[0] for name in inside} - {"", folder}
    found = [{"type": "directory", "path": each, "oid": "0" * 40} for each in sorted(folders)]
    return 200, found + [
        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
        for name, data in inside.items()
    ]


@contextmanager
def serving(hub: Repositories) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            code, document = _answer(self, hub)
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", '"0"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code in (401, 404):
                entry = "/resolve/" in self.path or "/tree/" in self.path
                kind = "EntryNotFound" if entry and hub.is_private is not None else "RepoNotFound"
                self.send_header("X-Error-Code", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_HEAD = _reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    job = make_job(tmp_path, prompts(5))
    publish_segment(job, make_outcomes(job, range(5), failed={2}))
    finalize(job, check=None, facts=None)
    return job


def push(
    job: JobDirectory, endpoint: str, *options: str, token: str = TOKEN, offline: str = "0"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SPOT_BATCH, "export", str(job.root), "--push-to-hub", REPOSITORY, *options],
        env={
            **environment(job.root.parent / "home", endpoint),
            "HF_TOKEN": token,
            "HF_HUB_OFFLINE": offline,
            "HF_HUB_DISABLE_XET": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("public", [False, True])
def test_rows_and_card_are_pushed_and_private_unless_told_otherwise(
    job: JobDirectory, public: bool
) -> None:
    hub = Repositories()
    with serving(hub) as endpoint:
        done = push(job, endpoint, *(["--public"] if public else []), "--columns", "prompt,level")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == "", "no library's progress stands between our lines"
        assert (
            f"pushed to {endpoint}/datasets/{REPOSITORY}; 1 error row is not in it" in done.stdout
        )
        assert hub.is_private is not public
        (data,) = (name for name in hub.files if name.endswith(".parquet"))
        table = pq.read_table(io.BytesIO(hub.files[data]))
        assert table.column_names == ["prompt", "level"]
        assert table["prompt"].to_pylist() == [prompts(5)[i]["prompt"] for i in (0, 1, 3, 4)]
        assert hub.files["JOB.md"] == job.readme.read_bytes()
        again = push(job, endpoint)
    if public:
        assert again.returncode == 2
        assert f"{REPOSITORY} is public already; --public pushes there" in again.stderr
    else:
        assert again.returncode == 0, again.stderr


def test_a_hub_that_refuses_or_is_not_there_is_one_line(job: JobDirectory) -> None:
    with serving(Repositories()) as endpoint:
        refused = push(job, endpoint, token="hf_other")
    gone, offline = push(job, endpoint), push(job, endpoint, offline="1")
    for done in (refused, gone, offline, push(job, endpoint, "--format", "openai-batch")):
        assert done.returncode == 2, done.stderr
        assert "spot-batch: --push-to-hub" in done.stderr
        assert "Traceback" not in done.stderr
