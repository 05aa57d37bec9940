"""`calibrate spiffy`: draft graphs of the baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from spot_batch.terminal.errors import plain_errors
from spot_batch.terminal.options import Json, check_writable, numbers


@plain_errors
def spiffy(
    jobs: Annotated[list[str], typer.Argument(help="`trajectories` jobs, or their URLs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The JSON file to write.")],
    budgets: Annotated[str, typer.Option(help="Drafted slots a round, by comma.")] = "8,20",
    as_json: Json = False,
) -> None:
    """Count the baseline's draft graphs on recorded trajectories, one a temperature and budget."""
    import torch

    from spot_batch.lab.methods.graphs import count_formulas, fit_graph
    from spot_batch.lab.methods.spiffy import save_graphs
    from spot_batch.learning.drafter import made_from
    from spot_batch.learning.trajectories import load_trajectories

    sizes = numbers(budgets, int, "--budgets", least=1)
    check_writable(output, "--output", makes_folders=True)
    recorded = load_trajectories(jobs)
    graphs = []
    for heat in recorded.temperatures:
        of_heat = torch.nonzero((recorded.temperature - heat).abs() < 1e-4).squeeze(1)
        counted = count_formulas(recorded.take(of_heat))
        graphs += [fit_graph(counted, budget=budget) for budget in sizes]
    save_graphs(output, graphs, made_from(recorded))
    chosen = [{**graph.settings(), "num_formulas": len(graph.counts)} for graph in graphs]
    if as_json:
        print(json.dumps({"path": str(output), "graphs": chosen}))
        return
    for each in chosen:
        typer.echo(", ".join(f"{name} {value}" for name, value in each.items()))
    typer.echo(f"{output} written")
