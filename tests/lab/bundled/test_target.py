"""The tokenizer, the trainer's resumption, the evaluation's loop and the exported folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from spot_batch.lab.bundled.corpus import held_out_problems
from spot_batch.lab.bundled.evaluation import evaluate
from spot_batch.lab.bundled.gsm8k import ends_in_a_loop, gsm8k_figures, last_number
from spot_batch.lab.bundled.layout import block_causal
from spot_batch.lab.bundled.model import ModelSize, hidden_rows, make_model, tied_logits
from spot_batch.lab.bundled.model_folder import gsm8k_note, write_model_folder
from spot_batch.lab.bundled.sources import ExtraSource, SampleSource, read_exchanges, render_prompt
from spot_batch.lab.bundled.target import (
    RECIPES,
    Phase,
    TargetSettings,
    checkpoints,
    learning_rate,
    load_tokenizer,
    newest_checkpoint,
    ready_tokenizer,
    train_target,
)

TINY = TargetSettings(
    phases=(
        Phase(objective="causal", steps=2, batch=4, lr=1e-3, final_lr=1e-3, warmup=1),
        Phase(objective="diffusion", steps=2, batch=3, lr=1e-3, final_lr=1e-4),
    ),
    size=ModelSize(
        vocab_size=300,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=24,
    ),
    max_tokens=224,
    causal_row=256,
    diffusion_row=768,
    tokenizer_problems=50,
    checkpoint_steps=2,
    evaluate_steps=4,
    num_evaluated=2,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny run."""
    out = tmp_path_factory.mktemp("run")
    train_target(TINY, out)
    return out


@pytest.fixture(scope="module")
def tokenizer(run: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(run / "tokenizer")


@pytest.mark.parametrize("text", ["7 + 5 = 12, 40\n", "def f(x):\n    return x", "naïve ☃ \t\x00 "])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [t for t in tokenizer.tokenize("x12 + 345, 67") if any(c.isdigit() for c in t)] == [
        *"1234567"
    ]


def test_the_template_renders_what_training_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    user = {"role": "user", "content": "Spell the word sun."}
    render = tokenizer.apply_chat_template
    assert render([user], tokenize=False, add_generation_prompt=True) == render_prompt(
        "Spell the word sun."
    )
    system = {"role": "system", "content": "Be brief."}
    assert render([system, user], tokenize=False).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    )


def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(run: Path, tmp_path: Path) -> None:
    for stop_at in (1, 3, None):  # in the first phase, in the second, at the end
        train_target(TINY, tmp_path, stop_at=stop_at)
    unbroken, resumed = newest_checkpoint(run), newest_checkpoint(tmp_path)
    assert resumed.name == unbroken.name == "checkpoint-000004"
    for file in ("model.safetensors", "average.safetensors", "optimizer.safetensors"):
        want, got = load_file(unbroken / file), load_file(resumed / file)
        assert want.keys() == got.keys()
        for name in want:
            assert torch.equal(want[name], got[name]), name


def test_a_run_keeps_the_newest_checkpoints_and_logs_every_step(run: Path) -> None:
    assert [path.name for path in checkpoints(run)] == ["checkpoint-000002", "checkpoint-000004"]
    rows = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    figures = [json.loads(line) for line in (run / "figures.jsonl").read_text().splitlines()]
    assert [row["step"] for row in figures] == [4]


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    phase = Phase(objective="causal", steps=100, batch=1, lr=1.0, final_lr=0.1, warmup=10)
    assert learning_rate(phase, 0) == pytest.approx(0.1)
    assert learning_rate(phase, 10) == pytest.approx(1.0)
    assert learning_rate(phase, 100) == pytest.approx(0.1)


def test_an_exported_folder_loads_with_transformers_and_scores_the_same(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "target"
    for _ in range(2):  # the second replaces the first
        write_model_folder(newest_checkpoint(run), folder, settings=TINY, command="a test")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["SDARForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token_id == config["mask_token_id"]
    assert tokenizer.eos_token_id == config["eos_token_id"]
    theirs = Qwen3ForCausalLM(Qwen3Config(**{**config, "model_type": "qwen3"})).eval()
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    floats = {name: weight.float() for name, weight in weights.items()}
    missing, unexpected = theirs.load_state_dict(floats, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    theirs.tie_weights()
    ours = make_model(TINY.size, seed=5)
    ours.load_state_dict({n.removeprefix("model."): w for n, w in floats.items()})
    tokens = torch.arange(4, 68)[None]
    allowed = block_causal(64, block_length=32)[None, None]
    positions = torch.arange(64)[None]
    with torch.no_grad():
        want = tied_logits(
            ours, hidden_rows(ours, tokens, positions, allowed), mask_id=config["mask_token_id"]
        )
        got = theirs(input_ids=tokens, position_ids=positions, attention_mask=allowed).logits
    got[..., config["mask_token_id"]] = float("-inf")
    torch.testing.assert_close(got, want)


def test_an_evaluation_counts_every_prompt(run: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    problems = list(held_out_problems(3, seed=1))
    figures = evaluate(
        make_model(TINY.size, seed=0), tokenizer, problems, block_length=32, max_blocks=1
    )
    assert figures.num_prompts == 3
    assert figures.exact == 0.0
    assert 0.0 < figures.stale_argmax <= 1.0


def test_an_extra_source_is_mixed_in_by_its_share(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = tmp_path / "extra.jsonl"
    path.write_text('{"question": "Who?", "response": "Me."}\n')
    source = SampleSource(
        tokenizer, seed=0, max_tokens=200, extras=(ExtraSource(path=path, share=0.5),)
    )
    mixed = [source.exchange(i, hard_share=0.5).question == "Who?" for i in range(400)]
    assert 150 < sum(mixed) < 250
    assert source.batch(3, 4, hard_share=0.5)[1:] == source.batch(4, 3, hard_share=0.5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "Who?", "answer": "It is <<2+3=5>>5.\\n#### 5"}', "It is 5.\n#### 5"),
        ('{"text": "Write f.", "code": "def f():\\r\\n    pass"}', "def f():\n    pass"),
    ],
)
def test_gsm8k_and_mbpp_rows_are_read_as_published(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "extra.jsonl"
    path.write_text(line + "\n\n")
    assert [exchange.response for exchange in read_exchanges(path)] == [said]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows"),
        ('{"question": "Who?", "response": "Me."}\n{"question": 3}\n', "line 2: want strings"),
        ("{broken\n", "line 1: not JSON"),
    ],
)
def test_a_bad_extra_source_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "extra.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_exchanges(path)


def test_a_run_goes_on_with_the_settings_it_was_begun_with(run: Path) -> None:
    with pytest.raises(ValueError, match=r"was begun with weight_decay 0\.1, not 0\.2"):
        train_target(replace(TINY, weight_decay=0.2), run)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("block_length", [16, 32])
def test_every_recipe_ends_at_the_block_length_it_exports(name: str, block_length: int) -> None:
    settings = RECIPES[name](block_length, ())
    assert settings.phases[-1].block_length == settings.block_length == block_length


def test_gsm8k_is_scored_by_the_last_number_and_loops_are_seen(run: Path, tmp_path: Path) -> None:
    assert last_number("It is 1,234.50 dollars.\n#### 1,234.5") == 1234.5
    assert last_number("none") is None
    assert ends_in_a_loop((9, *(1, 2, 3) * 4))
    assert not ends_in_a_loop((9, *(1, 2, 3) * 3, 4))
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"question": "2 and 3?", "answer": "#### 5"}\n{"question": "1?"}\n')
    folder = tmp_path / "target"
    write_model_folder(newest_checkpoint(run), folder, settings=TINY, command="a test")
    scores = gsm8k_figures(folder, path, limit=1, max_new_tokens=40)
    assert scores.num_prompts == 1
    gsm8k_note(folder, scores)
    assert "GSM8K, 1 questions" in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="line 2: want question and answer"):
        gsm8k_figures(folder, path, limit=2)


def test_a_tokenizer_is_trained_once(run: Path) -> None:
    before = (run / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
    ready_tokenizer(TINY, run)
    assert (run / "tokenizer" / "tokenizer.json").stat().st_mtime_ns == before
