"""Where a target's files are: packaged, in a local folder, or on the hub."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from spot_batch.targets.errors import ModelError

_PACKAGED = Path(__file__).parent.parent / "assets" / "targets"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def locate(target: str, *, revision: str | None = None) -> Path:
    """The local folder of a target; a hub id is downloaded (or found in the cache).

    Processes of a node that ask for one repository at once get each file once: the hub's library
    holds a lock a file, writes aside and renames. HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE count.
    """
    folder = find_folder(target, revision=revision)
    return folder if folder is not None else download(target, revision=revision)


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


def download(target: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """A hub id's files, from the cache or the hub. Raises ModelError in one sentence."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        XetDownloadError,
    )

    patterns = [*_SMALL_FILES, *(["*.safetensors"] if with_weights else [])]
    offline = constants.is_offline_mode()
    try:
        path = Path(snapshot_download(target, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ModelError(
            f"{target}: the repository is gated: accept its terms at {constants.ENDPOINT}/{target} "
            "and log in with `hf auth login` (or set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{target}: the repository has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{target}: no local folder, and no such repository at {constants.ENDPOINT} (a private "
            "one needs `hf auth login` or HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{target}: no local folder, and no hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if offline else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(
            f"{target}: no local folder, not complete in the cache {constants.HF_HUB_CACHE}, and "
            f"{why}"
        ) from error
    except (OSError, HTTPError, XetDownloadError) as error:
        if getattr(error, "errno", None) in _FULL:
            raise ModelError(
                f"{target}: no space left in {constants.HF_HUB_CACHE} for its files: make room, or "
                "set HF_HOME to a larger disk"
            ) from error
        raise ModelError(
            f"{target}: the download from {constants.ENDPOINT} failed ({_first_line(error)})"
        ) from error
    if not (path / "config.json").is_file():
        raise ModelError(f"{target}: the repository has no config.json")
    return path


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
