"""Prompts for benchmarks: a JSON-lines file's questions, as one user turn each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from spot_batch.checkpoints.registry import ModelInfo
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.inputs.ids import noise_key
from spot_batch.inputs.json_lines import json_lines
from spot_batch.lab.bench.grids import ClockedGrid
from spot_batch.records.sampling import Request, SamplingParams

_COLUMNS = ("question", "prompt", "instruction", "text")
_PACKAGED = Path(__file__).parents[2] / "assets" / "prompts.jsonl"


def read_questions(path: Path | None, *, limit: int) -> list[str]:
    """The first `limit` prompts of a JSON-lines file (the packaged ones without a path).

    Raises ValueError naming the file and line where there is none.
    """
    path = path or _PACKAGED
    questions = []
    for where, row in islice(json_lines(path), limit):
        name = next((name for name in _COLUMNS if isinstance(row.get(name), str)), None)
        if name is None:
            raise ValueError(f"{where}: none of {', '.join(_COLUMNS)} is a string")
        questions.append(row[name])
    if not questions:
        raise ValueError(f"{path}: holds no prompts")
    return questions


def params_of(
    info: ModelInfo,
    *,
    temperature: float,
    max_new_tokens: int,
    is_fixed: bool = False,
    unmasking: str = "single",
) -> SamplingParams:
    """How a benchmark's samples are decoded: by the family's rule, without top-p or top-k, and with
    `is_fixed` behind their stop tokens too."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        unmasking="threshold" if unmasking == "threshold" else "single",
        stop_ids=info.stop_ids,
        stop_at="never" if is_fixed else "early",
        confidence=info.family.confidence,
    )


def params_of_grid(info: ModelInfo, grid: ClockedGrid) -> SamplingParams:
    """How the samples of a benchmark of one temperature are decoded."""
    return params_of(
        info,
        temperature=grid.temperature,
        max_new_tokens=grid.max_new_tokens,
        unmasking=grid.unmasking,
    )


def make_requests(
    info: ModelInfo, questions: Sequence[str], params: SamplingParams, *, seed: int = 0
) -> list[Request]:
    """A request a question, as a job would make it."""
    tokenizer = load_tokenizer(info.path)
    return [
        Request(
            sample_id=index,
            prompt_ids=tuple(
                tokenizer.encode(rendered(info, tokenizer, question), add_special_tokens=False)
            ),
            noise_key=noise_key(seed, str(index), 0),
            params=params,
        )
        for index, question in enumerate(questions)
    ]


def rendered(info: ModelInfo, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """A question as the model is given it: one user turn where it has a chat template."""
    if not info.has_chat_template:
        return question
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    assert isinstance(text, str)
    return text
