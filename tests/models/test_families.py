"""Every family against another implementation, and checkpoints that are not what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.families import family_of
from spot_batch.checkpoints.registry import ModelInfo, resolve_model
from spot_batch.checkpoints.shapes import read_sizes, tensor_shapes
from spot_batch.models.block import BlockTarget, load_target, meta_body
from spot_batch.models.llada2 import Router, llada2_config
from tests.families import (
    CONFIGS,
    Oracle,
    PlainLlada2,
    in_stacks,
    oracle,
    save_tensors,
    write_checkpoint,
)
from tests.slots import canvas, chain, clean_slots, joined, letters, seeded, slots_of

FAMILY_NAMES = ("sdar", "sdar-moe", "llada2")


@dataclass(frozen=True, slots=True)
class Model:
    """A tiny checkpoint, loaded by us and by another."""

    info: ModelInfo
    target: BlockTarget
    oracle: Oracle

    def expected(self, ids: Tensor) -> Tensor:
        """(n,) ids from position 0 on -> (n, allowed) logits under the block-causal mask."""
        block = torch.arange(len(ids)) // self.info.block_length
        return self.allowed(self.oracle(ids, block[:, None] >= block).float())

    def allowed(self, logits: Tensor) -> Tensor:
        """The logits of the tokens that may be written."""
        forbidden = list(self.info.forbidden_ids)
        return logits[..., [at for at in range(self.info.vocab_size) if at not in forbidden]]


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", request.param)
    info = resolve_model(str(folder))
    return Model(info, load_target(info), oracle(info))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Finished blocks, and the first block to be written: a prompt's rest, then masks."""

    clean: Tensor
    state: Tensor

    @property
    def ids(self) -> Tensor:
        return torch.cat((self.clean, self.state)).flatten()


def prompts(model: Model) -> list[Prompt]:
    """Of every remainder modulo the block length, behind no, one and two whole blocks."""
    width = model.info.block_length
    made = []
    for remainder in range(width):
        blocks = letters(1 + remainder % 3, width, seeded(remainder))
        blocks[-1, remainder:] = model.info.mask_id
        made.append(Prompt(blocks[:-1], blocks[-1:]))
    return made


def test_a_prompt_of_any_length_scores_as_in_a_full_forward(model: Model) -> None:
    """Alone behind a stored prefix, in the company of all others, and with no cache at all."""
    target, width = model.target, model.info.block_length
    all_prompts = prompts(model)
    cache = target.allocate(len(all_prompts), 4 * width)
    for row, prompt in enumerate(all_prompts):
        if len(prompt.clean):
            target.forward(clean_slots(prompt.clean, row=row), cache)
    expected = torch.stack([model.expected(prompt.ids)[-width:] for prompt in all_prompts])
    states = slots_of(
        torch.cat([prompt.state for prompt in all_prompts]),
        start=torch.tensor([prompt.clean.numel() for prompt in all_prompts]),
        row=torch.arange(len(all_prompts)),
    )
    together = model.allowed(target.head(target.forward(states, cache).rows))
    close(together, expected)
    for at in range(0, len(all_prompts), 3):
        alone = target.forward(states.take(torch.tensor([at])), cache)
        close(model.allowed(target.head(alone.rows)), expected[at : at + 1])
        assert torch.equal(model.allowed(target.head(alone.rows))[0], together[at])
    uncached = joined(
        *(
            chain(torch.cat((prompt.clean, prompt.state)), start=0, row=row)
            for row, prompt in enumerate(all_prompts)
        )
    )
    hidden = target.forward(uncached, target.allocate(len(all_prompts), 4 * width))
    last = torch.tensor([len(prompt.clean) + 1 for prompt in all_prompts]).cumsum(0) - 1
    assert torch.equal(model.allowed(target.head(hidden.rows[last])), together)
    assert expected.std() > 0.5, "logits so close to one another show nothing"


def test_the_library_path_scores_alike(model: Model) -> None:
    """`numerics: fast`, with the experts as transformers runs them."""
    fast = load_target(model.info, canonical=False)
    width = model.info.block_length
    ids = letters(4, width, seeded(1))
    ids[-1, width // 2 :] = model.info.mask_id
    hidden = fast.forward(chain(ids, start=0, row=0), fast.allocate(1, 4 * width))
    close(model.allowed(fast.head(hidden.rows)).flatten(0, 1), model.expected(ids.flatten()))


def test_a_canvas_scores_as_in_a_full_forward(model: Model) -> None:
    width = model.info.block_length
    ids = letters(3, width, seeded(1))
    everything = torch.ones(ids.numel(), ids.numel(), dtype=torch.bool)
    expected = model.allowed(model.oracle(ids.flatten(), everything).float())
    cache = model.target.allocate(1, 4 * width)
    hidden = model.target.forward(canvas(ids, start=0, row=0), cache)
    close(model.allowed(model.target.head(hidden.rows)).flatten(0, 1), expected)


# -- loading ---------------------------------------------------------------------------------------


def same_outputs(one: BlockTarget, other: BlockTarget) -> bool:
    width = one.block_length
    ids = letters(3, width, seeded(5))
    rows = [
        target.forward(chain(ids, start=0, row=0), target.allocate(1, 4 * width)).rows
        for target in (one, other)
    ]
    return torch.equal(*rows) and torch.equal(one.head(rows[0]), other.head(rows[1]))


def test_shards_load_as_one_file_does(model: Model, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "sharded", model.info.family.name, num_shards=5)
    assert len(list(folder.glob("*.safetensors"))) == 5
    assert same_outputs(load_target(resolve_model(str(folder))), model.target)


@pytest.mark.parametrize("family", ["sdar-moe", "llada2"])
def test_stacked_experts_load_as_published_ones_do(family: str, tmp_path: Path) -> None:
    """As dFactory stores them, a tensor a projection, and as transformers does, gate over up."""
    published = write_checkpoint(tmp_path / "published", family)
    stacked = write_checkpoint(tmp_path / "stacked", family, stacked=True, num_shards=2)
    fused = write_checkpoint(tmp_path / "fused", family)
    tensors = in_stacks(load_file(published / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("experts.gate_proj")]:
        at = name.removesuffix("gate_proj")
        parts = tensors.pop(name), tensors.pop(f"{at}up_proj")
        tensors[f"{at}gate_up_proj"] = torch.cat(parts, dim=1)
    save_tensors(fused, tensors)
    first, *others = (
        load_target(resolve_model(str(folder))) for folder in (published, stacked, fused)
    )
    assert all(same_outputs(first, other) for other in others)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_tied_head_is_the_embedding(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tied", family, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    target = load_target(resolve_model(str(folder)))
    embedding = load_file(folder / "model.safetensors")[target.body.embedding]
    rows = torch.randn(1, target.block_length, embedding.shape[1], generator=seeded(0))
    allowed = list(range(256))
    torch.testing.assert_close(target.head(rows)[..., allowed], (rows @ embedding.T)[..., allowed])


@pytest.mark.parametrize("family", ["sdar-moe", "llada2"])
def test_a_bfloat16_body_keeps_in_float32_what_its_family_does(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "narrow", family, dtype=torch.bfloat16)
    target = load_target(resolve_model(str(folder)), dtype="bfloat16")
    wide = {
        name
        for name, tensor in target.body.network.state_dict().items()
        if tensor.dtype == torch.float32
    }
    routers = [f"model.layers.{layer}.mlp.gate" for layer in (1, 2)]
    of_routers = {f"{at}.{name}" for at in routers for name in ("proj.weight", "expert_bias")}
    assert wide == {"lm_head.weight", *(of_routers if family == "llada2" else ())}
    assert target.dtype == torch.bfloat16


PUBLISHED_LAYER = {
    "sdar": [
        "input_layernorm.weight",
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"self_attn.{name}_norm.weight" for name in "qk"),
        "post_attention_layernorm.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ],
    "llada2": [
        "input_layernorm.weight",
        "attention.query_key_value.weight",
        "attention.query_layernorm.weight",
        "attention.key_layernorm.weight",
        "attention.dense.weight",
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.expert_bias",
        *(
            f"mlp.{expert}.{name}_proj.weight"
            for expert in (*(f"experts.{number}" for number in range(8)), "shared_experts")
            for name in ("gate", "up", "down")
        ),
    ],
}
PUBLISHED_LAYER["sdar-moe"] = [
    *(name for name in PUBLISHED_LAYER["sdar"] if not name.startswith("mlp")),
    "mlp.gate.weight",
    *(name for name in PUBLISHED_LAYER["llada2"] if name.startswith("mlp.experts")),
]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_network_without_memory_has_the_published_tensors(name: str) -> None:
    config = {**CONFIGS[name], "vocab_size": 264}
    family = family_of(name, (name,), config)
    body = meta_body(config, family)
    tensors = body.published()
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert shapes == tensor_shapes(read_sizes(config, family, "tiny"), family)
    layer = {key.removeprefix("model.layers.2.") for key in shapes if ".layers.2." in key}
    assert layer == set(PUBLISHED_LAYER[name])


# -- LLaDA2's own ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llada2(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "llada2", "llada2")
    info = resolve_model(str(folder))
    return Model(info, load_target(info), oracle(info))


@pytest.mark.parametrize(
    "change",
    [
        {"n_group": 1, "topk_group": 1},
        {"topk_group": 4},
        {"routed_scaling_factor": 1.0},
        {"num_experts_per_tok": 1},
        {"partial_rotary_factor": 1.0},
        {"rope_theta": 600000.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_number_of_the_config_counts(change: dict[str, float], llada2: Model) -> None:
    """The comparison with the formulas sees each of them."""
    ids = letters(3, 32, seeded(1)).flatten()
    other = PlainLlada2(llada2.info)
    other.config |= change
    changed = replace(llada2, oracle=other).expected(ids)
    assert (changed - llada2.expected(ids)).abs().max() > 0.05


def bias_of(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name.endswith("expert_bias"):
            tensor.zero_()


def shared_of(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if "shared_experts.down_proj" in name:
            tensor.mul_(2.5)


@pytest.mark.parametrize("change", [bias_of, shared_of])
def test_bias_and_shared_expert_count(
    change: Callable[[dict[str, Tensor]], None], llada2: Model
) -> None:
    ids = letters(3, 32, seeded(1)).flatten()
    other = PlainLlada2(llada2.info)
    change(other.tensors)
    changed = replace(llada2, oracle=other).expected(ids)
    assert (changed - llada2.expected(ids)).abs().max() > 0.05


def router(**changes: object) -> Router:
    config = {**CONFIGS["llada2"], "vocab_size": 264, "num_experts": 32, **changes}
    family = family_of("tiny", ("tiny",), config)
    made = Router(llada2_config(config, read_sizes(config, family, "tiny"), where="tiny"))
    made.requires_grad_(False)
    made.proj.weight.copy_(torch.randn(made.proj.weight.shape, generator=seeded(0)) / 8)
    return made


def test_the_limit_on_groups_changes_who_is_chosen() -> None:
    rows = torch.randn(500, 64, generator=seeded(1))
    limited, _ = router(num_experts_per_tok=4)(rows)
    free, _ = router(num_experts_per_tok=4, topk_group=4)(rows)
    groups = (limited // 8).sort(dim=1).values
    num_groups = 1 + (groups[:, 1:] != groups[:, :-1]).sum(1)
    assert int(num_groups.max()) == 2
    share = (limited.sort(1).values != free.sort(1).values).any(1).float().mean()
    assert share > 0.2
    best_two = torch.tensor([1.0, 1.0] + [0.0] * 6 + [1.5] + [0.0] * 7 + [0.9, 0.9] + [0.0] * 14)
    made = router(num_experts_per_tok=4)
    made.proj.weight.copy_(torch.zeros_like(made.proj.weight))
    made.expert_bias = best_two
    chosen, _ = made(rows[:1])
    assert sorted(chosen[0].tolist()) == [0, 1, 16, 17], "a group counts by its two largest"


def test_the_bias_chooses_and_does_not_weigh() -> None:
    rows = torch.randn(500, 64, generator=seeded(1))
    plain, biased = router(), router()
    biased.expert_bias = torch.randn(32, generator=seeded(2)) / 4
    chosen, weights = biased(rows)
    without, _ = plain(rows)
    assert (chosen.sort(1).values != without.sort(1).values).any(1).float().mean() > 0.2
    scores = plain.proj(rows).sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(1, keepdim=True))
    assert weights.dtype == torch.float32


def test_a_narrow_row_is_routed_in_float32() -> None:
    """Scores in bfloat16 would choose others here and there."""
    rows = torch.randn(500, 64, generator=seeded(1)).bfloat16()
    made = router()
    chosen, _ = made(rows)
    wide, _ = made(rows.float())
    assert torch.equal(chosen, wide)


def test_the_first_layer_is_dense(llada2: Model) -> None:
    layers = llada2.target.body.network.model.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True, True]
    assert layers[0].mlp.gate_proj.weight.shape == (96, 64)


def test_only_the_first_dimensions_turn(llada2: Model) -> None:
    """Keys of the first layer know a token and its position, and nothing of their neighbours."""
    target, width = llada2.target, llada2.info.block_length
    block = letters(1, width, seeded(1))
    cache = target.allocate(1, 4 * width)
    target.forward(clean_slots(torch.cat((block, block)), row=0), cache)
    first, second = cache.keys[0][0, :, : 2 * width].split(width, dim=1)
    assert torch.equal(first[..., 8:], second[..., 8:])
    assert (first[..., :8] - second[..., :8]).abs().amax(dim=(0, 1)).min() > 0.01


# -- what is refused -------------------------------------------------------------------------------


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


NORM = "model.layers.1.post_attention_layernorm.weight"


def without(tensors: dict[str, Tensor]) -> None:
    del tensors[NORM]


def with_another(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.odd.weight"] = torch.zeros(3)


def of_another_shape(tensors: dict[str, Tensor]) -> None:
    tensors[NORM] = torch.zeros(65)


def without_an_expert(tensors: dict[str, Tensor]) -> None:
    tensors.pop("model.layers.2.mlp.experts.7.up_proj.weight", None)
    tensors.pop("model.layers.2.mlp.up_proj.weight", None)


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, f"1 tensor does not fit the config.*{NORM} is missing"),
        (with_another, r"1 tensor does not fit the config.*model\.layers\.1\.mlp\.odd\.weight"),
        (of_another_shape, rf"1 tensor does not fit the config.*{NORM}.*\[65\]"),
        (without_an_expert, r"1 tensor does not fit.*layers\.2\.mlp\.(experts\.7\.)?up_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], None], message: str, family: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    info = resolve_model(str(folder))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_tensors(folder, tensors)
    with pytest.raises(ModelError, match=message):
        load_target(info)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_shards_that_are_missing_or_cut_short_are_named(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family, num_shards=3)
    info = resolve_model(str(folder))
    second = folder / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors.*truncated"):
        load_target(info)
    second.unlink()
    with pytest.raises(ModelError, match=r"missing.*model-00002-of-00003\.safetensors"):
        load_target(info)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("sdar", {"use_sliding_window": True}, "use_sliding_window is not supported"),
        ("sdar", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ("llada2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ("sdar-moe", {"num_experts_per_tok": 9}, "must be 1 to num_experts 8, got 9"),
        ("sdar-moe", {"norm_topk_prob": None}, "norm_topk_prob must be true or false, got None"),
        ("llada2", {"n_group": None, "rope_theta": None}, "n_group, rope_theta must be given"),
        ("llada2", {"n_group": 3}, "8 experts are not 3 even groups"),
        ("llada2", {"n_group": 8}, "8 experts are not 8 even groups of two or more"),
        ("llada2", {"topk_group": 5}, "topk_group must be 1 to n_group 4, got 5"),
        ("llada2", {"num_experts_per_tok": 5}, "must be 1 to 4, the experts of 2 groups, got 5"),
        ("llada2", {"rotary_dim": 16}, "rotary_dim 16 is not the even part of head_dim"),
        ("llada2", {"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ("llada2", {"use_qkv_bias": True}, "use_qkv_bias True is not supported"),
        ("sdar", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("sdar", {"rms_norm_eps": "x"}, "rms_norm_eps must be a number above 0, got 'x'"),
        ("sdar", {"rope_theta": None}, "rope_theta must be a number above 0, got None"),
        ("sdar", {"rope_parameters": [1]}, r"rope_parameters must be an object, got \[1\]"),
        ("sdar-moe", {"mlp_only_layers": "x"}, "mlp_only_layers must be a list of layers"),
        ("llada2", {"rope_theta": 0}, "rope_theta must be a number above 0, got 0"),
        ("llada2", {"num_experts": 10**8}, "layers or experts are more than any model has"),
    ],
)
def test_configs_of_other_models_are_refused(
    family: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    info = resolve_model(str(folder))
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_target(info)
    assert "config.json" in str(caught.value)


def test_logits_of_what_may_not_be_written_are_shut(model: Model) -> None:
    rows = torch.randn(2, model.info.block_length, 64, generator=seeded(0))
    logits = model.target.head(rows)
    assert bool((logits[..., list(model.info.forbidden_ids)] == -math.inf).all())
    assert logits.dtype == torch.float32
