"""Prompts: from a row to the tokens that the target reads.

A row whose text holds no control token is encoded as the tokenizer's own `apply_chat_template`
does, in one piece. Control tokens are the special tokens, the mask, and the added tokens that the
chat template writes. Where the row's text spells one out, it stays text: the rendered text is cut
at the control tokens that the template itself wrote, and what lies between is encoded without added
tokens. Which are the template's own shows when it is given private characters in their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from spot_batch.inputs.chat import message_of
from spot_batch.inputs.errors import InputError, RowFault
from spot_batch.inputs.template import TEMPLATE_FAULTS
from spot_batch.inputs.template_process import TemplateProcess
from spot_batch.job.spec import JobSpec
from spot_batch.records.input import PinnedInput

Messages = list[dict[str, Any]]

_PRIVATE_PLANES = (0xF0000, 0x100000)  # private use: whichever does not occur in the row
_PLANE_SIZE = 0xFFFE
_CHARS_A_TOKEN = 4  # where the search for how much of a prompt fits begins


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    token_ids: tuple[int, ...]


class PromptRenderer:
    """Turns a row into the prompt's tokens; raises RowFault for a row that has none.

    A text prompt (a column's, or what `input.template` makes of several) is one user turn where the
    tokenizer has a chat template and `model.chat_template` is auto, else it is read as it stands.
    `input.system` goes first, unless a row's messages begin with a system message of their own. The
    prompt and `max_new_tokens`, rounded up to whole blocks, must fit `max_context`;
    `input.overlong` says what becomes of a row that does not.
    """

    def __init__(
        self,
        spec: JobSpec,
        pinned: PinnedInput,
        tokenizer: Any,
        *,
        max_context: int,
        block_length: int,
        mask_id: int | None = None,
    ) -> None:
        template = tokenizer.chat_template if spec.model.chat_template == "auto" else None
        self._has_template = template is not None
        if not self._has_template:
            why = (
                "model.chat_template is none"
                if spec.model.chat_template == "none"
                else "the target's tokenizer has none"
            )
            if pinned.prompt_kind == "messages":
                raise InputError(f"column {pinned.prompt_column!r} needs a chat template; {why}")
            if spec.input.system is not None:
                raise InputError(f"input.system needs a chat template; {why}")
        self._column = pinned.prompt_column
        self._template = TemplateProcess(spec.input.template) if spec.input.template else None
        self._from = "input.template" if self._template else f"column {self._column!r}"
        self._is_chat = pinned.prompt_kind == "messages"
        self._system = spec.input.system
        self._overlong = spec.input.overlong
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._block_length = block_length
        if self._has_template:
            _check_template(tokenizer)
        self._control = _control_tokens(tokenizer, str(template or ""), mask_id)
        self._control_re = _any_of(self._control)
        self._special = {text for text, number in self._control.items() if number == mask_id}
        self._special |= {
            each.content for each in tokenizer.added_tokens_decoder.values() if each.special
        }

    def render(self, row: Mapping[str, object], *, max_new_tokens: int) -> RenderedPrompt:
        """The prompt of a row, or RowFault: empty_prompt, bad_prompt, too_long(_skipped)."""
        value = row[self._column] if self._template is None else self._template.render(row)
        messages = self._messages(value) if self._is_chat else self._user_turn(value)
        rendered = self._encoded(messages)
        if not rendered.token_ids:
            raise RowFault("empty_prompt", f"{self._from}: no token is left of it")
        room = room_beside(
            max_new_tokens, block_length=self._block_length, max_context=self._max_context
        )
        if len(rendered.token_ids) <= room:
            return rendered
        too_long = (
            f"the prompt has {len(rendered.token_ids)} tokens; beside {max_new_tokens} new ones in "
            f"blocks of {self._block_length}, the context of {self._max_context} holds "
            f"{max(room, 0)}"
        )
        if self._overlong == "skip":
            raise RowFault("too_long_skipped", too_long)
        shorter = self._truncated(messages, room) if self._overlong == "truncate_left" else None
        if shorter is None:
            raise RowFault("too_long", too_long)
        return shorter

    # -- messages ----------------------------------------------------------------------------------

    def _user_turn(self, value: object) -> Messages:
        if value is None:
            raise RowFault("empty_prompt", f"{self._from} is null")
        if isinstance(value, str) and not value.strip():
            raise RowFault("empty_prompt", f"{self._from} is empty")
        assert isinstance(value, str), f"a prompt column holds text, got {type(value).__name__}"
        return self._with_system([{"role": "user", "content": value}])

    def _messages(self, value: object) -> Messages:
        if value is None:
            raise RowFault("empty_prompt", f"{self._from} is null")
        if value == []:
            raise RowFault("empty_prompt", f"{self._from} holds no message")
        assert isinstance(value, list), f"messages are a list, got {type(value).__name__}"
        messages = []
        for place, message in enumerate(value):
            where = f"{self._from}, message {place}"
            if not isinstance(message, dict):
                raise RowFault("bad_prompt", f"{where} is null")
            messages.append(message_of(message, where))
        if messages[-1]["role"] == "assistant":
            raise RowFault(
                "bad_prompt",
                f"{self._from}: its last message is the assistant's, which is neither answered nor "
                "continued; leave it out",
            )
        if not any(str(message["content"]).strip() for message in messages):
            raise RowFault("empty_prompt", f"{self._from}: every message is empty")
        return self._with_system(messages)

    def _with_system(self, messages: Messages) -> Messages:
        if self._system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]

    # -- tokens ------------------------------------------------------------------------------------

    def _encoded(self, messages: Messages) -> RenderedPrompt:
        if not self._has_template:
            return self._raw(messages[-1]["content"])
        if not _holds(messages, self._control_re):
            text = self._through_template(messages)
            return RenderedPrompt(text, tuple(self._ids(text)))
        return self._cut(*self._told_apart(messages))

    def _told_apart(self, messages: Messages) -> tuple[str, list[bool], _Disguise]:
        """The prompt, partly in disguise, and of each control token left in it whether the template
        wrote it.

        A token in disguise is never the template's own. But a template may look for tokens in what
        it is given, as Qwen3's does for `<think>` in earlier turns: those that it names itself, or
        all where that is not enough, are shown to it as they are, and once more beside a private
        character that tells where they went.
        """
        disguise = _Disguise(self._control, _free_plane(messages))

        def rendered(hidden: frozenset[str], *, is_marked: bool = False) -> str:
            changed = _mapped(
                messages,
                lambda text: self._control_re.sub(
                    lambda match: disguise.of(match, hidden=hidden, is_marked=is_marked), text
                ),
            )
            assert isinstance(changed, list)
            return self._through_template(changed)

        control = frozenset(self._control)
        given = {m[0] for text in _strings(messages) for m in self._control_re.finditer(text)}
        as_given = rendered(frozenset())
        for looked_for in (given - self._special, given):
            text = rendered(control - looked_for)
            if disguise.off(text) == as_given:
                break
        if not looked_for:
            return text, [True] * len(self._control_re.findall(text)), disguise
        marked = rendered(control - looked_for, is_marked=True)
        written = list(self._control_re.finditer(marked))
        if [m[0] for m in written] != self._control_re.findall(text):  # it looks at more than that
            text = rendered(control)
            return text, [True] * len(self._control_re.findall(text)), disguise
        return text, [not disguise.is_beside(m) for m in written], disguise

    def _cut(self, text: str, own: Sequence[bool], disguise: _Disguise) -> RenderedPrompt:
        """The tokens: the template's own control tokens, and what lies between as plain text."""
        token_ids: list[int] = []
        start = 0
        for match, is_own in zip(self._control_re.finditer(text), own, strict=True):
            if is_own:
                token_ids += self._plain_ids(disguise.off(text[start : match.start()]))
                token_ids.append(self._control[match[0]])
                start = match.end()
        token_ids += self._plain_ids(disguise.off(text[start:]))
        return RenderedPrompt(disguise.off(text), tuple(token_ids))

    def _raw(self, text: str) -> RenderedPrompt:
        """A prompt that is read as it stands; the tokenizer adds what it adds to every text."""
        if not self._control_re.search(text):
            return RenderedPrompt(text, tuple(self._tokenizer.encode(text)))
        around: list[int] = self._tokenizer.encode("")  # as in <bos>, or <bos> ... <eos>
        before = _common_start(around, self._tokenizer.encode("a"))
        token_ids = [*around[:before], *self._plain_ids(text), *around[before:]]
        return RenderedPrompt(text, tuple(token_ids))

    def _through_template(self, messages: Messages) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except TEMPLATE_FAULTS as error:
            raise RowFault(
                "bad_prompt", f"{self._from}: the chat template refuses it: {error}"
            ) from None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        """The text without any added token: normalised, cut and merged as ordinary text is."""
        backend = self._tokenizer.backend_tokenizer
        if not text:
            return []
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        cuts = [text]
        if backend.pre_tokenizer is not None:
            cuts = [cut for cut, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids = [token.id for cut in cuts for token in backend.model.tokenize(cut)]
        made = set(ids) & set(self._control.values())
        if made:
            token = next(text for text, number in self._control.items() if number in made)
            raise RowFault(
                "bad_prompt",
                f"{self._from} spells the control token {token!r}, which this "
                "tokenizer cannot write as text",
            )
        return ids

    # -- length ------------------------------------------------------------------------------------

    def _truncated(self, messages: Messages, room: int) -> RenderedPrompt | None:
        """The prompt with the beginning of its text left out; None where nothing of it fits.

        Messages lose their beginning in order, system messages and the template lose nothing.
        """
        total = sum(len(m["content"]) for m in messages if m["role"] != "system")
        best: RenderedPrompt | None = None
        low, high = 0, max(1, room) * _CHARS_A_TOKEN  # `low` characters are known to fit
        while low < total:
            high = min(high, total)
            tried = self._encoded(_last_chars(messages, high, total))
            if len(tried.token_ids) > room:
                break
            best, low, high = tried, high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._encoded(_last_chars(messages, middle, total))
            if len(tried.token_ids) <= room:
                best, low = tried, middle
            else:
                high = middle
        return best


class _Disguise:
    """Private characters that stand for control tokens, or beside them."""

    def __init__(self, control: Iterable[str], plane: int) -> None:
        self._char_of = {token: chr(plane + 2 + i) for i, token in enumerate(control)}
        self._token_of = {char: token for token, char in self._char_of.items()}
        self._before, self._after = chr(plane), chr(plane + 1)
        self._chars = re.compile("|".join(map(re.escape, self._token_of)) or r"(?!)")

    def of(self, match: re.Match[str], *, hidden: Container[str], is_marked: bool) -> str:
        """What is shown in place of a token that a row spells out."""
        token = match[0]
        if token in hidden:
            return self._char_of[token]
        if not is_marked:
            return token
        # A template asks whether a text starts or ends with a token: both still hold.
        return self._before + token if match.start() else token + self._after

    def off(self, text: str) -> str:
        return self._chars.sub(lambda match: self._token_of[match[0]], text)

    def is_beside(self, match: re.Match[str]) -> bool:
        """Whether a token stands where a row spelt it out."""
        text, start, end = match.string, match.start(), match.end()
        return text[max(0, start - 1) : start] == self._before or text[end : end + 1] == self._after


def room_beside(max_new_tokens: int, *, block_length: int, max_context: int) -> int:
    """How many prompt tokens fit before `max_new_tokens`, all in whole blocks."""
    return max_context // block_length * block_length - max_new_tokens


def _last_chars(messages: Messages, keep: int, total: int) -> Messages:
    cut = total - keep
    shorter = []
    for message in messages:
        content = message["content"]
        if message["role"] != "system":
            dropped = min(cut, len(content))
            cut -= dropped
            content = content[dropped:]
        shorter.append({**message, "content": content})
    return shorter


def _check_template(tokenizer: Any) -> None:
    """InputError where the template is none: it would refuse every row."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise InputError(
            f"the target's chat template cannot be read: line {error.lineno}: {error.message}"
        ) from error
    except TEMPLATE_FAULTS:
        pass  # it may refuse a row for a reason of its own


def _control_tokens(tokenizer: Any, template: str, mask_id: int | None) -> dict[str, int]:
    """Text and id of every token that only the template (or the engine) may write."""
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
        or number == mask_id
        or (token.content in template and not token.content.isspace())
    }


def _common_start(some: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    if not tokens:
        return re.compile(r"(?!)")
    longest_first = sorted(tokens, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first)))


def _strings(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for each in value.values() for text in _strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in _strings(each)]
    return []


def _holds(messages: Messages, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(text) for text in _strings(messages))


def _mapped(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return value


def _free_plane(messages: Messages) -> int:
    for plane in _PRIVATE_PLANES:
        inside = re.compile(f"[{chr(plane)}-{chr(plane + _PLANE_SIZE - 1)}]")
        if not _holds(messages, inside):
            return plane
    raise RowFault(
        "bad_prompt", "a control token's text stands beside characters of both private planes"
    )
