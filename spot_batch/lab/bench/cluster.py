"""Cells of a benchmark on a Ray cluster: independent groups, each whole on one worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from spot_batch.service.embedded import embedded_ray

if TYPE_CHECKING:
    from spot_batch.lab.bench.cells import Benchmark, CellT, RowT, Spread

_ANSWER_S = 10.0


class _Worker:
    """A process that has a benchmark open and measures the groups that it is handed."""

    def __init__(self, benchmark: Benchmark[Any, Any], num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self._measure = benchmark.open()

    def measure(self, group: Sequence[Any]) -> list[Any]:
        return list(self._measure(group))


def spread_over(address: str, *, num_threads: int, num_gpus: int = 0) -> Spread:
    """A `Spread` over the Ray cluster at `address` (`auto`: the one of this machine or of
    RAY_ADDRESS; `local`: a Ray of its own on this machine, gone at the end).

    As many workers as there are groups, or as CPUs and GPUs allow, `num_gpus` each. A worker that
    is lost is started again twice. Raises ValueError where there is no cluster, and what measuring
    a group raised.
    """

    @contextmanager
    def spread(
        benchmark: Benchmark[CellT, RowT], groups: Sequence[Sequence[CellT]]
    ) -> Iterator[Iterator[Sequence[RowT]]]:
        with _ray_at(address, num_threads):
            import ray

            # Few workers, so that a model is loaded a few times, not once a group.
            there = ray.cluster_resources()
            most = int(there.get("CPU", 1)) // num_threads
            if num_gpus:
                most = min(most, int(there.get("GPU", 0)) // num_gpus)
            most = max(1, most)
            start = ray.remote(_Worker).options(
                num_cpus=num_threads, num_gpus=num_gpus, max_restarts=2, max_task_retries=2
            )
            workers = [start.remote(benchmark, num_threads) for _ in range(min(most, len(groups)))]
            yield _in_turn(workers, groups)

    return spread


def _in_turn(workers: Sequence[Any], groups: Sequence[Any]) -> Iterator[Any]:
    """Rows of each group, as workers finish them."""
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util import ActorPool

    try:
        call: Callable[[Any, Any], Any] = lambda worker, group: worker.measure.remote(group)  # noqa: E731
        yield from ActorPool(list(workers)).map_unordered(call, groups)
    except RayActorError as error:
        raise ValueError(
            f"a worker of the cluster was lost ({' '.join(str(error).split())[:300]}); the same "
            "command goes on with --out"
        ) from error
    except RayTaskError as error:
        raise error.cause from error


def _ray_at(address: str, num_threads: int) -> AbstractContextManager[Any]:
    return embedded_ray(cpu_threads=num_threads) if address == "local" else _joined(address)


@contextmanager
def _joined(address: str) -> Iterator[None]:
    """Connected to a cluster that runs, and disconnected again."""
    import ray

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():  # ray itself waits for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--address {address}: no Ray cluster there ({' '.join(str(error).split())[:300]})"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
