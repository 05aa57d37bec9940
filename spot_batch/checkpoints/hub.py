"""Where a target's files are: packaged, in a local folder, or on the hub."""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.families import refused_by_name
from spot_batch.records.progress import LoadProgress, LoadReport, unreported

logger = logging.getLogger(__name__)

_PACKAGED = Path(__file__).parent.parent / "assets" / "targets"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Code is read as text, to tell versions apart, and never run.
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "modeling_llada2*.py")
_SOON_S = 0.2  # a lock that nobody holds is ours by then


def locate(target: str, *, revision: str | None = None, report: LoadReport = unreported) -> Path:
    """The local folder of a target; a hub id is downloaded (or found in the cache).

    HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE count.
    """
    folder = find_folder(target, revision=revision)
    return folder if folder is not None else download(target, revision=revision, report=report)


def find_folder(target: str, *, revision: str | None = None) -> Path | None:
    """The folder of a target that is none of the hub's; None for a hub id."""
    packaged = packaged_targets()
    path = packaged.get(target) or Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{target}: the folder has no config.json")
        if revision is not None:
            raise ModelError(f"{target}: a folder has no revisions, got {revision!r}")
        return path
    if path.is_absolute() or target.startswith((".", "~")) or not _HUB_ID.fullmatch(target):
        raise ModelError(
            f"{target}: no such folder. Give a folder with config.json, a hub id such as "
            f"JetLM/SDAR-1.7B-Chat-b32, or one of {', '.join(packaged)}"
        )
    return None


def packaged_targets() -> dict[str, Path]:
    """The targets that come with the package, by name."""
    return {path.name: path for path in sorted(_PACKAGED.iterdir()) if path.is_dir()}


def find_cached(target: str, *, revision: str | None = None) -> Path | None:
    """A hub id's folder in the cache if its small files are there; the hub is not asked."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(target, name, revision=revision)
        for name in ("config.json", "tokenizer_config.json")
    ]
    paths = [Path(each) for each in found if isinstance(each, str)]
    return paths[0].parent if len(paths) == len(found) else None


def download(
    target: str,
    *,
    revision: str | None = None,
    with_weights: bool = True,
    report: LoadReport = unreported,
) -> Path:
    """A hub id's files, from the cache or the hub. Raises ModelError in one sentence.

    Of all processes that share a cache one downloads a repository, the others wait and find it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HFValidationError,
        HTTPError,
        XetDownloadError,
    )

    refused = refused_by_name(target)
    if refused is not None:
        raise ModelError(f"{target}: {refused}")
    patterns = [*_SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    try:
        with _alone(target, report) if not constants.is_offline_mode() else nullcontext():
            path = Path(
                snapshot_download(
                    target,
                    revision=revision,
                    allow_patterns=patterns,
                    tqdm_class=None if report is unreported else _byte_counter(report),
                )
            )
    except (OSError, HTTPError, HFValidationError, XetDownloadError) as error:
        raise ModelError(f"{target}: {_why_it_failed(error, target, revision)}") from error
    if not (path / "config.json").is_file():
        raise ModelError(f"{target}: the repository has no config.json")
    return path


def _why_it_failed(error: Exception, target: str, revision: str | None) -> str:
    """What kept a repository from coming, and what the user can do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case GatedRepoError():
            return (
                f"the repository is gated: accept its terms at {constants.ENDPOINT}/{target} and "
                "log in with `hf auth login` (or set HF_TOKEN)"
            )
        case RevisionNotFoundError():
            return f"the repository has no revision {revision!r}"
        case RepositoryNotFoundError():
            return (
                f"no local folder, and no such repository at {constants.ENDPOINT} (a private one "
                "needs `hf auth login` or HF_TOKEN)"
            )
        case HFValidationError():
            return f"no local folder, and no hub id ({error})"
        case LocalEntryNotFoundError():
            offline = constants.is_offline_mode()
            why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
            return f"no local folder, not complete in the cache {constants.HF_HUB_CACHE}, and {why}"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return (
                f"no space left in {constants.HF_HUB_CACHE} for its files: make room, or set "
                "HF_HOME to a larger disk"
            )
    return f"the download from {constants.ENDPOINT} failed ({_first_line(error)})"


@contextmanager
def _alone(target: str, report: LoadReport) -> Iterator[None]:
    """Hold a repository's lock in the hub's cache; another process that holds it is waited for.

    The hub's library locks file by file. This lock lets one process alone ask the hub, and lets
    the others say that they wait. A cache that cannot be written to has nothing to lock.
    """
    from filelock import Timeout
    from huggingface_hub import constants
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = Path(constants.HF_HUB_CACHE) / ".locks" / f"models--{target.replace('/', '--')}"
    lock = folder / "spot-batch.lock"
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(WeakFileLock(lock, timeout=_SOON_S))
        except Timeout:
            report(LoadProgress("waiting"))
            held.enter_context(WeakFileLock(lock))
        except OSError:
            logger.debug("%s cannot be locked: files may be asked for twice", folder)
        yield


def _byte_counter(report: LoadReport) -> type:
    """A progress bar for the hub's library that shows nothing and reports the bytes that came.

    The total grows as files begin: the library asks for some at a time.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of its bars one counts bytes as they are written.
            self._counts = kwargs.get("name") == "huggingface_hub.snapshot_download"
            self._done = 0
            self._one_by_one = threading.Lock()  # files come in threads of their own
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                with self._one_by_one:
                    self._done += int(n or 0)
                    report(LoadProgress("downloading", self._done, int(self.total or 0)))

    return Counter


def commit_of(path: Path) -> str | None:
    """The commit that a folder of the hub's cache is of; None for other folders."""
    is_commit = path.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", path.name)
    return path.name if is_commit else None


def names_of(target: str, path: Path) -> tuple[str, ...]:
    """What a checkpoint is called: as given, by its folder, by the repository of its cache."""
    path = path.absolute()
    names = [target.rstrip("/"), path.name]
    if path.parent.name == "snapshots":
        names.append(path.parent.parent.name)
    return tuple(dict.fromkeys(names))


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
