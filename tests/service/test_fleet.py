"""How many actors a run wants, and what each of them gets of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_batch.job.spec import JobSpec
from spot_batch.service.embedded import Machine
from spot_batch.service.fleet import gpus_per_actor, num_actors


def spec(**resources: object) -> JobSpec:
    return JobSpec.model_validate({"input": {"source": "x"}, "resources": resources})


def machine(*, num_gpus: int) -> Machine:
    return Machine(num_cpus=8, num_gpus=num_gpus, folder=Path("unused"))


@pytest.mark.parametrize(
    ("given", "num_gpus", "wanted"),
    [
        ({}, 0, 8),
        ({"cpu_threads": 2}, 0, 4),
        ({}, 4, 4),
        ({"gpus_per_actor": 0.5}, 4, 8),
        ({"gpus_per_actor": 0}, 4, 1),
        ({"gpus_per_actor": 0}, 0, 8),
        ({"gpus_per_actor": 0, "actors": 3}, 4, 3),
    ],
)
def test_auto_is_an_actor_for_each_gpu_or_core(
    given: dict[str, object], num_gpus: int, wanted: int
) -> None:
    assert num_actors(spec(**given), machine(num_gpus=num_gpus), 1_000) == wanted


def test_no_more_actors_are_wanted_than_there_is_work_for() -> None:
    assert num_actors(spec(), machine(num_gpus=4), 9) == 2
    assert num_actors(spec(), machine(num_gpus=4), 0) == 1
    assert gpus_per_actor(spec(), machine(num_gpus=4)) == 1.0
