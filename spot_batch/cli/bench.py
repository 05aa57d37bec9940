"""`spot-batch bench`: measurements that anyone can run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spot_batch.cli.app import app, numbers, speaking_plainly

if TYPE_CHECKING:
    from collections.abc import Callable

    from spot_batch.bench.exact import ExactRow
    from spot_batch.bench.occupancy import Occupancy
    from spot_batch.decoding import Engine, LatencyTable
    from spot_batch.drafters.base import Drafter
    from spot_batch.targets.block import BlockTarget

bench = typer.Typer(help="Measurements that anyone can run.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("exact")
@speaking_plainly
def exact(
    inputs: Annotated[
        Path | None, typer.Option("-i", "--input", help="JSON lines of prompts; packaged ones.")
    ] = None,
    model: Annotated[str, typer.Option(help="Hub id, folder, or bundled.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")] = "auto",
    limit: Annotated[int, typer.Option(help="Only the first prompts.")] = 20,
    temperatures: Annotated[str, typer.Option(help="Comma-separated.")] = "0,1",
    budgets: Annotated[str, typer.Option(help="Comma-separated.")] = "8,20",
    gammas: Annotated[str, typer.Option(help="Mass floors, each at the last budget.")] = "0.1",
    sequences: Annotated[str, typer.Option(help="Samples in flight.")] = "1,7,32",
    numerics: Annotated[str, typer.Option(help="canonical, fast, or both.")] = "canonical,fast",
    crossing: Annotated[str, typer.Option(help="on, off, or both.")] = "on",
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> int:
    """Compare drafted outputs with draft-free ones token for token, and count forwards saved."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    from spot_batch.bench.exact import Drafting, compare_exact
    from spot_batch.bench.prompts import read_questions
    from spot_batch.drafters.registry import choose_drafter, load_drafter
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import resolve_model

    floors = numbers(budgets, int, "budgets")
    crossings = {"on": [True], "off": [False], "both": [True, False]}
    if crossing not in crossings:
        raise ValueError(f"--crossing must be on, off or both, got {crossing!r}")
    kinds = numerics.split(",")
    if not set(kinds) <= {"canonical", "fast"}:
        raise ValueError(f"--numerics must be canonical, fast, or both by comma, got {numerics!r}")
    draftings = [
        Drafting(budget=budget, gamma=gamma, crossing=over)
        for budget, gamma in [
            *((budget, 0.0) for budget in floors),
            *((floors[-1], gamma) for gamma in numbers(gammas, float, "gammas")),
        ]
        for over in crossings[crossing]
    ]
    torch.set_num_threads(threads)
    info = resolve_model(model)
    choice = choose_drafter(drafter, info)
    proposer = load_drafter(choice, block_length=info.block_length)
    if proposer is None:
        raise ValueError("--drafter none drafts nothing; there is nothing to compare")
    questions = read_questions(inputs, limit=limit)
    typer.echo(f"{info.name}, drafter {choice.name} ({choice.why}), {len(questions)} prompts")
    rows: list[ExactRow] = []
    for kind in kinds:
        target = load_target(info, dtype=dtype, canonical=kind == "canonical")
        for row in compare_exact(
            target,
            proposer,
            info,
            questions,
            temperatures=numbers(temperatures, float, "temperatures"),
            draftings=draftings,
            sequences=numbers(sequences, int, "sequences"),
            max_new_tokens=max_new_tokens,
        ):
            rows.append(row)
            if json_file is not None:  # after each row: a long run that is cut short leaves some
                facts = {"threads": threads, "dtype": dtype, "max_new_tokens": max_new_tokens}
                cells = [asdict(one) for one in rows]
                document = {"model": info.identity(), "drafter": choice.name, **facts}
                json_file.write_text(json.dumps({**document, "rows": cells}, indent=2) + "\n")
            typer.echo(
                f"{row.numerics:9} T {row.temperature:g}  {row.drafting:18} in flight "
                f"{row.sequences:2}: {row.num_differ} of {row.num_compared} differ, "
                f"{row.nfe_ratio:.2f}x fewer forwards ({row.nfe:.1f} against "
                f"{row.draft_free_nfe:.1f})"
            )
    canonical = [row for row in rows if row.numerics == "canonical"]
    num_differ = sum(row.num_differ for row in canonical)
    if canonical:
        num_compared = sum(row.num_compared for row in canonical)
        typer.echo(f"canonical: {num_compared} sequences compared, {num_differ} differ")
    return 1 if num_differ else 0


@bench.command("latency")
@speaking_plainly
def latency(
    model: Annotated[str, typer.Option(help="Hub id, folder, or bundled.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, none, or a path.")] = "auto",
    numerics: Annotated[str, typer.Option(help="canonical or fast.")] = "canonical",
    max_slots: Annotated[int, typer.Option(help="The largest forward.")] = 64,
    seconds: Annotated[float, typer.Option(help="Time to measure in.")] = 20.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
) -> int:
    """Measure what forwards, drafts and visited states cost on this device."""
    if max_slots < 1:
        raise ValueError(f"--max-slots must be at least 1, got {max_slots}")
    if not seconds > 0.0:
        raise ValueError(f"--seconds must be above 0, got {seconds}")
    target, proposer = _loaded(model, drafter, numerics, dtype, threads)
    from spot_batch.decoding import measure_latency

    table = measure_latency(target, proposer, max_slots=max_slots, at_most_s=seconds)
    _show_latency(table)
    if json_file is not None:
        json_file.write_text(table.to_json(), encoding="utf-8")
    return 0


@bench.command("throughput")
@speaking_plainly
def throughput(
    inputs: Annotated[
        Path | None, typer.Option("-i", "--input", help="JSON lines of prompts; packaged ones.")
    ] = None,
    model: Annotated[str, typer.Option(help="Hub id, folder, or bundled.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")] = "auto",
    sequences: Annotated[str, typer.Option(help="Samples in flight.")] = "1,2,4,8,16,64",
    budgets: Annotated[str, typer.Option(help="Drafted slots a sample, or auto.")] = "0,2,8,auto",
    unmasking: Annotated[str, typer.Option(help="single or threshold.")] = "single",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 128,
    passes: Annotated[int, typer.Option(help="Turns of each.")] = 10,
    plain_passes: Annotated[
        int, typer.Option(help="Batches of the plain loop over transformers; 0: none.")
    ] = 2,
    turn_seconds: Annotated[float, typer.Option(help="Length of a turn, in seconds.")] = 1.0,
    limit: Annotated[int, typer.Option(help="Only the first prompts.")] = 200,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    table: Annotated[Path | None, typer.Option(help="A latency table; else measured.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> int:
    """Rows a second of each budget against the fastest draft-free build, turn by turn."""
    wanted = [_budget(text) for text in budgets.split(",")]
    if unmasking not in ("single", "threshold"):
        raise ValueError(f"--unmasking must be single or threshold, got {unmasking!r}")
    if passes < 2:
        raise ValueError(f"--passes must be at least 2, got {passes}")
    if not 0 <= plain_passes <= passes:
        raise ValueError(f"--plain-passes must be from 0 to --passes {passes}, got {plain_passes}")
    flights = numbers(sequences, int, "sequences")
    target, proposer = _loaded(model, drafter, "canonical", dtype, threads)
    if proposer is None:
        raise ValueError("--drafter none drafts nothing; there is nothing to compare")
    import transformers

    from spot_batch.bench.plain import FAMILY, PlainLoop
    from spot_batch.bench.prompts import make_requests, read_questions
    from spot_batch.bench.throughput import device_name, measure_throughput
    from spot_batch.decoding import LatencyTable, measure_latency
    from spot_batch.records import SamplingParams
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import resolve_model

    info = resolve_model(model)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        unmasking=unmasking,  # type: ignore[arg-type]
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
    requests = make_requests(info, read_questions(inputs, limit=limit), params)
    if table is None:
        costs = measure_latency(target, proposer, max_slots=4 * max(flights), at_most_s=12.0)
    else:
        costs = LatencyTable.from_json(table.read_text(encoding="utf-8"), f"{table}")
    fast = load_target(info, dtype=dtype, canonical=False)
    loop = None
    transformers.utils.logging.disable_progress_bar()
    if plain_passes and info.family.name == FAMILY:
        loop = PlainLoop(info, dtype=target.dtype, device=target.device)
    rows, of_plain = [], []
    for number in flights:
        measured, beside = measure_throughput(
            target,
            fast,
            proposer,
            costs,
            requests,
            sequences=number,
            budgets=wanted,
            num_passes=passes,
            turn_s=turn_seconds,
            plain=loop,
            num_plain_passes=plain_passes,
        )
        if beside is not None:
            of_plain.append(asdict(beside))
            typer.echo(
                f"in flight {beside.sequences:3}  plain loop      {beside.tokens_per_s:8.1f} "
                f"tokens/s  {beside.ratio_to_draft_free:.3f}x [{beside.low:.3f}, "
                f"{beside.high:.3f}] of draft-free, {beside.num_passes} batches"
            )
        for row in measured:
            rows.append(asdict(row))
            typer.echo(
                f"in flight {row.sequences:3}  {row.budget:15} {row.tokens_per_s:8.1f} tokens/s  "
                f"{row.ratio_to_draft_free:.3f}x [{row.low:.3f}, {row.high:.3f}] of draft-free, "
                f"{row.ratio_to_canonical:.3f}x under the same numerics, host "
                f"{100 * row.host_share:.1f} %, {row.drafted_per_forward:.2f} drafted, "
                f"{row.steps_per_forward:.2f} steps a forward"
            )
        if json_file is not None:  # after each number: a long run that is cut short leaves some
            document = {
                "model": info.identity(),
                "drafter": proposer.name,
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "threads": threads,
                "unmasking": unmasking,
                "temperature": temperature,
                "max_new_tokens": max_new_tokens,
                "latency": json.loads(costs.to_json()),
                "rows": rows,
                "plain": of_plain,
            }
            json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


@bench.command("simulate")
@speaking_plainly
def simulate(
    inputs: Annotated[
        Path | None, typer.Option("-i", "--input", help="JSON lines of prompts; packaged ones.")
    ] = None,
    model: Annotated[str, typer.Option(help="Hub id, folder, or bundled.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")] = "auto",
    tables: Annotated[
        str, typer.Option(help="h200-1.7b, h200-8b, or files that `bench latency` wrote.")
    ] = "h200-1.7b,h200-8b",
    sequences: Annotated[str, typer.Option(help="Samples in flight.")] = "1,8,32,128",
    budgets: Annotated[str, typer.Option(help="Fixed budgets to compare.")] = "1,2,4,8,20",
    unmasking: Annotated[str, typer.Option(help="single or threshold.")] = "single",
    rounds: Annotated[int, typer.Option(help="Rounds of each, after the first eight.")] = 200,
    limit: Annotated[int, typer.Option(help="Only the first prompts.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 96,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> int:
    """Decode under the clock of another device: is `auto` as good as the best fixed budget?"""
    from spot_batch.bench.simulate import Recording
    from spot_batch.bench.simulate import simulate as run

    if unmasking not in ("single", "threshold"):
        raise ValueError(f"--unmasking must be single or threshold, got {unmasking!r}")
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    costs = {name: _table(name, "--tables") for name in tables.split(",")}
    fixed = numbers(budgets, int, "budgets")
    flights = numbers(sequences, int, "sequences")
    target, proposer = _loaded(model, drafter, "canonical", "auto", 1)
    if proposer is None:
        raise ValueError("--drafter none drafts nothing; there is nothing to compare")
    from spot_batch.bench.prompts import make_requests, read_questions
    from spot_batch.records import SamplingParams
    from spot_batch.targets.registry import resolve_model

    info = resolve_model(model)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        unmasking=unmasking,  # type: ignore[arg-type]
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
    requests = make_requests(info, read_questions(inputs, limit=limit), params)
    recording = Recording(target)
    recording.record(requests)
    rows = []
    for name, table in costs.items():
        for number in flights:
            row = run(
                recording,
                proposer,
                table,
                requests,
                sequences=number,
                budgets=fixed,
                num_rounds=rounds,
            )
            rows.append({"table": name, "unmasking": unmasking, **asdict(row)})
            cells = "  ".join(f"D {one} {ratio:.2f}" for one, ratio in row.fixed.items())
            typer.echo(
                f"{name}  in flight {number:3}  auto {row.auto:.3f}x of draft-free, "
                f"{row.of_best:.3f} of the best (D {row.best_fixed})  {cells}"
            )
            if json_file is not None:
                json_file.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


@bench.command("occupancy")
@speaking_plainly
def occupancy(
    inputs: Annotated[
        Path | None, typer.Option("-i", "--input", help="JSON lines of prompts; packaged ones.")
    ] = None,
    model: Annotated[str, typer.Option(help="Hub id, folder, or bundled.")] = "bundled",
    drafter: Annotated[str, typer.Option(help="auto, ranking, or a drafter's path.")] = "auto",
    clock: Annotated[
        str, typer.Option(help="device, h200-1.7b, h200-8b, or a file of `bench latency`.")
    ] = "device",
    samples: Annotated[int, typer.Option(help="Rows of the job.")] = 2000,
    sequences: Annotated[int, typer.Option(help="Samples in flight of an actor.")] = 8,
    actors: Annotated[int, typer.Option(help="Actors, in one process.")] = 1,
    budgets: Annotated[str, typer.Option(help="Drafted slots a sample, or auto.")] = "0,auto",
    order: Annotated[str, typer.Option(help="longest_first or input.")] = "longest_first",
    min_new_tokens: Annotated[int, typer.Option(help="The shortest limit of a row.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(help="The longest limit of a row.")] = 32,
    limit: Annotated[int, typer.Option(help="Only the first prompts.")] = 64,
    plot: Annotated[bool, typer.Option("--plot", help="The tail's curve as bars.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the runs here.")] = None,
) -> int:
    """How full a job keeps its slots, and what drafts do with those that fall idle at its end."""
    wanted = [_budget(text) for text in budgets.split(",")]
    if order not in ("longest_first", "input"):
        raise ValueError(f"--order must be longest_first or input, got {order!r}")
    for name, value in (("samples", samples), ("sequences", sequences), ("actors", actors)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 1 <= min_new_tokens <= max_new_tokens:
        raise ValueError(
            f"--min-new-tokens must be from 1 to --max-new-tokens {max_new_tokens}, "
            f"got {min_new_tokens}"
        )
    given = None if clock == "device" else _table(clock, "--clock")
    target, proposer = _loaded(model, drafter, "canonical", "auto", 1)
    if proposer is None:
        raise ValueError("--drafter none drafts nothing; there is nothing to compare")
    from spot_batch.bench.occupancy import mixed_lengths, run_job
    from spot_batch.bench.prompts import make_requests, read_questions
    from spot_batch.bench.simulate import Recording, simulated_engine
    from spot_batch.decoding import Engine, EngineSettings, measure_latency
    from spot_batch.decoding.latency import device_clock
    from spot_batch.records import SamplingParams
    from spot_batch.targets.registry import resolve_model

    info = resolve_model(model)
    params = SamplingParams(
        max_new_tokens=max_new_tokens, stop_ids=info.stop_ids, confidence=info.family.confidence
    )
    requests = make_requests(info, read_questions(inputs, limit=limit), params)
    rows = mixed_lengths(requests, num_samples=samples, least=min_new_tokens, most=max_new_tokens)
    recording = Recording(target)
    if given is not None:
        recording.record(requests)
    table = given or measure_latency(target, proposer, max_slots=4 * sequences, at_most_s=6.0)
    runs = []
    for budget in wanted:
        settings = EngineSettings(
            max_sequences=sequences, budget=budget, longest_first=order == "longest_first"
        )

        def make(settings: EngineSettings = settings) -> tuple[Engine, Callable[[], float]]:
            if given is not None:
                engine = simulated_engine(recording, proposer, table, settings)
                return engine, lambda: recording.clock_s
            return Engine(target, proposer, settings, latency=table), device_clock(target.device)

        run = run_job(rows, make, budget=budget, num_actors=actors, max_sequences=sequences)
        _show_occupancy(run, plot=plot)
        runs.append(asdict(run))
        if json_file is not None:  # after each: a long run that is cut short leaves some
            document = {"model": info.identity(), "clock": clock, "order": order, "runs": runs}
            json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
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


def _table(name: str, option: str) -> LatencyTable:
    """A table by formula or of a file."""
    from spot_batch.bench.simulate import BODIES
    from spot_batch.decoding import LatencyTable

    if name in BODIES:
        return BODIES[name].table()
    try:
        return LatencyTable.from_json(Path(name).read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(BODIES)
        raise ValueError(f"{option}: {name} is none of {known} and no file") from error


def _budget(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise ValueError(f"--budgets wants whole numbers or auto by comma, got {text!r}")
    return int(text)


def _loaded(
    model: str, drafter: str, numerics: str, dtype: str, threads: int
) -> tuple[BlockTarget, Drafter | None]:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import torch

    from spot_batch.drafters.registry import choose_drafter, load_drafter
    from spot_batch.targets.block import load_target
    from spot_batch.targets.registry import resolve_model

    if numerics not in ("canonical", "fast"):
        raise ValueError(f"--numerics must be canonical or fast, got {numerics!r}")
    torch.set_num_threads(threads)
    info = resolve_model(model)
    choice = choose_drafter(drafter, info)
    target = load_target(info, dtype=dtype, canonical=numerics == "canonical")
    typer.echo(f"{info.name}, drafter {choice.name} ({choice.why})")
    return target, load_drafter(choice, block_length=info.block_length)


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
@speaking_plainly
def store(
    folder: Annotated[Path, typer.Argument(help="An empty folder for the job; left there.")],
    samples: Annotated[int, typer.Option(help="How many samples.")] = 1_000_000,
    lease: Annotated[int, typer.Option(help="Samples to a segment.")] = 1_000,
) -> int:
    """Measure leasing, publication, compaction and recovery with an engine that answers at once."""
    from spot_batch.bench.store import bench_store

    figures = bench_store(folder, num_samples=samples, lease_rows=lease)
    typer.echo(
        f"{figures.num_samples:,} samples: {figures.rows_per_s:,.0f} rows/s published and "
        f"compacted, recovery of the half-done job {figures.recovery_s:.2f} s, memory grew by "
        f"{figures.growth_mib:.0f} MiB, the end took {figures.finish_s:.1f} s"
    )
    return 0
