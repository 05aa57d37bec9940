"""Samples to train on: the corpus, and optionally further JSON-lines files, mixed by share."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from spot_batch.inputs.json_lines import json_lines
from spot_batch.lab.bundled.corpus import Level, problem_at
from spot_batch.lab.bundled.layout import Sample
from spot_batch.lab.bundled.tokenizer import IM_END

COLUMNS = (
    ("question", "response"),
    ("question", "answer"),
    ("text", "code"),
    ("prompt", "response"),
)
"""Names that the two texts of an extra source's row go by: ours, GSM8K's, MBPP's, others'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraSource:
    """A JSON-lines file of questions and responses, and its share of the samples."""

    path: Path
    share: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and the response to learn."""

    question: str
    response: str


class SampleSource:
    """Training samples by address: sample `index` depends on the seed and on itself only."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        seed: int,
        max_tokens: int,
        extras: tuple[ExtraSource, ...] = (),
    ) -> None:
        if sum(extra.share for extra in extras) >= 1.0:
            raise ValueError("the shares of extra sources must sum to less than 1")
        self.tokenizer = tokenizer
        self.seed = seed
        self.max_tokens = max_tokens
        self.shares = tuple(extra.share for extra in extras)
        self.extras = tuple(read_exchanges(extra.path) for extra in extras)
        (self.end_id,) = tokenizer.convert_tokens_to_ids([IM_END])

    def batch(self, start: int, count: int, *, hard_share: float) -> list[Sample]:
        """The `count` samples from index `start` on, less those too long to learn."""
        exchanges = [self.exchange(start + i, hard_share=hard_share) for i in range(count)]
        prompts = [render_prompt(exchange.question) for exchange in exchanges]
        encode = self.tokenizer.backend_tokenizer.encode_batch
        samples = [
            Sample(tuple(prompt.ids), (*response.ids, self.end_id))
            for prompt, response in zip(
                encode(prompts), encode([exchange.response for exchange in exchanges]), strict=True
            )
        ]
        return [s for s in samples if len(s.prompt) + len(s.response) <= self.max_tokens]

    def exchange(self, index: int, *, hard_share: float) -> Exchange:
        """What sample `index` says."""
        rng = random.Random(f"mix/{self.seed}/{index}")
        point = rng.random()
        for share, exchanges in zip(self.shares, self.extras, strict=True):
            if point < share:
                return rng.choice(exchanges)
            point -= share
        level: Level = "hard" if rng.random() < hard_share else "easy"
        problem = problem_at(index, split="train", seed=self.seed, level=level)
        return Exchange(problem.question, problem.response)


def render_prompt(question: str) -> str:
    """The chat text up to the response, as the tokenizer's template renders one user message."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def read_exchanges(path: Path) -> list[Exchange]:
    """Every row of an extra source, columns as in COLUMNS. Raises ValueError naming the line."""
    exchanges = []
    for where, row in json_lines(path):
        pair = next(
            (pair for pair in COLUMNS if all(isinstance(row.get(c), str) for c in pair)), None
        )
        if pair is None:
            known = " or ".join(f"{asked!r} and {told!r}" for asked, told in COLUMNS)
            raise ValueError(f"{where}: want strings {known}")
        exchanges.append(Exchange(row[pair[0]], without_calculator(row[pair[1]])))
    if not exchanges:
        raise ValueError(f"{path} holds no rows")
    return exchanges


def without_calculator(text: str) -> str:
    """GSM8K's worked answers without the calculator notes (<<2+3=5>>) that nobody writes."""
    return re.sub(r"<<[^<>]*>>", "", text).replace("\r\n", "\n")
