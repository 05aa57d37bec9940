"""What each benchmark measures: the keys of its YAML files, each an option of the same name.

Nothing heavy is imported here: the command line makes its options of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from spot_batch.job.limits import checked_temperature
from spot_batch.terminal.options import numbers

MOST_SEED = 2**64 - 1

Read = Callable[[str, Any], Any]
"""(what the key is called, what was given for it) -> its value. Raises ValueError naming it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """How a grid's key is read and what it is as an option.

    `kind`: the option's type, None where a file alone can say it. `help`: "" for a key that few
    need, which `--help` leaves out. `names`: the option's names where they are not the key's own.
    """

    read: Read
    kind: type | None
    help: str
    names: tuple[str, ...] = ()


def _key(
    read: Read, default: Any, help: str = "", *, kind: type | None = str, names: Any = ()
) -> Any:
    key = Key(read=read, kind=kind, help=help, names=tuple(names))
    return field(default=default, metadata={"key": key})


def key_of(one: Any) -> Key:
    """The key of a grid's dataclass field."""
    found = one.metadata["key"]
    assert isinstance(found, Key)
    return found


# -- how values are read ---------------------------------------------------------------------------


def _text(name: str, given: Any) -> str:
    if isinstance(given, bool | list | dict) or given is None:
        raise ValueError(f"{name} must be a text, got {given!r}")
    return str(given)


def _path(name: str, given: Any) -> Path:
    return Path(_text(name, given))


def _flag(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"{name} must be true or false, got {given!r}")
    return given


def _one_of(*known: str) -> Read:
    def read(name: str, given: Any) -> str:
        # YAML takes a bare `on` or `off` for a boolean.
        text = {True: "on", False: "off"}[given] if isinstance(given, bool) else given
        if text not in known:
            raise ValueError(f"{name} must be {' or '.join(known)}, got {given!r}")
        return str(text)

    return read


def _whole(least: int) -> Read:
    def read(name: str, given: Any) -> int:
        if type(given) is not int or given < least:
            raise ValueError(f"{name} must be a whole number from {least}, got {given!r}")
        return given

    return read


def _seconds(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0.0:
        raise ValueError(f"{name} must be a number above 0, got {given!r}")
    return float(given)


def _by_comma(given: Any) -> str:
    return ",".join(map(str, given)) if isinstance(given, list) else str(given)


def _texts(name: str, given: Any) -> tuple[str, ...]:
    del name
    return tuple(dict.fromkeys(each.strip() for each in _by_comma(given).split(",")))


def _numerics(name: str, given: Any) -> tuple[str, ...]:
    kinds = _texts(name, given)
    if not set(kinds) <= {"canonical", "fast"}:
        raise ValueError(f"{name} must be canonical, fast, or both by comma, got {given!r}")
    return kinds


def _wholes(least: int, most: int | None = None) -> Read:
    def read(name: str, given: Any) -> tuple[int, ...]:
        return tuple(numbers(_by_comma(given), int, name, least=least, most=most))

    return read


def _floors(name: str, given: Any) -> tuple[float, ...]:
    return tuple(numbers(_by_comma(given), float, name, least=0.0, most=1.0, may_be_empty=True))


def read_temperatures(name: str, given: Any) -> tuple[float, ...]:
    """Temperatures that a job may have too."""
    found = numbers(_by_comma(given), float, name)
    return tuple(_temperature(name, each) for each in found)


def _temperature(name: str, given: Any) -> float:
    try:
        return checked_temperature(float(given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def _budgets(name: str, given: Any) -> tuple[int | Literal["auto"], ...]:
    found = _texts(name, given)
    for text in found:
        if text != "auto" and not text.isdecimal():
            raise ValueError(f"{name} wants whole numbers or auto by comma, got {given!r}")
    return tuple(dict.fromkeys("auto" if text == "auto" else int(text) for text in found))


def _lengths(name: str, given: Any) -> tuple[int | None, ...]:
    found = _texts(name, given)
    for text in found:
        if text != "end" and not (text.isdecimal() and int(text)):
            raise ValueError(f"{name} wants `end` and numbers of tokens, got {text!r}")
    return tuple(None if text == "end" else int(text) for text in found)


_PUBLISHED = ("task", "method", "budget", "temperature", "nfe_ratio")


def _published(name: str, given: Any) -> tuple[Mapping[str, Any], ...]:
    """A list of other people's figures."""
    if not isinstance(given, list):
        raise ValueError(f"{name} must be a list, got {given!r}")
    for at, each in enumerate(given):
        if not isinstance(each, dict) or not set(_PUBLISHED) <= each.keys():
            raise ValueError(f"{name}[{at}] must have {', '.join(_PUBLISHED)}, got {each!r}")
        for part in ("budget", "temperature"):
            if not isinstance(each[part], int | float) or isinstance(each[part], bool):
                raise ValueError(f"{name}[{at}].{part} must be a number, got {each[part]!r}")
    return tuple(given)


# -- the grids -------------------------------------------------------------------------------------

TASKS_HELP = "synthetic, gsm8k, mbpp, humaneval, math500."


def _limit(count: int) -> Any:
    return _key(_whole(1), count, "Only the first prompts (of each task).", kind=int)


def _length(count: int) -> Any:
    return _key(_whole(1), count, "The longest answer.", kind=int)


def _in_flight(*numbers_of: int) -> Any:
    return _key(_wholes(1), numbers_of, "Samples in flight, by comma.")


def _heats(*heats: float, names: Iterable[str] = ()) -> Any:
    return _key(read_temperatures, heats, "By comma; 0 is greedy.", names=names)


def _unmasking() -> Any:
    return _key(_one_of("single", "threshold"), "single", "single or threshold.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What every benchmark of a model has. `SHARED`: the keys that all cells have in common, which
    a folder of cells is checked by."""

    SHARED: ClassVar[tuple[str, ...]] = ()

    model: str = _key(_text, "bundled", "Hub id, folder, or a packaged one.")
    drafter: str = _key(_text, "auto", "auto, ranking, or a drafter's path.")
    device: str = _key(_text, "auto", "auto (a GPU where there is one), cpu or cuda.")
    threads: int = _key(_whole(1), 1, "CPU threads.", kind=int)
    dtype: str = _key(_text, "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyGrid(Grid):
    drafter: str = _key(_text, "auto", "auto, ranking, none, or a path.")
    numerics: str = _key(_one_of("canonical", "fast"), "canonical")
    max_slots: int = _key(_whole(1), 64, "The largest forward.", kind=int)
    seconds: float = _key(_seconds, 20.0, "Time to measure in.", kind=float)
    random_weights: bool = _key(
        _flag, False, "Only the model's shape counts; nothing is fetched.", kind=bool
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGrid(Grid):
    """What every benchmark that decodes has besides."""

    seeds: tuple[int, ...] = _key(_wholes(0, MOST_SEED), (0,), "Of the noise, by comma.")
    limit: int = _limit(20)
    max_new_tokens: int = _length(128)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptGrid(SampleGrid):
    """What a benchmark on the prompts of a file has besides."""

    input: Path | None = _key(
        _path, None, "JSON lines of prompts; packaged ones.", kind=Path, names=("-i", "--input")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactGrid(PromptGrid):
    SHARED: ClassVar[tuple[str, ...]] = ("max_new_tokens",)

    max_new_tokens: int = _length(64)
    temperatures: tuple[float, ...] = _heats(0.0, 1.0)
    budgets: tuple[int, ...] = _key(_wholes(1), (8, 20), "Drafted slots, by comma.")
    gammas: tuple[float, ...] = _key(_floors, (0.1,), "Mass floors, each at the last budget.")
    sequences: tuple[int, ...] = _in_flight(1, 7, 32)
    numerics: tuple[str, ...] = _key(_numerics, ("canonical", "fast"), "canonical, fast, or both.")
    crossing: str = _key(_one_of("on", "off", "both"), "on", "on, off, or both.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockedGrid(PromptGrid):
    """What a benchmark of speed has besides: one temperature and one rule for all its cells."""

    temperature: float = _key(_temperature, 0.0, kind=float)
    unmasking: str = _unmasking()


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputGrid(ClockedGrid):
    SHARED: ClassVar[tuple[str, ...]] = (
        *("unmasking", "temperature", "max_new_tokens", "passes", "plain_passes", "turn_seconds"),
    )

    limit: int = _limit(200)
    sequences: tuple[int, ...] = _in_flight(1, 2, 4, 8, 16, 64)
    budgets: tuple[int | Literal["auto"], ...] = _key(
        _budgets, (0, 2, 8, "auto"), "Drafted slots a sample, or auto."
    )
    gammas: tuple[float, ...] = _key(_floors, (), "Mass floors, each at the largest budget.")
    passes: int = _key(_whole(2), 10, kind=int)
    plain_passes: int = _key(
        _whole(0), 2, "Batches of the plain loop over transformers; 0: none.", kind=int
    )
    turn_seconds: float = _key(_seconds, 1.0, kind=float)
    table: Path | None = _key(_path, None, "A latency table; else measured.", kind=Path)

    def __post_init__(self) -> None:
        if self.gammas and not self.largest_budget:
            raise ValueError(f"gammas want a fixed budget among the budgets, got {self.budgets}")
        if self.plain_passes == 1 or self.plain_passes > self.passes:
            raise ValueError(
                f"plain_passes must be 0, or from 2 to passes, {self.passes}, "
                f"got {self.plain_passes}"
            )

    @property
    def largest_budget(self) -> int:
        return max((each for each in self.budgets if each != "auto"), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateGrid(ClockedGrid):
    SHARED: ClassVar[tuple[str, ...]] = (
        "unmasking",
        "temperature",
        "max_new_tokens",
        "rounds",
        "budgets",
    )

    limit: int = _limit(32)
    max_new_tokens: int = _length(96)
    tables: tuple[str, ...] = _key(
        _texts, ("h200-1.7b", "h200-8b"), "h200-1.7b, h200-8b, or files that `bench latency` wrote."
    )
    sequences: tuple[int, ...] = _in_flight(1, 8, 32, 128)
    budgets: tuple[int, ...] = _key(_wholes(0), (1, 2, 4, 8, 20), "Fixed budgets to compare.")
    rounds: int = _key(_whole(1), 200, "Rounds of each, after the first eight.", kind=int)


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancyGrid(ClockedGrid):
    SHARED: ClassVar[tuple[str, ...]] = (
        *("samples", "sequences", "actors", "order", "temperature", "unmasking"),
    )

    limit: int = _limit(64)
    max_new_tokens: int = _length(32)
    min_new_tokens: int = _key(_whole(1), 4, kind=int)
    clock: str = _key(_text, "device", "device, h200-1.7b, h200-8b, or a file of `bench latency`.")
    samples: int = _key(_whole(1), 2000, "Rows of the job.", kind=int)
    sequences: int = _key(_whole(1), 8, "Samples in flight of an actor.", kind=int)
    actors: int = _key(_whole(1), 1, kind=int)
    budgets: tuple[int | Literal["auto"], ...] = _key(
        _budgets, (0, "auto"), "Drafted slots a sample, or auto."
    )
    order: str = _key(_one_of("longest_first", "input"), "longest_first", "longest_first or input.")
    plot: bool = _key(_flag, False, "The tail's curve as bars.", kind=bool)

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be from 1 to max_new_tokens, {self.max_new_tokens}, "
                f"got {self.min_new_tokens}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskGrid(SampleGrid):
    """What a benchmark on tasks has besides."""

    tasks: tuple[str, ...] = _key(_texts, ("synthetic",), TASKS_HELP, names=("--tasks", "--task"))
    data: Path | None = _key(
        _path, None, "A folder with the tasks' JSON-lines files, not the hub.", kind=Path
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NfeGrid(TaskGrid):
    SHARED: ClassVar[tuple[str, ...]] = ("limit", "max_new_tokens")

    methods: tuple[str, ...] = _key(
        _texts,
        (
            *("spot", "spot-gamma", "spiffy", "ssd", "blockspec"),
            *("ranking", "position-oracle", "full-oracle"),
        ),
        "By comma.",
    )
    budgets: tuple[int, ...] = _key(_wholes(1), (8, 20), "Drafted slots, by comma.")
    temperatures: tuple[float, ...] = _heats(0.0, 1.0)
    lengths: tuple[int | None, ...] = _key(
        _lengths, (None,), "`end`, or fixed numbers of tokens, by comma."
    )
    calibrate_on: int = _key(
        _whole(1), 50, "Training prompts that the baselines are calibrated on.", kind=int
    )
    calibration: Path | None = _key(
        _path, None, "JSON lines of training prompts; the synthetic corpus'.", kind=Path
    )
    spiffy: Path | None = _key(_path, None, "A file of `calibrate spiffy`.", kind=Path)
    live: int = _key(_whole(0), 20, "Run one cell in so many live too; 1 all, 0 none.", kind=int)
    published: tuple[Mapping[str, Any], ...] = _key(_published, (), kind=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderGrid(TaskGrid):
    SHARED: ClassVar[tuple[str, ...]] = ("limit", "max_new_tokens", "budgets")

    drafter: str = _key(_text, "auto", "Set beside the oracles: auto, ranking, none, or a path.")
    temperatures: tuple[float, ...] = _heats(0.0, names=("--temperatures", "--temperature"))
    budgets: tuple[int, ...] = _key(_wholes(1), (8, 20), "Of the oracles, by comma.")
    plot: Path | None = _key(
        _path, None, "Write the figures as a PNG, of one recording.", kind=Path
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreGrid(TaskGrid):
    SHARED: ClassVar[tuple[str, ...]] = ("budget", "limit", "max_new_tokens")

    budget: int = _key(_whole(1), 8, "Drafted slots a sample.", kind=int)
    temperatures: tuple[float, ...] = _heats(0.0)
    run_code: bool = _key(
        _flag, False, "Run the programs that the model wrote, in limits.", kind=bool
    )


GridT = TypeVar("GridT", bound=Grid)


def read_grid(kind: type[GridT], path: Path | None, given: Mapping[str, Any]) -> GridT:
    """A YAML file's grid under the options that were given. Raises ValueError naming a bad key."""
    known = {each.name: key_of(each) for each in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in _document(path).items():
        if name not in known:
            raise ValueError(f"{path}: unknown key {name!r}; there are {', '.join(known)}")
        values[name] = known[name].read(f"{path}: {name}", value)
    for name, value in given.items():
        if value is not None:
            values[name] = known[name].read(f"--{name.replace('_', '-')}", value)
    return kind(**values)


def _document(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read ({said})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: want keys and values")
    return found
