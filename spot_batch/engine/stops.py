"""Where a sample ends: stop ids, stop strings and its length, all functions of what is fixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spot_batch.records.results import FinishReason
from spot_batch.records.sampling import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text without special tokens: the function that makes the generation column."""

_BROKEN = "\ufffd"
"""What a byte decodes to that is no character, or not a whole one yet."""


@dataclass(frozen=True, slots=True)
class ByteDecode:
    """A `Decode` whose tokens are bytes: the text of tokens is that of their bytes, one behind the
    other. So behind a whole character it can be cut, and is the text of its parts."""

    decode: Decode

    def __call__(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)


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
    """The end of a sample whose first `tokens` are fixed without a gap; None while it goes on."""
    return StopScan(params, decode).find_end(tokens, len(tokens), whole=whole)


class StopScan:
    """Looks for the end of one sample as it grows; what was looked at is not looked at again.

    Of a `ByteDecode` only the text behind the last whole character is made anew, of any other
    `decode` all of it.
    """

    def __init__(self, params: SamplingParams, decode: Decode | None) -> None:
        assert decode is not None or not params.stop, "stop strings need a tokenizer"
        self._params, self._decode = params, decode
        self._num_scanned = 0
        # Text of the tokens before this one was looked at; so much of it as a stop string that goes
        # on behind it can hold is kept.
        self._num_decoded, self._before = 0, ""

    def find_end(self, written: Sequence[int], num_fixed: int, *, whole: bool) -> End | None:
        """The end of the sample, of whose written tokens the first `num_fixed` are fixed; None
        while it goes on. Each call has the tokens of the last one, and perhaps more.

        `whole` says that the block they reach into is finished. `early` needs no whole block:
        nothing that is still masked stands before the end, so nothing can change the trimmed output
        any more.
        """
        params = self._params
        if params.stop_at != "early" and not whole:
            return None
        num_fixed = min(num_fixed, params.max_new_tokens)
        if params.stop_at != "never":
            num_tokens = self._find_id(written, num_fixed)
            cut = self._find_text(written, num_tokens)
            if cut is not None:
                return cut
            if num_tokens < num_fixed:
                return End("stop", num_tokens)
        if num_fixed == params.max_new_tokens:
            return End("length", num_fixed)
        return None

    def _find_id(self, written: Sequence[int], num_fixed: int) -> int:
        """How many tokens stand before the first stop id."""
        for at in range(self._num_scanned, num_fixed):
            if written[at] in self._params.stop_ids:
                return at
        self._num_scanned = max(self._num_scanned, num_fixed)
        return num_fixed

    def _find_text(self, written: Sequence[int], num_tokens: int) -> End | None:
        stop, decode = self._params.stop, self._decode
        if not stop or decode is None:
            return None
        if not isinstance(decode, ByteDecode):
            return cut_at_text(written[:num_tokens], stop, decode)
        tail = decode(written[self._num_decoded : num_tokens])
        text = self._before + tail
        if any(one in text for one in stop):
            return cut_at_text(written[:num_tokens], stop, decode)
        if not tail.endswith(_BROKEN):
            most = max(map(len, stop)) - 1
            self._before = text[len(text) - most :] if most < len(text) else text
            self._num_decoded = num_tokens
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
