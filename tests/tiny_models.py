"""Small targets for the tests, in the published layout, made from a seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from spot_batch.checkpoints.json_files import read_json
from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.models.qwen3 import qwen3_config

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|MASK|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_target(
    folder: Path,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    block_length: int = 8,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """A random SDAR checkpoint folder; `scale` widens the logits, so that not all is a near tie."""
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 4,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                spread = scale if "lm_head" in name or "embed" in name else 1.0
                spread = spread if "embed" in name else spread / parameter.shape[1] ** 0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    published = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": config.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "block_size": block_length,
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(published))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.eos_token_id, tokenizer.pad_token_id]})
    )
    return folder


def publish_tokenizer(folder: Path, *, mask_text: str, mask_text_of_files: str) -> None:
    """Make a folder's tokenizer the files that SDAR is published with: Qwen2's, of a class of its
    own, and a mask that the tokenizer's config and the other files need not spell alike."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*SPECIAL[:-1], mask_text_of_files]
    ids = {text: len(alphabet) + index for index, text in enumerate(texts)}
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    files: dict[str, object] = {
        "vocab.json": {letter: index for index, letter in enumerate(alphabet)},
        "added_tokens.json": ids,
        "special_tokens_map.json": {**named, "mask_token": mask_text_of_files},
        "tokenizer_config.json": {
            **named,
            "mask_token": mask_text,
            "chat_template": CHAT_TEMPLATE,
            "tokenizer_class": "Qwen2Tokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]},
            "added_tokens_decoder": {
                str(number): {"content": text, "special": True, **flags}
                for text, number in ids.items()
            },
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


def plain_model(info: ModelInfo, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """transformers' own model with its own attention: no slots, no tiles, no cache of ours."""
    config = qwen3_config(read_json(info.path / "config.json"), info.sizes, where=info.name)
    model = Qwen3ForCausalLM.from_pretrained(
        info.path, config=config, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def attend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, n) bool, who sees whom -> the additive 4-D mask."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)[None, None]
