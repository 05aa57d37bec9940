"""`spot-batch bench`: measurements that anyone can run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_batch.cli.app import app, numbers, speaking_plainly

if TYPE_CHECKING:
    from spot_batch.bench.exact import ExactRow

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
