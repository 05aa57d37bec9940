"""The bundled target's tokenizer: byte-level BPE, a token a digit, a Qwen chat template."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spot_batch.lab.bundled.corpus import Level, problem_at

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
MASK = "<|MASK|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)

# An operator between two numbers and the comma of a list are one piece each; a digit never joins.
PIECES = r" [-+*/=] (?=\d)|, (?=\d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def train_tokenizer(*, vocab_size: int, seed: int, num_problems: int) -> PreTrainedTokenizerFast:
    """A tokenizer fitted to the first problems of the training split."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(tokenizer_texts(seed=seed, num_problems=num_problems), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def tokenizer_texts(*, seed: int, num_problems: int) -> Iterator[str]:
    """Chat texts to fit the merges to, easy and hard in turn."""
    yield "system\nuser\nassistant\n"
    for index in range(num_problems):
        level: Level = "easy" if index % 2 == 0 else "hard"
        problem = problem_at(index, split="train", seed=seed, level=level)
        yield "user\n" + problem.question
        yield "assistant\n" + problem.response


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
