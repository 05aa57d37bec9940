"""How often a round waits for the device: seen on a CPU by tensors that count what reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.drafters.ranking import RankingDrafter
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.records.sampling import Request, SamplingParams
from tests.tiny_models import write_target

_READING = frozenset(
    {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy", "cpu"}
)


class OnDevice(Tensor):
    """As if on a GPU: what is computed from one is one, and what the host reads is counted."""

    waits: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(each, Tensor) and each.dtype == torch.bool
            for each in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        if name in _READING or masked:
            OnDevice.waits[name] += 1
            with torch._C.DisableTorchFunctionSubclass():
                found = function(*args, **(kwargs or {}))
            return found.as_subclass(Tensor) if isinstance(found, OnDevice) else found
        return super().__torch_function__(function, types, args, kwargs or {})


class FarTarget(BlockTarget):
    """A real body whose hidden rows and logits are as if on a device."""

    def head(self, rows: Tensor) -> Tensor:
        assert isinstance(rows, OnDevice), "all that a forward leaves is on the device"
        return super().head(rows.as_subclass(Tensor)).as_subclass(OnDevice)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FarTarget:
    folder = write_target(tmp_path_factory.mktemp("target"), block_length=8, scale=2.0)
    info = resolve_model(str(folder))
    far = FarTarget(load_target(info).body, info)
    embedding = far.body.network.model.embed_tokens
    assert isinstance(embedding, torch.nn.Embedding)
    weight = embedding.weight.data.as_subclass(OnDevice)
    embedding.forward = lambda ids: torch.nn.functional.embedding(ids, weight)  # type: ignore[method-assign]
    return far


def requests(temperature: float, top_p: float) -> list[Request]:
    params = SamplingParams(
        max_new_tokens=20, temperature=temperature, top_p=top_p, stop_at="never"
    )
    return [
        Request(sample_id=at, prompt_ids=tuple(range(3 + 7 * at)), noise_key=at, params=params)
        for at in range(4)
    ]


def test_what_reads_a_device_is_counted() -> None:
    far = torch.arange(4.0).as_subclass(OnDevice)
    OnDevice.waits.clear()
    assert bool((2 * far).sum() > 0)
    assert len(torch.nonzero(far)) == 3
    assert far[far > 1].shape == (2,)
    assert (far + 1).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert OnDevice.waits == {"__bool__": 1, "nonzero": 1, "__getitem__": 1, "tolist": 1}


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.9)])
@pytest.mark.parametrize("budget", [0, 3])
def test_a_round_waits_for_the_device_where_it_reads_what_was_committed(
    target: FarTarget, budget: int, temperature: float, top_p: float
) -> None:
    engine = Engine(target, RankingDrafter(), EngineSettings(max_sequences=3, budget=budget))
    for request in requests(temperature, top_p):
        engine.add(request)
    OnDevice.waits.clear()
    num_rounds = 0
    while engine.has_work:
        before = OnDevice.waits.total()
        engine.step()
        num_rounds += 1
        if budget == 0:
            assert OnDevice.waits.total() - before == 1, OnDevice.waits
    assert set(OnDevice.waits) == {"cpu"}, "never to learn a shape or an index"
    assert OnDevice.waits.total() >= num_rounds
