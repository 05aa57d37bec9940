"""Where a sample ends: stop ids, stop strings and its length, all functions of what is fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spot_batch.records.results import FinishReason
from spot_batch.records.sampling import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text without special tokens: the function that makes the generation column."""


@dataclass(frozen=True, slots=True)
class End:
    """Why and at how many tokens a sample ends. `text` is set where a stop string cut it: the
    string may begin inside a token, so the text can be longer than the kept tokens say."""

    reason: FinishReason
    num_tokens: int
    text: str | None = None


def find_end(
    tokens: Sequence[int], params: SamplingParams, *, whole: bool, decode: Decode | None
) -> End | None:
    """The end of a sample whose first `tokens` are fixed without a gap; None while it goes on.

    `whole` says that the block they reach into is finished. `early` needs no whole block: nothing
    that is still masked stands before the end, so nothing can change the trimmed output any more.
    """
    if params.stop_at != "early" and not whole:
        return None
    tokens = tokens[: params.max_new_tokens]
    if params.stop_at != "never":
        num_tokens = next(
            (at for at, token in enumerate(tokens) if token in params.stop_ids), len(tokens)
        )
        if params.stop:
            assert decode is not None, "stop strings need a tokenizer"
            cut = cut_at_text(tokens[:num_tokens], params.stop, decode)
            if cut is not None:
                return cut
        if num_tokens < len(tokens):
            return End("stop", num_tokens)
    if len(tokens) == params.max_new_tokens:
        return End("length", len(tokens))
    return None


def cut_at_text(tokens: Sequence[int], stop: Sequence[str], decode: Decode) -> End | None:
    """The end before the stop string that is complete first, so that it does not matter how much
    of the text is there when it is looked for."""
    text = decode(tokens)
    found = [(at + len(one), at) for one in stop if (at := text.find(one)) >= 0]
    if not found:
        return None
    _, at = min(found)
    num_tokens = len(tokens)
    while num_tokens and len(decode(tokens[:num_tokens])) > at:
        num_tokens -= 1
    return End("stop", num_tokens, text[:at])
