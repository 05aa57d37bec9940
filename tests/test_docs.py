"""What docs/architecture.md names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "spot_batch"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `path`, `path:name` and `path:Class.name`, where a path is a folder or a file of ours.
NAMED = sorted(set(re.findall(r"`([\w./-]+(?:/|\.(?:py|toml))(?::[\w.]+)?)`", PAGE)) - {"data/"})


def names_in(file: Path) -> set[str]:
    """Functions, classes and methods of a module, and what it assigns at its top."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
        if isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return names


@pytest.mark.parametrize("named", NAMED)
def test_what_the_page_on_architecture_names_is_there(named: str) -> None:
    path, _, name = named.partition(":")
    found = next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)
    assert found is not None, f"{path} is gone"
    if name:
        assert name in names_in(found), f"{path} has no {name}"


def test_the_page_draws_every_floor() -> None:
    floors = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert floors == {name for name in floors if f"\n {name}/" in PAGE or f"|  {name}/" in PAGE}
