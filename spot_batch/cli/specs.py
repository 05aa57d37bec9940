"""The packaged job specs, and the commented one that `init` writes."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
TEMPLATE = Path(__file__).parent / "template.yaml"


def folder() -> Path:
    """Where the packaged specs are: in the package once built, else at the top of a checkout."""
    packaged = _PACKAGE / "jobs"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "jobs"


def packaged() -> list[Path]:
    return sorted(folder().glob("*.yaml"))


def find(given: str) -> Path:
    """A spec by path, or a packaged one by name."""
    path = Path(given)
    if path.exists():
        return path
    for spec in packaged():
        if given in (spec.stem, spec.name):
            return spec
    return path


def about(spec: Path) -> str:
    """What a packaged spec says of itself: its first comment line."""
    first = spec.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
