"""Google's storage on the loopback address: a bucket `rows` that is listed and read."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, unquote, urlparse

_WHEN = "2026-01-01T00:00:00Z"
_LIST = "/storage/v1/b/rows/o"


def _about(name: str, data: bytes) -> dict[str, str]:
    about = {"kind": "storage#object", "id": f"rows/{name}", "name": name, "bucket": "rows"}
    about |= {"size": str(len(data)), "etag": name, "generation": "1", "metageneration": "1"}
    return {**about, "timeCreated": _WHEN, "updated": _WHEN, "storageClass": "STANDARD"}


def _answer(files: Mapping[str, bytes], path: str, query: Mapping[str, list[str]]) -> bytes | None:
    if path == _LIST:
        prefix = query.get("prefix", [""])[0]
        items = [_about(name, data) for name, data in files.items() if name.startswith(prefix)]
        return json.dumps({"kind": "storage#objects", "items": items}).encode()
    if path == "/storage/v1/b/rows":
        return json.dumps({**_about("", b""), "kind": "storage#bucket", "name": "rows"}).encode()
    name = path.removeprefix(_LIST + "/")
    if name not in files:
        return None
    is_content = query.get("alt") == ["media"]
    return files[name] if is_content else json.dumps(_about(name, files[name])).encode()


@contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[str]:
    """The host and port of a storage with these objects. In a process of its own: reading holds
    the lock that a thread of this one would need to answer."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = urlparse(self.path)
            body = _answer(files, unquote(asked.path), parse_qs(asked.query))
            self.send_response(404 if body is None else 200)
            body = (
                b'{"error": {"code": 404, "message": "no such object"}}' if body is None else body
            )
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        process.kill()
        process.join()
        server.server_close()
