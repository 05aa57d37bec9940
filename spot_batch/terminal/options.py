"""Options that several commands have, and what is checked of them."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, TypeVar

import typer

Number = TypeVar("Number", int, float)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout at the end.")]
Out = Annotated[str, typer.Argument(help="The job directory, or its URL.")]
Seed = Annotated[int | None, typer.Option(help="Decides the noise, together with the row's id.")]


def numbers(
    text: str,
    kind: type[Number],
    name: str,
    *,
    least: Number | None = None,
    most: Number | None = None,
    may_be_empty: bool = False,
) -> list[Number]:
    """A comma-separated option, each number once. Raises ValueError naming it."""
    try:
        found = list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ValueError(f"{name} wants {kind.__name__}s by comma, got {text!r}") from None
    if not found and not may_be_empty:
        raise ValueError(f"{name} wants at least one number, got {text!r}")
    for each in found:
        low, high = least is not None and each < least, most is not None and each > most
        if low or high or not math.isfinite(each):
            what = "whole numbers" if kind is int else "numbers"
            reach = "" if least is None else f" from {least}"
            reach += "" if most is None else f" to {most}"
            raise ValueError(f"{name} wants {what}{reach}, got {each}")
    return found


def check_writable(path: Path | None, option: str, *, makes_folders: bool = False) -> None:
    """Raises ValueError where a file cannot be written, before hours of work are lost on it.

    `makes_folders`: those above it are made when it is written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file")
    folder = path.parent
    while makes_folders and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} {path}: may not be written")
