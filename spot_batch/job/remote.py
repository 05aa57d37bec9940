"""Files that a URL names: object stores and whatever else fsspec knows."""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from platformdirs import user_cache_path

GOOGLE_PATIENCE_S = 30.0

# How a remote file says that it is another one now, best first.
_MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


def is_url(text: str) -> bool:
    return "://" in text


def file_system(url: str) -> tuple[Any, str]:
    """(the fsspec file system of a URL, the path in it).

    s3:// and gs:// are pyarrow's own, with the credentials and endpoint that the usual variables
    give; any other scheme is fsspec's. Raises ValueError for a chain of file systems, ImportError
    for a scheme whose package is not installed.
    """
    from fsspec.core import url_to_fs

    if "::" in url:
        raise ValueError("a chain of file systems is not supported")
    if url.startswith("gs://"):
        return _of_pyarrow(_google_cloud()), url.removeprefix("gs://")
    if url.startswith("s3://"):
        from pyarrow import fs

        # Every character of a key means itself, as it does for every other tool of S3.
        files, path = fs.FileSystem.from_uri("s3://" + quote(url.removeprefix("s3://")))
        return _of_pyarrow(files), path
    files, path = url_to_fs(url)
    return files, str(path)


def _of_pyarrow(files: Any) -> Any:
    """The fsspec file system of one of pyarrow, whose patterns match everything or raise.

    fsspec's own leaves out a folder that could not be listed: a pattern matched fewer files.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper

    class Whole(ArrowFSWrapper):  # type: ignore[misc]  # fsspec has no types
        def walk(self, *args: Any, on_error: Any = "raise", **kwargs: Any) -> Any:
            return super().walk(*args, on_error=on_error, **kwargs)

    return Whole(files)


def _google_cloud() -> Any:
    """Google's storage; without credentials it says so soon: its own patience is 15 minutes."""
    from pyarrow import fs

    return fs.GcsFileSystem(retry_time_limit=datetime.timedelta(seconds=GOOGLE_PATIENCE_S))


def mark_of(info: dict[str, Any]) -> str:
    """What tells a file from another version of it: its size, and an etag or time."""
    said = next((info[name] for name in _MARKS if info.get(name) is not None), "")
    return f"{info.get('size')}:{said}"


def local_folder(url: str) -> Path:
    """Where on this machine a job directory at a URL is worked in: in the user's cache folder."""
    name = url.rstrip("/")
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    last = _ODD.sub("-", name.rpartition("/")[2])[:64]
    return user_cache_path("spot-batch") / "jobs" / f"{last}-{digest}"
