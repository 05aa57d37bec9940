"""Counts what the code promises of its own shape, and says where a promise is not kept.

The exit code is 1 where a number is missed.
"""

from __future__ import annotations

import ast
import graphlib
import io
import itertools
import keyword
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PACKAGE = "spot_batch"
LABORATORY = "lab"
COMMANDS = ("cli", "lab/commands")  # a command line's function is mostly its options

MOST_LINES = 19_500  # of the package without its laboratory
MOST_FUNCTION_LINES = 60
MOST_COMMAND_LINES = 80
MOST_METHODS = 20
MAY_HAVE_MORE_METHODS = ("Engine",)
MOST_HOPS = 12
MOST_DUPLICATES = 40

RUN_LINES = 6  # so many lines alike make a duplicate,
RUN_TOKENS = 32  # where they say this much: a list of fields says less
MOST_PLACES = 8  # what stands in more places is the shape of the language

# From the command to the forward, below spot_batch/: each function names the next one. Behind the
# last one is the network's own forward, which is transformers'; a GPU replays a graph of it.
CHAIN = (
    "cli/job.py:submit",
    "cli/running.py:run_or_follow",
    "service/run.py:run_job",
    "service/run.py:_Run.keep_actors_busy",
    "service/fleet.py:Fleet.exchange",
    "service/actor.py:Actor.exchange",
    "service/actor.py:Actor._run",
    "engine/engine.py:Engine.step",
    "engine/rows.py:CacheRows.forward",
    "models/block.py:BlockTarget.forward",
    "models/buckets.py:BucketRunner.forward",
)
NUM_HOPS = len(CHAIN) + 1
# From one thread to another there is no call: both functions name this.
HANDED_OVER = {"service/actor.py:Actor.exchange": "_intake"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A module of the package."""

    name: str  # below the package, with slashes
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split("/")[0] if "/" in self.name else "(top)"

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


class Finding(NamedTuple):
    """One number, what it may be at most, and where it comes from."""

    what: str
    number: int
    most: int
    where: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        return self.number <= self.most


def read_sources(package: Path) -> list[Source]:
    """The modules of a package, by name."""
    sources = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        name = path.relative_to(package).as_posix()
        sources.append(Source(name=name, text=text, tree=ast.parse(text, name)))
    return sources


def lines_of_rooms(sources: Sequence[Source]) -> Counter[str]:
    """The lines of each package below the root."""
    counted: Counter[str] = Counter()
    for source in sources:
        counted[source.room] += source.num_lines
    return counted


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """(qualified name, function), those inside classes and functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        within = f"{prefix}{node.name}." if isinstance(node, _ROOMS) else prefix
        yield from functions(node, within)


_ROOMS = (ast.FunctionDef, ast.ClassDef)


def long_functions(sources: Sequence[Source]) -> list[str]:
    """Functions of more lines than their room allows; a decorator does not count."""
    found = []
    for source in sources:
        is_command = source.name.startswith(tuple(f"{room}/" for room in COMMANDS))
        most = MOST_COMMAND_LINES if is_command else MOST_FUNCTION_LINES
        for name, node in functions(source.tree):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > most:
                found.append(f"{source.name}:{name} has {num_lines} lines")
    return found


def large_classes(sources: Sequence[Source]) -> list[str]:
    """Classes of too many methods, those apart that may have them."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ClassDef) or node.name in MAY_HAVE_MORE_METHODS:
                continue
            num_methods = sum(isinstance(each, ast.FunctionDef) for each in node.body)
            if num_methods > MOST_METHODS:
                found.append(f"{source.name}:{node.name} has {num_methods} methods")
    return found


def broken_links(sources: Sequence[Source], chain: Sequence[str]) -> list[str]:
    """Where a function of the chain is not there, or does not name the one after it."""
    trees = {source.name: source.tree for source in sources}
    bodies: list[ast.AST | None] = []
    for link in chain:
        file, _, name = link.partition(":")
        bodies.append(dict(functions(trees[file])).get(name) if file in trees else None)
    broken = [f"{link} is not there" for link, body in zip(chain, bodies, strict=True) if not body]
    for (link, body), (after, next_body) in itertools.pairwise(zip(chain, bodies, strict=True)):
        if body is None or next_body is None:
            continue
        shared = HANDED_OVER.get(link)
        wanted = shared or after.rpartition(":")[2].rpartition(".")[2]
        if wanted not in _names_in(body) or (shared and shared not in _names_in(next_body)):
            broken.append(f"{link} does not lead to {after}")
    return broken


def _names_in(body: ast.AST) -> set[str]:
    nodes = list(ast.walk(body))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def duplicate_pairs(texts: Mapping[str, str]) -> list[str]:
    """Pairs of files that share a run of lines, and files that repeat one, whatever they name.

    Names, strings and numbers do not count, nor do blank lines, comments, imports, docstrings,
    lines of punctuation alone, the signatures of functions and the declarations of fields: two
    types of like fields repeat no code. (pylint leaves signatures out too.)
    """
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    shaped = {name: _shapes(text) for name, text in texts.items()}
    for name, lines in shaped.items():
        for start in range(len(lines) - RUN_LINES + 1):
            run = tuple(shape for _, shape in lines[start : start + RUN_LINES])
            if sum(len(shape.split()) for shape in run) >= RUN_TOKENS:
                places[run].append((name, start))
    first: dict[tuple[str, str], str] = {}
    for found in places.values():
        if len(found) > MOST_PLACES:
            continue
        for (name, start), (other, at) in itertools.combinations(found, 2):
            if name == other and at - start < RUN_LINES:
                continue
            line, other_line = shaped[name][start][0], shaped[other][at][0]
            first.setdefault((name, other), f"{name}:{line} ~ {other}:{other_line}")
    return sorted(first.values())


def _shapes(text: str) -> list[tuple[int, str]]:
    """(line, its tokens without names) of the lines that count."""
    lines: dict[int, list[str]] = defaultdict(list)
    declared = _declarations(text)
    docstring_may_follow = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT:
            continue
        if docstring_may_follow and token.type == tokenize.STRING:
            continue
        docstring_may_follow = token.string == ":"
        lines[token.start[0]].append(_shape(token))
    return [
        (number, " ".join(shapes))
        for number, shapes in sorted(lines.items())
        if number not in declared
        and shapes[0] not in ("import", "from")
        and any(map(str.isalnum, shapes))
    ]


def _declarations(text: str) -> set[int]:
    """The lines of signatures, with what decorates them, and of the annotated fields of classes."""
    declared: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(each.lineno for each in (node, *node.decorator_list))
            declared.update(range(first, max(first + 1, node.body[0].lineno)))
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    declared.update(range(field.lineno, (field.end_lineno or field.lineno) + 1))
    return declared


_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _shape(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
        return "name"
    if token.type in (tokenize.NUMBER, tokenize.STRING):
        return "value"
    return token.string


def circle(package: str) -> list[str]:
    """The modules of one import circle, [] where there is none; lazy imports count.

    A module needs the packages that it lies in, the root apart, which loads nothing by itself.
    """
    import grimp

    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    needs: dict[str, set[str]] = {}
    for module in graph.modules:
        parts = module.split(".")
        rooms = {".".join(parts[:end]) for end in range(2, len(parts))}
        needs[module] = graph.find_modules_directly_imported_by(module) | rooms
        needs[module] -= {package}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def measure(root: Path) -> list[Finding]:
    """All the numbers of a checkout."""
    sources = read_sources(root / PACKAGE)
    rooms = lines_of_rooms(sources)
    long, large = long_functions(sources), large_classes(sources)
    hops = [f"{number:2} {link}" for number, link in enumerate((*CHAIN, "the network's own"), 1)]
    broken = broken_links(sources, CHAIN)
    pairs = duplicate_pairs({source.name: source.text for source in sources})
    modules = circle(PACKAGE)
    by_room = [f"{lines:6,} {room}" for room, lines in rooms.most_common()]
    return [
        Finding(
            "lines without the laboratory", rooms.total() - rooms[LABORATORY], MOST_LINES, by_room
        ),
        Finding("functions that are too long", len(long), 0, long),
        Finding("classes of too many methods", len(large), 0, large),
        Finding("functions from the command to the forward", NUM_HOPS, MOST_HOPS, hops),
        Finding("broken links of that chain", len(broken), 0, broken),
        Finding("pairs of duplicates", len(pairs), MOST_DUPLICATES, pairs),
        Finding("import circles", int(bool(modules)), 0, modules),
    ]


def main() -> int:
    """Print every number; the exit code says whether all promises are kept."""
    root = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root))
    findings = measure(root)
    for finding in findings:
        mark = "    " if finding.holds else "MISS"
        print(f"{mark} {finding.number:6,} {finding.what} (at most {finding.most:,})")
        for where in finding.where:
            print(f"                {where}")
    return 0 if all(finding.holds for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
