"""A hub on the loopback address: as much of its protocol as downloading a model asks for."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

OPEN, GATED, TOKEN = "someone/SDAR-tiny-b8", "someone/gated", "hf_tiny"
MAIN, OLD = "a" * 40, "b" * 40
PATIENCE_S = 120.0


class Hub:
    """Serves folders as the repository OPEN at two commits; counts who asked for what.

    `main` is the commit of its branch. While it `is_held` no download ends, so that what must come
    meanwhile comes for certain.
    """

    def __init__(
        self, files: dict[str, dict[str, bytes]], *, main: str = MAIN, is_held: bool = False
    ) -> None:
        self.files = files
        self.main = main
        self.heads: Counter[str] = Counter()
        self.downloads: Counter[str] = Counter()
        self._is_held = is_held
        self._changed = threading.Condition()

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def wait_for_download(self) -> None:
        """Until somebody has begun one."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.downloads, timeout=PATIENCE_S)

    def asked_about(self, name: str) -> None:
        with self._changed:
            self.heads[name] += 1

    def downloaded(self, name: str) -> None:
        with self._changed:
            self.downloads[name] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: not self._is_held, timeout=PATIENCE_S)


def environment(home: Path, endpoint: str, *, offline: bool = False) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {
        **kept,
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ETAG_TIMEOUT": "60",
    }


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The endpoint of a hub that answers."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            _answer(self, hub)

        def do_HEAD(self) -> None:
            _answer(self, hub)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _answer(request: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = unquote(request.path.partition("?")[0]).strip("/")
    if path.startswith(f"api/models/{GATED}"):
        _send(request, 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        return
    about, _, of_api = path.partition(f"api/models/{OPEN}")
    if not about and (of_api or path.endswith(OPEN)):
        what, _, revision = of_api.strip("/").partition("/")
        commit = {"": hub.main, "main": hub.main, MAIN: MAIN, "v1": OLD, OLD: OLD}.get(revision)
        if commit is None:
            _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif what == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in hub.files[commit].items()
            ]
            _send(request, 200, json.dumps(tree).encode(), {})
        else:
            _send(request, 200, json.dumps({"id": OPEN, "sha": commit}).encode(), {})
        return
    _, of_file, rest = path.partition(f"{OPEN}/resolve/")
    if not of_file:
        _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        return
    commit, _, name = rest.partition("/")
    data = hub.files[commit][name]
    if request.command == "HEAD":
        hub.asked_about(name)
    else:
        hub.downloaded(name)
    _send(request, 200, data, {"X-Repo-Commit": commit, "ETag": f'"{_etag(data)}"'})


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _send(request: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response(code)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
