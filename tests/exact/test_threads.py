"""Level 1 on any number of threads and at any size: a slot's bits depend on its own sample only.

Blocks of 3, 5 and 7 rows and inner widths that fill no vector register: there, and where threads
cut between registers, activations over whole forwards do depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.models.block import BlockTarget, load_target
from spot_batch.models.tiles import SlotActivation
from tests.exact.harness import bits_equal
from tests.families import write_checkpoint
from tests.slots import joined, letters, seeded, slots_of
from tests.tally import Tally

pytestmark = pytest.mark.exact

ODD = {"moe_intermediate_size": 24, "num_experts": 12, "num_hidden_layers": 2}
SIZES = [
    ("sdar", 24, 5),
    ("sdar", 40, 7),
    ("sdar", 344, 3),
    ("sdar", 1001, 8),
    ("sdar-moe", 40, 5),
    ("llada2", 40, 5),
    ("llada2", 1001, 8),
]
"""Family, inner width, block length."""

NUM_SLOTS = 40


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    at = tmp_path_factory.mktemp("odd")
    return {
        (family, inner_size): write_checkpoint(
            at / f"{family}-{inner_size}",
            family,
            intermediate_size=inner_size,
            **ODD if family != "sdar" else {},
        )
        for family, inner_size, _ in SIZES
    }


@pytest.fixture(
    params=[
        1,
        pytest.param(2, marks=pytest.mark.slow),
        3,
        pytest.param(4, marks=pytest.mark.slow),
    ]
)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """More than there are cores is as good: what counts is how the elements are cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def num_that_differ(target: BlockTarget) -> int:
    """How many slots have other bits in forwards of 2, 3, 5 and all of them than alone."""
    ids = letters(NUM_SLOTS, target.block_length, seeded(0))
    ids[torch.rand(ids.shape, generator=seeded(1)) < 0.5] = target.mask_id
    zero = torch.zeros(1, dtype=torch.int64)
    states = [slots_of(one[None], start=zero, row=zero) for one in ids]
    cache = target.allocate(1, target.block_length)

    def logits(first: int, num: int) -> Tensor:
        return target.head(target.forward(joined(*states[first : first + num]), cache).rows)

    alone = [logits(at, 1)[0] for at in range(NUM_SLOTS)]
    differing = 0
    for first, num in ((0, 2), (2, 3), (5, 5), (0, NUM_SLOTS)):
        together = zip(logits(first, num), alone[first : first + num], strict=True)
        differing += sum(not bits_equal(a, b) for a, b in together)
    return differing


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_odd_sizes_leave_a_slot_alone_where_activations_are_cut_by_slot(
    dtype: str,
    num_threads: int,
    folders: dict[tuple[str, int], Path],
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
) -> None:
    targets = [
        load_target(resolve_model(str(folders[family, inner]), block_length=width), dtype=dtype)
        for family, inner, width in SIZES
    ]
    cut = [num_that_differ(target) for target in targets]
    monkeypatch.setattr(SlotActivation, "forward", lambda self, rows: self.activation(rows))
    uncut = [num_that_differ(target) for target in targets]
    tally.note(
        f"odd sizes, {dtype}, {num_threads} thread(s): of {50 * len(SIZES)} slots in batches "
        f"{sum(uncut)} have other bits than alone, {sum(cut)} where activations are cut by slot"
    )
    assert cut == [0] * len(SIZES)
    if dtype == "float32" and not any(uncut):  # bfloat16 rounds it away
        pytest.skip("cut slots agree, but on this machine uncut ones do as well: no defect shown")
