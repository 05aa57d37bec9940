"""`jobs` and `init`: the packaged job specs, and the commented one to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spot_batch.terminal.errors import plain_errors

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


@plain_errors
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented spec to start from."""
    text = TEMPLATE.read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path}: is there already; give another name") from None
    print(f"{path} written; next: spot-batch validate {path}")


@plain_errors
def jobs(
    name: Annotated[str | None, typer.Argument(help="Print this spec.")] = None,
    path: Annotated[bool, typer.Option("--path", help="Print its path instead.")] = False,
) -> None:
    """List the packaged specs, or print one."""
    if name is None:
        width = max(len(spec.stem) for spec in packaged())
        for spec in packaged():
            print(f"{spec.stem:<{width}}  {spec if path else about(spec)}")
        return
    found = find(name)
    if found not in packaged():
        known = ", ".join(spec.stem for spec in packaged())
        raise ValueError(f"no packaged spec named {name!r}; there are: {known}")
    print(found if path else found.read_text(encoding="utf-8"), end="\n" if path else "")
