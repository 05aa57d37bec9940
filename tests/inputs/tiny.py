"""A small byte-level BPE tokenizer with merges, special tokens and a chat template."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('no role ' + message.role) }}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>' }}{%- endif %}"
)
TEXTS = [
    "How much is three times four? Answer with a number and show the steps.",
    "<|im_start|> and <|im_end|> and <|MASK|> and <think> are special to some people",
    "Ein Mädchen kauft 12 Äpfel und isst 3 davon. 😀",
] * 20


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """`<|MASK|>` is added and not special, as some checkpoints have it; `<think>` likewise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    plain = [AddedToken(text, normalized=False, special=False) for text in ("<|MASK|>", "<think>")]
    tokenizer.add_tokens(plain)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
