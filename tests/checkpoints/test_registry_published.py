"""Published checkpoints by name: sizes against the networks themselves, which take no memory."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from spot_batch.checkpoints.dtypes import choose_dtype
from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.published import published, published_names
from spot_batch.checkpoints.registry import ModelInfo, describe_published
from spot_batch.checkpoints.report import describe_target, memory_of
from spot_batch.checkpoints.shapes import num_parameters, tensor_shapes, unstacked
from spot_batch.models.block import check_network, meta_body

GB = 10**9


def info_of(name: str, **given: int) -> ModelInfo:
    entry = published(name)
    assert entry is not None, name
    return describe_published(entry, **given)


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes", "tolerance", "kv_bytes"),
    [
        ("JetLM/SDAR-1.7B-Chat", 311, 4_060_000_000, 5_000_000, 114_688),
        ("JetLM/SDAR-4B-Chat-b16", 399, 8_822_848_512, 0, 147_456),
        ("JetLM/SDAR-8B-Chat-b32", 399, 16_381_470_720, 0, 147_456),
        ("JetLM/SDAR-30B-A3B-Chat", 18_867, 61 * GB, 100_000_000, 98_304),
        ("inclusionAI/LLaDA2.0-mini", 14_813, 32_500_000_000, 20_000_000, 40_960),
    ],
)
def test_real_sizes_are_those_of_the_published_files(
    name: str, num_tensors: int, num_bytes: int, tolerance: int, kv_bytes: int
) -> None:
    """Counts and bytes from the repositories' indices and file listings."""
    weights = describe_target(name, check=check_network).weights
    assert weights.num_tensors == num_tensors
    assert abs(weights.num_bytes - num_bytes) <= tolerance
    assert info_of(name).sizes.kv_bytes(2) == kv_bytes


@pytest.mark.parametrize(
    "name",
    [
        "JetLM/SDAR-1.7B-Chat",
        "JetLM/SDAR-4B-Chat",
        "JetLM/SDAR-8B-Chat",
        "JetLM/SDAR-30B-A3B-Chat",
        "inclusionAI/LLaDA2.0-mini",
        "inclusionAI/LLaDA2.0-flash",
    ],
)
def test_tensors_are_those_of_the_network_that_is_loaded(name: str) -> None:
    entry = published(name)
    assert entry is not None
    info = describe_published(entry)
    body = meta_body(entry.config, info.family)
    places = {name: tuple(place.shape) for name, place in body.published().items()}
    assert places == tensor_shapes(info.sizes, info.family)


@pytest.mark.parametrize("name", ["JetLM/SDAR-4B-Chat", "JetLM/SDAR-30B-A3B-Chat"])
def test_tensors_are_those_of_transformers_own_model(name: str) -> None:
    entry = published(name)
    assert entry is not None
    ours = {"architectures", "model_type", "torch_dtype", "rope_scaling", "rope_theta"}
    fields = {key: value for key, value in entry.config.items() if key not in ours}
    is_dense = "num_experts" not in fields
    with torch.device("meta"):
        model = (
            Qwen3ForCausalLM(Qwen3Config(**fields))
            if is_dense
            else Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
        )
    found = unstacked({name: tuple(each.shape) for name, each in model.state_dict().items()})
    info = describe_published(entry)
    assert found == tensor_shapes(info.sizes, info.family)


def test_every_published_name_is_described_without_any_file() -> None:
    for name in published_names():
        found = describe_target(name.lower() if "SDAR" in name else name, check=check_network)
        info = found.info
        assert (found.source, info.warnings, info.weight_hash) == ("table", (), "")
        assert info.mask_id in info.forbidden_ids
        assert not {info.mask_id} & set(info.stop_ids)
        _, _, width = name.partition("-b")
        wanted = int(width) if width else info.family.block_length
        assert info.block_length == wanted
    assert info_of("JetLM/SDAR-8B-Chat-b32").forbidden_ids == tuple(range(151_669, 151_936))


def test_facts_of_a_published_name_can_be_overridden() -> None:
    info = info_of("JetLM/SDAR-8B-Chat-b32", block_length=16, mask_id=5)
    assert (info.block_length, info.mask_id) == (16, 5)
    assert len(info.warnings) == 2
    with pytest.raises(ModelError, match="outside the vocabulary of 151936"):
        info_of("JetLM/SDAR-8B-Chat-b32", mask_id=151_936)


def test_memory_is_the_sum_of_its_parts() -> None:
    info = info_of("JetLM/SDAR-8B-Chat-b32")
    memory = memory_of(info, num_sequences=32, num_positions=4000)
    head = 151_936 * 4096
    assert memory.dtype == "bfloat16"
    assert memory.weights == 16_381_470_720 - 2 * head
    assert memory.head == 4 * head
    assert memory.prefixes == 32 * 4096 * 147_456, "rows are padded to 128 positions"
    assert memory.working_set > 4 << 30, "16 float32 logits of 32 blocks are more than that"
    parts = (memory.weights, memory.head, memory.prefixes, memory.working_set)
    assert memory.total == sum(parts)
    wider = memory_of(info, dtype="float32", num_sequences=32, num_positions=4000)
    assert (wider.weights, wider.head) == (2 * memory.weights, memory.head)
    with pytest.raises(ModelError, match="its context is 32,768 positions, got 40,000"):
        memory_of(info, num_sequences=1, num_positions=40_000)
    with pytest.raises(ModelError, match="sequences must be at least 1, got 0"):
        memory_of(info, num_sequences=0, num_positions=1)


@pytest.mark.parametrize(
    ("name", "device", "has_bfloat16", "gigabytes", "taken", "why"),
    [
        ("1.7B", "cpu", False, None, "float32", "on a CPU"),
        ("8B", "cuda", True, 80, "bfloat16", "the device has it"),
        ("1.7B", "cuda", False, 15.8, "float32", "no bfloat16, and float32 weights fit"),
        ("4B", "cuda", False, 15.8, "float16", "weights of 17.6 GB leave too little of its 15.8"),
    ],
)
def test_auto_takes_the_best_dtype_that_a_device_has_and_says_why(
    name: str, device: str, has_bfloat16: bool, gigabytes: float | None, taken: str, why: str
) -> None:
    info = info_of(f"JetLM/SDAR-{name}-Chat")
    choice = choose_dtype(
        "auto",
        device=device,
        has_bfloat16=has_bfloat16,
        memory_bytes=None if gigabytes is None else int(gigabytes * GB),
        num_parameters=num_parameters(tensor_shapes(info.sizes, info.family)),
    )
    assert choice.name == taken
    assert why in choice.why


def test_a_dtype_that_is_asked_for_is_taken_and_weights_that_cannot_fit_are_refused() -> None:
    def choose(wanted: str, num_parameters: int) -> str:
        return choose_dtype(
            wanted,
            device="cuda",
            has_bfloat16=False,
            memory_bytes=16 * GB,
            num_parameters=num_parameters,
        ).name

    assert choose("bfloat16", GB) == "bfloat16"
    with pytest.raises(ModelError, match=r"take 61\.1 GB in float16, the device has 16\.0 GB"):
        choose("auto", 30_532_122_624)
    with pytest.raises(ModelError, match=r"auto or one of float32, bfloat16, float16, got 'int8'"):
        choose("int8", 1)
