"""Held-out figures of a target: exact answers, clean ends, and how stable its next step is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Model

from spot_batch.lab.bundled.corpus import KINDS, Kind, Level, Problem, check
from spot_batch.lab.bundled.layout import block_causal
from spot_batch.lab.bundled.model import hidden_rows, tied_logits
from spot_batch.lab.bundled.sources import render_prompt
from spot_batch.lab.bundled.tokenizer import END_OF_TEXT, IM_END, MASK


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What a held-out evaluation found; every figure is a share of 1."""

    num_prompts: int
    exact: float
    exact_easy: float
    exact_hard: float
    exact_math: float
    exact_code: float
    exact_list: float
    exact_story: float
    ended: float
    mean_confidence: float
    stale_argmax: float  # the last forward's argmax at the position committed next is the commit
    stale_position: float  # the last forward's runner-up position is the one committed next


@dataclass(slots=True)
class Flight:
    """One sample under the greedy decoder; its last block is the one being decoded."""

    tokens: list[int]
    prompt_length: int
    blocks_left: int
    stale_tokens: Tensor | None = None  # (block,) of the forward before, within this block
    stale_confidence: Tensor | None = None
    done: bool = False


@dataclass(slots=True)
class Tally:
    """Sums over commits."""

    num_commits: int = 0
    num_stale: int = 0
    confidence: float = 0.0
    same_token: int = 0
    same_position: int = 0


def evaluate(
    model: Qwen3Model,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    block_length: int,
    max_blocks: int = 4,
    batch: int = 64,
) -> AnswerFigures:
    """Decode every problem greedily, one commit a forward, and score the answers."""
    end_id, fill_id = tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT])
    tally = Tally()
    right: dict[Kind, list[bool]] = {kind: [] for kind in KINDS}
    by_level: dict[Level, list[bool]] = {"easy": [], "hard": []}
    ended: list[bool] = []
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        prompts = [tokenizer.backend_tokenizer.encode(render_prompt(p.question)).ids for p in chunk]
        outputs = decode(
            model,
            prompts,
            block_length=block_length,
            max_blocks=max_blocks,
            mask_id=tokenizer.convert_tokens_to_ids(MASK),
            stop_ids=(end_id, fill_id),
            tally=tally,
        )
        for problem, output in zip(chunk, outputs, strict=True):
            stops = [i for i, token in enumerate(output) if token in (end_id, fill_id)]
            ended.append(bool(stops))
            text = tokenizer.decode(output[: stops[0]] if stops else output)
            is_right = check(problem, text)
            right[problem.kind].append(is_right)
            by_level[problem.level].append(is_right)
    return AnswerFigures(
        num_prompts=len(problems),
        exact=share(by_level["easy"] + by_level["hard"]),
        exact_easy=share(by_level["easy"]),
        exact_hard=share(by_level["hard"]),
        exact_math=share(right["math"]),
        exact_code=share(right["code"]),
        exact_list=share(right["list"]),
        exact_story=share(right["story"]),
        ended=share(ended),
        mean_confidence=tally.confidence / max(tally.num_commits, 1),
        stale_argmax=tally.same_token / max(tally.num_stale, 1),
        stale_position=tally.same_position / max(tally.num_stale, 1),
    )


def share(hits: list[bool]) -> float:
    """The share of hits; 0 where there is nothing to hit."""
    return sum(hits) / max(len(hits), 1)


def decode(
    model: Qwen3Model,
    prompts: Sequence[list[int]],
    *,
    block_length: int,
    max_blocks: int,
    mask_id: int,
    stop_ids: tuple[int, ...],
    tally: Tally,
) -> list[list[int]]:
    """Greedy responses: full forwards, the most confident masked position committed each time."""
    flights = []
    for prompt in prompts:
        masks = block_length - len(prompt) % block_length
        flights.append(Flight([*prompt, *[mask_id] * masks], len(prompt), max_blocks - 1))
    while active := [flight for flight in flights if not flight.done]:
        logits = last_block_logits(model, active, block_length=block_length, mask_id=mask_id)
        confidence, tokens = logits.softmax(-1).max(-1)  # (active, block)
        for flight, row, choice in zip(active, confidence, tokens, strict=True):
            commit_one(flight, row, choice, mask_id=mask_id, tally=tally)
            if mask_id not in flight.tokens:
                open_next_block(flight, block_length, mask_id=mask_id, stop_ids=stop_ids)
    return [flight.tokens[flight.prompt_length :] for flight in flights]


@torch.no_grad()
def last_block_logits(
    model: Qwen3Model, flights: Sequence[Flight], *, block_length: int, mask_id: int
) -> Tensor:
    """(flights, block, vocab) logits of every flight's last block, padded on the right."""
    sizes = torch.tensor([len(flight.tokens) for flight in flights])
    longest = int(sizes.max())
    tokens = torch.zeros(len(flights), longest, dtype=torch.long)
    for row, flight in enumerate(flights):
        tokens[row, : len(flight.tokens)] = torch.tensor(flight.tokens)
    positions = torch.arange(longest).expand(len(flights), longest)
    allowed = block_causal(longest, block_length=block_length)  # padding lies in later blocks
    hidden = hidden_rows(
        model, tokens, positions, allowed.expand(len(flights), 1, longest, longest)
    )
    rows = sizes[:, None] - block_length + torch.arange(block_length)
    return tied_logits(model, hidden[torch.arange(len(flights))[:, None], rows], mask_id=mask_id)


def commit_one(
    flight: Flight, confidence: Tensor, choice: Tensor, *, mask_id: int, tally: Tally
) -> None:
    """(block,) confidences and argmaxes -> the best masked position is committed, and tallied."""
    start = len(flight.tokens) - len(choice)
    masked = torch.tensor([token == mask_id for token in flight.tokens[start:]])
    position = int(confidence.masked_fill(~masked, -1.0).argmax())
    tally.num_commits += 1
    tally.confidence += float(confidence[position])
    if flight.stale_tokens is not None and flight.stale_confidence is not None:
        guess = int(flight.stale_confidence.masked_fill(~masked, -1.0).argmax())
        tally.num_stale += 1
        tally.same_token += int(flight.stale_tokens[position] == choice[position])
        tally.same_position += int(guess == position)
    flight.stale_tokens, flight.stale_confidence = choice, confidence
    flight.tokens[start + position] = int(choice[position])


def open_next_block(
    flight: Flight, block_length: int, *, mask_id: int, stop_ids: tuple[int, ...]
) -> None:
    """Go on to a fresh block unless the response has stopped or may grow no further."""
    flight.stale_tokens = flight.stale_confidence = None
    stopped = any(token in stop_ids for token in flight.tokens[flight.prompt_length :])
    flight.done = stopped or flight.blocks_left == 0
    if not flight.done:
        flight.blocks_left -= 1
        flight.tokens += [mask_id] * block_length
