"""The script that counts the code's own shape, on code whose shape is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    path = Path(__file__).parent.parent / ".ci" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure_of_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write(package: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def function(name: str, num_lines: int) -> str:
    return f"def {name}():\n" + "    pass\n" * (num_lines - 1)


def test_lines_are_counted_by_room(measure: ModuleType, tmp_path: Path) -> None:
    package = write(tmp_path, engine__one="a = 1\nb = 2\n", engine__two="c = 3\n", noise="d = 4\n")
    counted = measure.lines_of_rooms(measure.read_sources(package))
    assert counted == {"engine": 3, "(top)": 1}


def test_a_command_may_be_longer_than_another_function(measure: ModuleType, tmp_path: Path) -> None:
    texts = {
        "cli__app": function("fits", 80) + function("is_long", 81),
        "lab__commands__bench": function("fits", 80),
        "lab__bench": function("is_long", 61),
        "engine__engine": f"class Engine:\n{' ' * 4}def fits():\n" + "        pass\n" * 59,
    }
    found = measure.long_functions(measure.read_sources(write(tmp_path, **texts)))
    assert found == ["cli/app.py:is_long has 81 lines", "lab/bench.py:is_long has 61 lines"]


def test_classes_of_too_many_methods_are_named(measure: ModuleType, tmp_path: Path) -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(21))
    package = write(tmp_path, a=f"class Engine:\n{methods}", b=f"class Other:\n{methods}")
    assert measure.large_classes(measure.read_sources(package)) == ["b.py:Other has 21 methods"]


def test_a_chain_breaks_where_a_function_is_gone_or_names_another(
    measure: ModuleType, tmp_path: Path
) -> None:
    package = write(
        tmp_path,
        a="def start(x):\n    return run(x)\n",
        b="class Runner:\n    def run(self):\n        self.step()\n    def step(self): ...\n",
    )
    sources = measure.read_sources(package)
    assert (
        measure.broken_links(sources, ["a.py:start", "b.py:Runner.run", "b.py:Runner.step"]) == []
    )
    broken = measure.broken_links(sources, ["a.py:start", "b.py:Runner.step", "b.py:Runner.gone"])
    assert broken == [
        "b.py:Runner.gone is not there",
        "a.py:start does not lead to b.py:Runner.step",
    ]


BODY = """
def {name}({given}):
    {first} = [each.number for each in {given} if each.number > {limit}]
    {second} = {{"one": {first}[0], "two": {first}[1]}}
    for key, value in {second}.items():
        print(key, value, sep="{text}", end=", ")
    if not {first}:
        raise ValueError("{text}")
    return sum({first}) / len({first})
"""
ONE = {"name": "f", "given": "a", "first": "b", "second": "c", "limit": 3, "text": "d"}
TWO = {"name": "g", "given": "h", "first": "i", "second": "j", "limit": 4, "text": "k"}


def test_the_same_lines_with_other_names_are_a_pair(measure: ModuleType) -> None:
    one, two = BODY.format(**ONE), "import os\n" + BODY.format(**TWO)
    assert measure.duplicate_pairs({"one.py": one, "two.py": two}) == ["one.py:3 ~ two.py:4"]
    assert measure.duplicate_pairs({"one.py": one + two}) == ["one.py:3 ~ one.py:13"]


def test_fewer_lines_or_a_list_of_fields_are_no_pair(measure: ModuleType) -> None:
    one, two = BODY.format(**ONE), BODY.format(**TWO)
    cut = "\n".join(two.splitlines()[:6])
    fields = "class A:\n" + "".join(f"    field{n}: list[int] = field(0, {n})\n" for n in range(9))
    fields += "def f(\n" + "".join(f"    a{n}: dict[str, int] = {{}},\n" for n in range(9))
    fields += "):\n    pass\n"
    assert measure.duplicate_pairs({"one.py": one, "two.py": cut}) == []
    assert measure.duplicate_pairs({"one.py": fields, "two.py": fields}) == []


@pytest.mark.parametrize("lazily", [False, True])
def test_a_circle_of_imports_is_named(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lazily: bool
) -> None:
    back = "def f():\n    import house.a.one\n" if lazily else "import house.a.one\n"
    write(tmp_path / f"house{lazily}" / "house", __init__="", a__one="import house.b\n", b=back)
    (tmp_path / f"house{lazily}" / "house" / "a" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / f"house{lazily}")
    assert set(measure.circle("house")) >= {"house.a.one", "house.b"}


def test_this_checkout_is_counted(measure: ModuleType) -> None:
    root = Path(__file__).parent.parent
    found = {finding.what: finding for finding in measure.measure(root)}
    assert found["broken links of that chain"].where == []
    files = set(root.glob("spot_batch/**/*.py")) - set(root.glob("spot_batch/lab/**/*.py"))
    counted = sum(len(file.read_text().splitlines()) for file in files)
    assert found["lines without the laboratory"].number == counted
