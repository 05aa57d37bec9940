"""GSM8K of an exported target: right answers, and answers that do not run in a circle."""

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from spot_batch.checkpoints.registry import resolve_model
from spot_batch.checkpoints.tokenizer import load_tokenizer
from spot_batch.engine.engine import Engine, EngineSettings
from spot_batch.inputs.ids import noise_key
from spot_batch.inputs.json_lines import json_lines
from spot_batch.lab.bundled.sources import render_prompt
from spot_batch.models.block import load_target
from spot_batch.records.sampling import Request, SamplingParams

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
LOOP_PERIOD = 16  # the longest run of tokens that counts as a repetition when it comes back
LOOP_TIMES = 4


@dataclass(frozen=True, slots=True)
class Gsm8kFigures:
    """Shares of 1, greedy decoding: last number right; no repetition loop."""

    num_prompts: int
    max_new_tokens: int
    accuracy: float
    without_loop: float


def gsm8k_figures(
    folder: Path, path: Path, *, limit: int, max_new_tokens: int = 128, batch: int = 16
) -> Gsm8kFigures:
    """Decode the first `limit` questions of a GSM8K file. Raises ValueError naming a bad line."""
    rows = read_gsm8k(path, limit=limit)
    info = resolve_model(str(folder))
    tokenizer = load_tokenizer(info.path)
    engine = Engine(
        load_target(info, canonical=False), None, EngineSettings(max_sequences=batch, budget=0)
    )
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        stop_ids=info.stop_ids,
        confidence=info.family.confidence,
    )
    for index, (question, _) in enumerate(rows):
        ids = tokenizer.encode(render_prompt(question), add_special_tokens=False)
        engine.add(
            Request(
                sample_id=index,
                prompt_ids=tuple(ids),
                noise_key=noise_key(0, str(index), 0),
                params=params,
            )
        )
    right = without_loop = 0
    for completion in engine.run():
        said = last_number(str(tokenizer.decode(list(completion.token_ids))))
        right += said is not None and said == last_number(rows[completion.sample_id][1])
        without_loop += not ends_in_a_loop(completion.token_ids)
    return Gsm8kFigures(
        num_prompts=len(rows),
        max_new_tokens=max_new_tokens,
        accuracy=right / len(rows),
        without_loop=without_loop / len(rows),
    )


def read_gsm8k(path: Path, *, limit: int) -> list[tuple[str, str]]:
    """Questions and worked answers. Raises ValueError naming a bad line."""
    rows = []
    for where, row in islice(json_lines(path), limit):
        if not {"question", "answer"} <= set(row):
            raise ValueError(f"{where}: want question and answer")
        rows.append((str(row["question"]), str(row["answer"])))
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def last_number(text: str) -> float | None:
    """The last number of a text, as GSM8K's answers are scored."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def ends_in_a_loop(tokens: tuple[int, ...]) -> bool:
    """Whether the same few tokens come at least four times running at the end."""
    return any(
        len(tokens) >= LOOP_TIMES * period
        and tokens[-period:] * LOOP_TIMES == tokens[-LOOP_TIMES * period :]
        for period in range(1, LOOP_PERIOD + 1)
    )
