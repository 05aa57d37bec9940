"""`spot-batch bench`: measurements that anyone can run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spot_batch.lab.commands.measuring import (
    Address,
    Device,
    DrafterOption,
    Dtype,
    Inputs,
    JsonFile,
    Length,
    Limit,
    Model,
    Out,
    Seeds,
    Sequences,
    Temperatures,
    Threads,
    seeds_of,
    spread_to,
    temperatures_of,
    write_rows,
)
from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import check_writable, numbers

if TYPE_CHECKING:
    from spot_batch.checkpoints.registry import ModelInfo
    from spot_batch.engine.latency import LatencyTable
    from spot_batch.lab.bench.exact import Drafting
    from spot_batch.lab.bench.loading import Models
    from spot_batch.lab.bench.occupancy import Occupancy
    from spot_batch.records.sampling import SamplingParams

Unmask = Annotated[str, typer.Option(help="single or threshold.")]

bench = typer.Typer(help="Measurements that anyone can run.", no_args_is_help=True)


@bench.command("exact")
@plain_errors
def exact(
    inputs: Inputs = None,
    model: Model = "bundled",
    drafter: DrafterOption = "auto",
    limit: Limit = 20,
    temperatures: Temperatures = "0,1",
    seeds: Seeds = "0",
    budgets: Annotated[str, typer.Option(help="Drafted slots, by comma.")] = "8,20",
    gammas: Annotated[str, typer.Option(help="Mass floors, each at the last budget.")] = "0.1",
    sequences: Sequences = "1,7,32",
    numerics: Annotated[str, typer.Option(help="canonical, fast, or both.")] = "canonical,fast",
    crossing: Annotated[str, typer.Option(help="on, off, or both.")] = "on",
    max_new_tokens: Length = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = 1,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
) -> int:
    """Compare drafted outputs with draft-free ones token for token, and count forwards saved."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from spot_batch.lab.bench.exact import ExactBenchmark, ExactCell, ExactRow
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.questions import read_questions
    from spot_batch.lab.bench.running import Kept, digest_of, run_cells

    kinds = list(dict.fromkeys(numerics.split(",")))
    if not set(kinds) <= {"canonical", "fast"}:
        raise ValueError(f"--numerics must be canonical, fast, or both by comma, got {numerics!r}")
    draftings = _draftings(budgets, gammas, crossing)
    flights = numbers(sequences, int, "sequences", least=1)
    groups = [
        [
            ExactCell(
                numerics=kind, temperature=heat, seed=seed, sequences=number, drafting=drafting
            )
            for number, drafting in product(flights, draftings)
        ]
        for kind, heat, seed in product(kinds, temperatures_of(temperatures), seeds_of(seeds))
    ]
    check_writable(json_file, "--json")
    models = find_models(model, drafter, dtype=dtype, threads=threads, device=device)
    models.some_drafter()
    questions = read_questions(inputs, limit=limit)
    _say(models, f"{len(questions)} prompts")
    facts = {
        "command": "bench exact",
        **models.facts(),
        "prompts": digest_of(questions),
        "max_new_tokens": max_new_tokens,
    }
    kept = Kept(out, ExactRow, facts)
    benchmark = ExactBenchmark(
        models=models, questions=questions, draftings=draftings, max_new_tokens=max_new_tokens
    )
    for row in run_cells(benchmark, groups, kept, spread=spread_to(address, models)):
        typer.echo(
            f"{row.cell}: {row.num_differ} of {row.num_compared} differ, {row.nfe_ratio:.2f}x "
            f"fewer forwards ({row.nfe:.1f} against {row.draft_free_nfe:.1f})"
        )
    rows = [kept.rows[cell] for group in groups for cell in group]
    write_rows(json_file, facts, rows)
    canonical = [row for row in rows if row.numerics == "canonical"]
    num_differ = sum(row.num_differ for row in canonical)
    if canonical:
        num_compared = sum(row.num_compared for row in canonical)
        typer.echo(f"canonical: {num_compared} sequences compared, {num_differ} differ")
    return 1 if num_differ else 0


def _draftings(budgets: str, gammas: str, crossing: str) -> dict[str, Drafting]:
    """Ways to draft, by name, each once. Raises ValueError naming an option."""
    from spot_batch.lab.bench.exact import Drafting

    sizes = numbers(budgets, int, "budgets", least=1)
    floors = numbers(gammas, float, "gammas", least=0.0, most=1.0, may_be_empty=True)
    crossings = {"on": [True], "off": [False], "both": [True, False]}
    if crossing not in crossings:
        raise ValueError(f"--crossing must be on, off or both, got {crossing!r}")
    pairs = [*((size, 0.0) for size in sizes), *((sizes[-1], floor) for floor in floors)]
    found = [
        Drafting(budget=budget, gamma=gamma, crossing=over)
        for budget, gamma in pairs
        for over in crossings[crossing]
    ]
    return {each.name: each for each in found}


@bench.command("latency")
@plain_errors
def latency(
    model: Model = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, none, or a path.")] = "auto",
    numerics: Annotated[str, typer.Option(help="canonical or fast.")] = "canonical",
    max_slots: Annotated[int, typer.Option(help="The largest forward.")] = 64,
    seconds: Annotated[float, typer.Option(help="Time to measure in.")] = 20.0,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Only the model's shape counts; nothing is fetched."),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> int:
    """Measure what forwards, drafts and visited states cost on this device."""
    if numerics not in ("canonical", "fast"):
        raise ValueError(f"--numerics must be canonical or fast, got {numerics!r}")
    if max_slots < 1:
        raise ValueError(f"--max-slots must be at least 1, got {max_slots}")
    if not seconds > 0.0:
        raise ValueError(f"--seconds must be above 0, got {seconds}")
    check_writable(json_file, "--json")
    from spot_batch.engine.latency import measure_latency
    from spot_batch.lab.bench.loading import find_models

    models = find_models(
        model,
        drafter,
        dtype=dtype,
        threads=threads,
        device=device,
        random_weights=random_weights,
    )
    target = models.target(canonical=numerics == "canonical")
    _say(models)
    table = measure_latency(target, models.drafter(), max_slots=max_slots, at_most_s=seconds)
    _show_latency(table)
    if json_file is not None:
        json_file.write_text(table.to_json(), encoding="utf-8")
    return 0


@bench.command("throughput")
@plain_errors
def throughput(
    inputs: Inputs = None,
    model: Model = "bundled",
    drafter: DrafterOption = "auto",
    sequences: Sequences = "1,2,4,8,16,64",
    budgets: Annotated[str, typer.Option(help="Drafted slots a sample, or auto.")] = "0,2,8,auto",
    gammas: Annotated[str, typer.Option(help="Mass floors, each at the largest budget.")] = "",
    unmasking: Unmask = "single",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seeds: Seeds = "0",
    max_new_tokens: Length = 128,
    passes: Annotated[int, typer.Option(help="Turns of each.")] = 10,
    plain_passes: Annotated[
        int, typer.Option(help="Batches of the plain loop over transformers; 0: none.")
    ] = 2,
    turn_seconds: Annotated[float, typer.Option(help="Length of a turn, in seconds.")] = 1.0,
    limit: Limit = 200,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = 1,
    table: Annotated[Path | None, typer.Option(help="A latency table; else measured.")] = None,
    out: Out = None,
    json_file: JsonFile = None,
) -> int:
    """Rows a second of each budget against the fastest draft-free build, turn by turn."""
    wanted = list(dict.fromkeys(_budget(text) for text in budgets.split(",")))
    flights, numbered = numbers(sequences, int, "sequences", least=1), seeds_of(seeds)
    floors = numbers(gammas, float, "gammas", least=0.0, most=1.0, may_be_empty=True)
    largest = max((each for each in wanted if each != "auto"), default=0)
    if floors and not largest:
        raise ValueError(f"--gammas wants a fixed budget in --budgets, got {budgets!r}")
    _check_unmasking(unmasking)
    if passes < 2:
        raise ValueError(f"--passes must be at least 2, got {passes}")
    if plain_passes and not 2 <= plain_passes <= passes:
        raise ValueError(
            f"--plain-passes must be 0, or from 2 to --passes {passes}, got {plain_passes}"
        )
    if not turn_seconds > 0.0:
        raise ValueError(f"--turn-seconds must be above 0, got {turn_seconds}")
    check_writable(json_file, "--json")
    import transformers

    from spot_batch.lab.bench.loading import device_name, find_models
    from spot_batch.lab.bench.plain import FAMILY
    from spot_batch.lab.bench.questions import read_questions
    from spot_batch.lab.bench.running import Kept, digest_of, digest_of_files, run_cells
    from spot_batch.lab.bench.throughput import (
        BASELINE,
        CANONICAL,
        PLAIN,
        ThroughputBenchmark,
        ThroughputCell,
        ThroughputRow,
        Way,
    )

    ways = [*map(Way, wanted), *(Way(largest, floor) for floor in floors if floor)]
    costs = _table(table) if table is not None else None
    models = find_models(model, drafter, dtype=dtype, threads=threads, device=device)
    models.some_drafter()
    questions = read_questions(inputs, limit=limit)
    _say(models, f"{len(questions)} prompts")
    params = _params(models.info, temperature, max_new_tokens, unmasking)
    has_plain = plain_passes > 0 and models.info.family.name == FAMILY
    transformers.utils.logging.disable_progress_bar()
    facts = {
        "command": "bench throughput",
        **models.facts(),
        "device": device_name(models.device),
        "prompts": digest_of(questions),
        "unmasking": unmasking,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "passes": passes,
        "plain_passes": plain_passes,
        "turn_seconds": turn_seconds,
        "latency": digest_of_files(table) if table is not None else "measured",
        "budgets": [way.name for way in ways],
    }
    kept = Kept(out, ThroughputRow, facts)
    benchmark = ThroughputBenchmark(
        models=models,
        questions=questions,
        params=params,
        ways=ways,
        latency=costs,
        max_slots=4 * max(flights),
        num_passes=passes,
        num_plain_passes=plain_passes if has_plain else 0,
        turn_s=turn_seconds,
    )
    names = [BASELINE, CANONICAL, *(way.name for way in ways), *([PLAIN] if has_plain else [])]
    groups = [
        [ThroughputCell(number, seed, name) for name in names]
        for number, seed in product(flights, numbered)
    ]
    for row in run_cells(benchmark, groups, kept):
        typer.echo(
            f"in flight {row.sequences:3}  {row.budget:15} {row.tokens_per_s:8.1f} tokens/s  "
            f"{row.ratio_to_draft_free:.3f}x [{row.low:.3f}, {row.high:.3f}] of draft-free, "
            f"{row.ratio_to_canonical:.3f}x under the same numerics, {_host(row.host_share)}"
            f"{row.drafted_per_forward:.2f} drafted, {row.steps_per_forward:.2f} steps a forward"
        )
    write_rows(json_file, facts, [kept.rows[cell] for group in groups for cell in group])
    return 0


def _host(share: float | None) -> str:
    return "" if share is None else f"host {100 * share:.1f} %, "


@bench.command("simulate")
@plain_errors
def simulate(
    inputs: Inputs = None,
    model: Model = "bundled",
    drafter: DrafterOption = "auto",
    tables: Annotated[
        str, typer.Option(help="h200-1.7b, h200-8b, or files that `bench latency` wrote.")
    ] = "h200-1.7b,h200-8b",
    sequences: Sequences = "1,8,32,128",
    budgets: Annotated[str, typer.Option(help="Fixed budgets to compare.")] = "1,2,4,8,20",
    unmasking: Unmask = "single",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seeds: Seeds = "0",
    rounds: Annotated[int, typer.Option(help="Rounds of each, after the first eight.")] = 200,
    limit: Limit = 32,
    max_new_tokens: Length = 96,
    device: Device = "auto",
    threads: Threads = 1,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
) -> int:
    """Decode under the clock of another device: is `auto` as good as the best fixed budget?"""
    fixed = numbers(budgets, int, "budgets", least=0)
    flights = numbers(sequences, int, "sequences", least=1)
    numbered = seeds_of(seeds)
    _check_unmasking(unmasking)
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    check_writable(json_file, "--json")
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.questions import read_questions
    from spot_batch.lab.bench.running import Kept, digest_of, run_cells
    from spot_batch.lab.bench.simulate import SimulatedBenchmark, SimulatedCell, SimulatedRow

    costs = {name: _clock(name) for name in dict.fromkeys(tables.split(","))}
    models = find_models(model, drafter, threads=threads, device=device)
    models.some_drafter()
    questions = read_questions(inputs, limit=limit)
    _say(models, f"{len(questions)} prompts")
    facts = {
        "command": "bench simulate",
        **models.facts(),
        "prompts": digest_of(questions),
        "unmasking": unmasking,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "budgets": fixed,
    }
    kept = Kept(out, SimulatedRow.read, facts)
    benchmark = SimulatedBenchmark(
        models=models,
        questions=questions,
        params=_params(models.info, temperature, max_new_tokens, unmasking),
        tables=costs,
        budgets=fixed,
        num_rounds=rounds,
    )
    groups = [
        [
            SimulatedCell(name, digest_of([table.to_json()]), seed, number)
            for name, table in costs.items()
            for number in flights
        ]
        for seed in numbered
    ]
    for row in run_cells(benchmark, groups, kept, spread=spread_to(address, models)):
        cells = "  ".join(f"D {one} {ratio:.2f}" for one, ratio in row.fixed.items())
        typer.echo(
            f"{row.table}  in flight {row.sequences:3}  auto {row.auto:.3f}x of draft-free, "
            f"{row.of_best:.3f} of the best (D {row.best_fixed})  {cells}"
        )
    write_rows(json_file, facts, [kept.rows[cell] for group in groups for cell in group])
    return 0


@bench.command("occupancy")
@plain_errors
def occupancy(
    inputs: Inputs = None,
    model: Model = "bundled",
    drafter: DrafterOption = "auto",
    clock: Annotated[
        str, typer.Option(help="device, h200-1.7b, h200-8b, or a file of `bench latency`.")
    ] = "device",
    samples: Annotated[int, typer.Option(min=1, help="Rows of the job.")] = 2000,
    sequences: Annotated[int, typer.Option(min=1, help="Samples in flight of an actor.")] = 8,
    actors: Annotated[int, typer.Option(min=1, help="Actors, in one process.")] = 1,
    budgets: Annotated[str, typer.Option(help="Drafted slots a sample, or auto.")] = "0,auto",
    order: Annotated[str, typer.Option(help="longest_first or input.")] = "longest_first",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seeds: Seeds = "0",
    min_new_tokens: Annotated[int, typer.Option(help="The shortest limit of a row.")] = 4,
    max_new_tokens: Length = 32,
    limit: Limit = 64,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = 1,
    plot: Annotated[bool, typer.Option("--plot", help="The tail's curve as bars.")] = False,
    out: Out = None,
    address: Address = None,
    json_file: JsonFile = None,
) -> int:
    """How full a job keeps its slots, and what drafts do with those that fall idle at its end."""
    wanted = list(dict.fromkeys(str(_budget(text)) for text in budgets.split(",")))
    if order not in ("longest_first", "input"):
        raise ValueError(f"--order must be longest_first or input, got {order!r}")
    if not 1 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"--min-new-tokens must be from 1 to --max-new-tokens {max_new_tokens}, "
            f"got {min_new_tokens}"
        )
    numbered = seeds_of(seeds)
    check_writable(json_file, "--json")
    from spot_batch.lab.bench.loading import find_models
    from spot_batch.lab.bench.occupancy import Occupancy, OccupancyBenchmark, OccupancyCell
    from spot_batch.lab.bench.questions import read_questions
    from spot_batch.lab.bench.running import Kept, digest_of, run_cells

    table = None if clock == "device" else _clock(clock)
    models = find_models(model, drafter, dtype=dtype, threads=threads, device=device)
    models.some_drafter()
    questions = read_questions(inputs, limit=limit)
    _say(models, f"{len(questions)} prompts")
    facts = {
        "command": "bench occupancy",
        **models.facts(),
        "prompts": digest_of(questions),
        "clock": "device" if table is None else digest_of([table.to_json()]),
        "samples": samples,
        "sequences": sequences,
        "actors": actors,
        "order": order,
        "temperature": temperature,
        "new_tokens": [min_new_tokens, max_new_tokens],
    }
    kept = Kept(out, Occupancy.read, facts)
    benchmark = OccupancyBenchmark(
        models=models,
        questions=questions,
        params=_params(models.info, temperature, max_new_tokens, "single"),
        table=table,
        num_samples=samples,
        num_actors=actors,
        max_sequences=sequences,
        longest_first=order == "longest_first",
        least_new_tokens=min_new_tokens,
    )
    groups = [[OccupancyCell(name, seed)] for name in wanted for seed in numbered]
    for run in run_cells(benchmark, groups, kept, spread=spread_to(address, models)):
        _show_occupancy(run, plot=plot)
    write_rows(json_file, facts, [kept.rows[cell] for group in groups for cell in group])
    return 0


def _show_occupancy(run: Occupancy, *, plot: bool) -> None:
    typer.echo(
        f"budget {run.budget}: {run.num_samples} samples in {run.seconds:.1f} s, "
        f"{100 * run.busy_share:.1f} % of the slots busy until the tail, which is "
        f"{100 * run.tail_share:.1f} % of the time"
    )
    fastest = max((row.steps_per_s_per_sample for row in run.tail), default=1.0)
    for row in run.tail:
        bar = "#" * round(30 * row.steps_per_s_per_sample / fastest) if plot else ""
        typer.echo(
            f"  {row.in_flight:4} in flight, {row.num_rounds:4} rounds: "
            f"{row.steps_per_s_per_sample:8.1f} commits/s a sample, "
            f"{row.drafted_slots:5.2f} drafted slots  {bar}".rstrip()
        )


def _clock(name: str) -> LatencyTable:
    """A table by formula or of a file."""
    from spot_batch.lab.bench.simulate import BODIES

    return BODIES[name].table() if name in BODIES else _table(Path(name), known=BODIES)


def _budget(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"--budgets wants whole numbers or auto by comma, got {text!r}")
    return int(text)


def _table(path: Path, *, known: Iterable[str] = ()) -> LatencyTable:
    """A file of `bench latency`. Raises ValueError naming it, and the `known` names."""
    from spot_batch.engine.latency import LatencyTable

    try:
        return LatencyTable.from_json(path.read_text(encoding="utf-8"), f"{path}")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(known)
        what = f" is none of {names} and no file" if names else ": cannot be read"
        raise ValueError(f"{path}{what} ({error})") from error


def _params(
    info: ModelInfo, temperature: float, max_new_tokens: int, unmasking: str
) -> SamplingParams:
    from spot_batch.records.sampling import SamplingParams

    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        unmasking="threshold" if unmasking == "threshold" else "single",
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )


def _check_unmasking(unmasking: str) -> None:
    if unmasking not in ("single", "threshold"):
        raise ValueError(f"--unmasking must be single or threshold, got {unmasking!r}")


def _say(models: Models, *more: str) -> None:
    choice = models.choice
    typer.echo(", ".join([models.info.name, f"drafter {choice.name} ({choice.why})", *more]))


def _show_latency(table: LatencyTable) -> None:
    """Milliseconds, and the curve of the shortest prefix as bars."""
    for length, row in zip(table.num_keys, table.forward_s, strict=True):
        typer.echo(f"forwards over {length} keys a slot, ms")
        for size, seconds in zip(table.slots, row, strict=True):
            bar = "#" * max(1, round(40 * seconds / max(row)))
            typer.echo(f"  {size:5} slots {1e3 * seconds:9.2f}  {bar}")
    for what, sizes, taken in (
        ("a drafting wave", table.queries, table.draft_s),
        ("visiting, greedy", table.states, table.visit_s),
        ("visiting, with noise", table.states, table.noisy_visit_s),
    ):
        cells = "  ".join(f"{n}: {1e3 * s:.2f}" for n, s in zip(sizes, taken, strict=True))
        typer.echo(f"{what} of so many states, ms: {cells or 'no drafter'}")


@bench.command("store")
@plain_errors
def store(
    folder: Annotated[Path, typer.Argument(help="An empty folder for the job; left there.")],
    samples: Annotated[int, typer.Option(min=2, help="How many samples.")] = 1_000_000,
    lease: Annotated[int, typer.Option(min=1, help="Samples to a segment.")] = 1_000,
) -> int:
    """Measure leasing, publication, compaction and recovery with an engine that answers at once."""
    from spot_batch.lab.bench.jobdir import bench_store

    figures = bench_store(folder, num_samples=samples, lease_rows=lease)
    typer.echo(
        f"{figures.num_samples:,} samples: {figures.rows_per_s:,.0f} rows/s published and "
        f"compacted, recovery of the half-done job {figures.recovery_s:.2f} s, memory grew by "
        f"{figures.growth_mib:.0f} MiB, the end took {figures.finish_s:.1f} s"
    )
    return 0
