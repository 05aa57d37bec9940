"""What a model folder says of itself, and folders that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from spot_batch.checkpoints.errors import ModelError
from spot_batch.checkpoints.registry import resolve_model
from spot_batch.checkpoints.report import describe_target
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.models.block import load_target
from tests.families import save_tensors, write_checkpoint
from tests.tiny_models import publish_tokenizer, write_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "SDAR-tiny-Chat")


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    file.write_text(json.dumps(config))


def change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_folder_says_block_length_mask_and_stop_ids(folder: Path) -> None:
    info = resolve_model(str(folder))
    assert (info.family.name, info.block_length, info.mask_id) == ("sdar", 8, 259)
    assert info.stop_ids == (256, 258)
    assert info.mask_id in info.forbidden_ids
    assert set(range(260, 264)) <= set(info.forbidden_ids), "rows without a text may be written"


def test_the_name_says_the_block_length_where_the_config_does_not(folder: Path) -> None:
    change_config(folder, block_size=None)
    assert resolve_model(str(folder)).block_length == 4  # the family's
    wide = folder.rename(folder.with_name("SDAR-tiny-Chat-b16"))
    assert resolve_model(str(wide)).block_length == 16


def test_the_tokenizer_says_the_mask_where_the_config_does_not(folder: Path) -> None:
    change_config(folder, mask_token_id=None)
    assert resolve_model(str(folder)).mask_id == 259


def test_what_is_given_wins_and_who_says_otherwise_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = folder.rename(folder.with_name("SDAR-tiny-Chat-b32"))
    info = resolve_model(str(wide), block_length=16, mask_id=261)
    assert (info.block_length, info.mask_id) == (16, 261)
    assert info.warnings == (
        f"{wide}: block length 16 of the spec is taken; config.json says 8, "
        "the repository's name says 32",
        f"{wide}: mask id 261 of the spec is taken; config.json says 259, the tokenizer says 259",
    )
    assert tuple(record.getMessage() for record in caplog.records) == info.warnings


def test_facts_that_agree_are_not_warned_about(folder: Path) -> None:
    assert resolve_model(str(folder), block_length=8, mask_id=259).warnings == ()


def test_the_hubs_cache_is_known_by_its_repository(tmp_path: Path) -> None:
    """Its folders are named by commits."""
    snapshots = tmp_path / "models--JetLM--SDAR-tiny-Chat-b16" / "snapshots"
    snapshots.mkdir(parents=True)
    folder = write_target(tmp_path / "SDAR-tiny-Chat").rename(snapshots / ("c" * 40))
    change_config(folder, block_size=None)
    info = resolve_model(str(folder))
    assert (info.block_length, info.commit) == (16, "c" * 40)


@pytest.mark.parametrize(
    ("of_config", "of_files"),
    [("<|MASK|>", "<MASK>"), ("<|MASK|>", "<|MASK|>"), ("<MASK>", "<MASK>")],
)
def test_a_mask_that_two_files_spell_in_two_ways_is_one_id(
    folder: Path, of_config: str, of_files: str
) -> None:
    """A tokenizer makes up another id for a spelling that no file knows."""
    change_config(folder, mask_token_id=None)
    publish_tokenizer(folder, mask_text=of_config, mask_text_of_files=of_files)
    info = resolve_model(str(folder))
    assert (info.mask_id, info.warnings) == (259, ())
    assert info.forbidden_ids == (259, 260, 261, 262, 263)
    assert len(load_tokenizer(info.path)) == 260


def test_a_checkpoint_without_any_mask_is_refused(folder: Path) -> None:
    change_config(folder, mask_token_id=None)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if file.is_file():
            change_json(file, mask_token=None)
    with pytest.raises(ModelError, match=r"no mask id in the spec, config\.json or the tok"):
        resolve_model(str(folder))


def test_a_stop_text_that_no_file_names_is_found_and_a_mask_ends_nothing(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=259)
    info = resolve_model(str(folder))
    assert info.stop_ids == (256, 258)
    assert info.warnings == (f"{folder}: mask id 259 is named as a stop id; it is none",)


def test_a_tokenizer_without_the_familys_end_of_turn_is_warned_about(tmp_path: Path) -> None:
    info = resolve_model(str(write_checkpoint(tmp_path / "LLaDA2.0", "llada2")))
    assert info.warnings == (
        f"{tmp_path / 'LLaDA2.0'}: the tokenizer has no <|role_end|> to end samples at",
    )


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}, (0.6, 0.95, 20)),
        ({"temperature": 0.6, "do_sample": False}, (0.0, 1.0, 0)),
        ({}, (1.0, 1.0, 0)),
    ],
)
def test_sampling_is_the_generation_configs(
    folder: Path, said: dict[str, object], taken: tuple[float, float, int]
) -> None:
    change_json(folder / "generation_config.json", **said)
    info = resolve_model(str(folder))
    assert (info.temperature, info.top_p, info.top_k) == taken


def test_sizes_that_cannot_be_are_named(folder: Path) -> None:
    change_config(folder, num_key_value_heads=3)
    with pytest.raises(ModelError, match="4 heads do not share 3 key heads evenly"):
        resolve_model(str(folder))
    change_config(folder, num_key_value_heads=2, hidden_size=0)
    with pytest.raises(ModelError, match="hidden_size must be a whole number of at least 1, got 0"):
        resolve_model(str(folder))
    change_config(folder, hidden_size=64, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantised weights are not supported"):
        resolve_model(str(folder))


def test_another_chat_template_is_another_model(folder: Path) -> None:
    before = resolve_model(str(folder)).identity()
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")
    after = resolve_model(str(folder)).identity()
    assert before["weights"] == after["weights"]
    assert before["tokenizer"] != after["tokenizer"]


def test_other_weights_are_another_model(folder: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", seed=1)
    first, second = resolve_model(str(folder)).identity(), resolve_model(str(other)).identity()
    assert first["weights"] != second["weights"]
    assert first["tokenizer"] == second["tokenizer"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
    ],
)
def test_a_folder_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(name)
    assert name in str(caught.value)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM is autoregressive: it has no mask id"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel is autoregressive: it has no mask id"),
        ("DiffusionGemmaForBlockDiffusion", "starts from random tokens and replaces them"),
        ("DiffusionGemmaForConditionalGeneration", "starts from random tokens and replaces them"),
        ("LLaDAModelLM", "is not offered yet: it attends to its whole canvas"),
        ("DreamModel", "is not offered yet: it attends to its whole canvas"),
        ("NovelModel", "NovelModel is not supported; known: LLaDA2MoeModelLM, SDARForCausalLM, "),
    ],
)
def test_an_architecture_that_is_not_ours_is_refused_with_the_reason(
    folder: Path, architecture: str, reason: str
) -> None:
    change_config(folder, architectures=[architecture], mask_token_id=None)
    with pytest.raises(ModelError, match=reason):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("LLaDA2.1-mini", {}),
        ("llada-2.2-flash", {}),
        ("LLaDA2_1_mini", {}),
        ("mine", {"editing_threshold": 0.5}),
        ("mine", {"_name_or_path": "inclusionAI/LLaDA2.1-mini"}),
        ("mine", {"model_type": "llada2_2_moe"}),
    ],
)
def test_a_model_that_edits_what_it_committed_is_refused(
    tmp_path: Path, name: str, changes: dict[str, object]
) -> None:
    folder = write_checkpoint(tmp_path / name, "llada2", **changes)
    with pytest.raises(ModelError, match=r"mask-to-token mode is not offered: take LLaDA2\.0"):
        resolve_model(str(folder))


@pytest.mark.parametrize("name", ["LLaDA2.0-mini", "LLaDA2-16B", "LLaDA2.1/LLaDA2.0-mini"])
def test_a_name_of_another_version_is_no_editing_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    folder = write_checkpoint(tmp_path / name, "llada2")
    assert resolve_model(str(folder)).family.name == "llada2"


def test_merged_weights_that_say_their_model_type_alone_are_llada2(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "merged", "llada2", stacked=True)
    change_config(folder, architectures=None, model_type="llada2_moe_veomni")
    info = resolve_model(str(folder))
    assert (info.family.name, info.block_length, info.temperature) == ("llada2", 32, 0.0)


def test_a_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "[]", r"config\.json: want a JSON object, got list"),
        ("tokenizer.json", "[]", r"tokenizer\.json: want a JSON object, got list"),
        ("tokenizer.json", "nothing", r"tokenizer\.json: cannot be read"),
        ("tokenizer.json", "{}", "the tokenizer cannot be loaded"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "added_tokens": []}', "cannot be loaded"),
        ("tokenizer_config.json", '{"mask_token": 3}', "the tokenizer cannot be loaded"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "tokenizer cannot be loaded"),
        ("added_tokens.json", '{"<new>": "x"}', "the tokenizer's files give '<new>' the id 'x'"),
        ("generation_config.json", "[]", "want a JSON object, got list"),
        ("generation_config.json", '{"temperature": "hot"}', "must be a number, got 'hot'"),
        ("generation_config.json", '{"temperature": -1}', "temperature must be 0 or from"),
        ("generation_config.json", '{"top_p": 2}', "top_p must be from 1e-06 to 1, got 2"),
        ("generation_config.json", '{"top_k": 1.5}', "top_k must be a whole number of at least -1"),
        ("generation_config.json", '{"do_sample": "no"}', "do_sample must be true or false"),
        ("generation_config.json", '{"eos_token_id": "x"}', "must be whole numbers, got 'x'"),
    ],
)
def test_a_small_file_that_is_of_no_use_is_one_sentence(
    folder: Path, file: str, content: str, message: str
) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(folder))
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block length 0 must be from 1 to the context of 1024"),
        ({"block_size": 2048}, "block length 2048 must be from 1 to the context of 1024"),
        ({"block_size": 8.0}, r"block length of config\.json must be a whole number, got 8\.0"),
        ({"mask_token_id": "x"}, r"mask_token_id of config\.json must be a whole number, got 'x'"),
        ({"mask_token_id": -1}, "mask id -1 is outside the vocabulary of 264"),
        ({"vocab_size": 259, "mask_token_id": 3}, "ids up to 259, the model a vocabulary of 259"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"head_dim": 15}, "head_dim must be even: its halves are rotated, got 15"),
        ({"num_hidden_layers": 10**8}, "100,000,000 layers or experts are more than any"),
    ],
)
def test_a_field_of_the_config_that_cannot_be_is_named(
    folder: Path, changes: dict[str, object], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_a_name_that_says_a_block_length_of_nothing_is_refused(folder: Path) -> None:
    change_config(folder, block_size=None)
    none = folder.rename(folder.with_name("SDAR-tiny-Chat-b0"))
    with pytest.raises(ModelError, match="block length 0 must be from 1 to the context"):
        resolve_model(str(none))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the folder has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json, and no vocab\.json with merges"):
        resolve_model(str(folder))


def test_a_stop_id_beyond_the_vocabulary_is_left_out_and_warned_about(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=[258, 9999])
    info = resolve_model(str(folder))
    assert info.stop_ids == (256, 258)
    assert info.warnings == (
        f"{folder}: stop id 9999 of generation_config.json is outside the vocabulary of 264",
    )


def test_a_pad_that_the_tokenizer_made_up_is_no_row_of_the_head(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", pad_token="<made-up>")
    change_config(folder, vocab_size=260, eos_token_id=258)
    tensors = load_file(folder / "model.safetensors")
    cut = {"model.embed_tokens.weight", "lm_head.weight"}
    save_tensors(
        folder,
        {name: each[:260].contiguous() if name in cut else each for name, each in tensors.items()},
    )
    info = resolve_model(str(folder))
    assert info.forbidden_ids == (259,)
    load_target(info)


def test_rope_scaling_that_scales_nothing_is_no_scaling(folder: Path) -> None:
    change_config(folder, rope_scaling={"rope_type": "default"})
    resolve_model(str(folder))


def test_a_mask_outside_the_vocabulary_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="mask id 9999 is outside the vocabulary of 264"):
        resolve_model(str(folder), mask_id=9999)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    message = r"11 tensors do not fit the config, the first: model\.layers\.2.* is missing"
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))


def test_rope_scaling_is_refused_not_ignored(folder: Path) -> None:
    change_config(folder, rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(ModelError, match="rope_scaling"):
        resolve_model(str(folder))


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype must be auto or one of"):
        load_target(resolve_model(str(folder)), dtype="float8")


@pytest.mark.parametrize(
    ("hub_id", "reason"),
    [
        ("inclusionAI/LLaDA2.1-mini", "edits tokens that are committed already"),
        ("inclusionAI/LLaDA2.1-flash", "edits tokens that are committed already"),
        ("Dream-org/Dream-v0-Instruct-7B", "attends to its whole canvas"),
        ("GSAI-ML/LLaDA-8B-Instruct", "attends to its whole canvas"),
        ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "attends to its whole canvas"),
        ("google/diffusiongemma-26b", "starts from random tokens"),
        ("Qwen/Qwen3-8B", "is autoregressive"),
    ],
)
def test_what_a_name_alone_refuses_is_refused_without_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub_id: str, reason: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=f"^{hub_id}: it .*{reason}"):
        resolve_model(hub_id)
    with pytest.raises(ModelError, match=f"^{hub_id}: it .*{reason}"):
        describe_target(hub_id, check=lambda info: None)


EDITS = "def generate(self, editing_threshold=0.9): ...\n"


@pytest.mark.parametrize(
    ("name", "code", "changes"),
    [
        ("mine", EDITS, {}),
        ("LLaDA2.0-mini", EDITS, {}),
        ("LLaDA2.0-mini", "", {"_name_or_path": "inclusionAI/LLaDA2.1-mini"}),
    ],
)
def test_an_editing_model_under_another_name_is_known_by_its_files(
    tmp_path: Path, name: str, code: str, changes: dict[str, object]
) -> None:
    folder = write_checkpoint(tmp_path / name, "llada2", **changes)
    if code:
        (folder / "modeling_llada2_moe.py").write_text(code)
    with pytest.raises(ModelError, match="edits tokens that are committed already"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("def generate(self, threshold=0.95): ...\n", {}),
        ("", {"_name_or_path": "inclusionAI/LLaDA2.0-mini"}),
    ],
)
def test_a_llada2_0_in_a_folder_of_another_version_is_known_by_its_files(
    tmp_path: Path, code: str, changes: dict[str, object]
) -> None:
    folder = write_checkpoint(tmp_path / "beside-LLaDA2.1", "llada2", **changes)
    if code:
        (folder / "modeling_llada2_moe.py").write_text(code)
    info = resolve_model(str(folder))
    assert info.family.name == "llada2"
    assert not any("LLaDA2.0 or a later" in each for each in info.warnings)


def test_a_llada2_that_does_not_tell_its_version_is_warned_about(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mine", "llada2")
    said = "neither its files nor its name say whether it is LLaDA2.0 or a later version"
    assert any(said in each for each in resolve_model(str(folder)).warnings)
    told = write_checkpoint(tmp_path / "LLaDA2.0-mini", "llada2")
    assert not any(said in each for each in resolve_model(str(told)).warnings)


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_a_scaled_rotation_under_the_older_key_is_refused(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path / "LLaDA2.0", family)
    change_config(folder, rope_parameters={"type": "linear", "factor": 4.0})
    with pytest.raises(ModelError, match="rope_type 'linear' is not supported"):
        resolve_model(str(folder))


def test_two_rotary_bases_that_differ_are_refused_and_equal_ones_are_one(folder: Path) -> None:
    change_config(folder, rope_theta=10_000, rope_parameters={"rope_theta": 1_000_000})
    message = r"rope_theta is 10000, and 1000000 in rope_parameters"
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))
    change_config(folder, rope_theta=1_000_000)
    assert resolve_model(str(folder)).family.name == "sdar"
