"""A hub on the loopback address: as much of its protocol as downloading a model asks for."""

from __future__ import annotations

import hashlib
import json
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
    """Serves a folder as the repository OPEN at two commits; counts who asked for what.

    The first download of a file waits until `num_processes` have asked about it, so that they
    overlap for certain.
    """

    def __init__(self, files: dict[str, dict[str, bytes]], *, num_processes: int = 1) -> None:
        self.files = files
        self.heads: Counter[str] = Counter()
        self.downloads: Counter[str] = Counter()
        self._num_processes = num_processes
        self._asked = threading.Condition()

    def asked_about(self, name: str) -> None:
        with self._asked:
            self.heads[name] += 1
            self._asked.notify_all()

    def downloaded(self, name: str) -> None:
        with self._asked:
            self.downloads[name] += 1
            together = self._asked.wait_for(
                lambda: self.heads[name] >= self._num_processes, timeout=PATIENCE_S
            )
        assert together, f"{self.heads[name]} processes asked about {name}"


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
        commit = {"": MAIN, "main": MAIN, MAIN: MAIN, "v1": OLD, OLD: OLD}.get(revision)
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
