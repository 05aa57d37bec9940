"""OpenAI batch requests as rows: `{"custom_id", "method", "url", "body"}` a line.

A field of the body is used, or is one that changes nothing, or else its row is an error that names
it: no request is answered as if it had asked for less than it did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

from spot_batch.inputs.errors import RowFault
from spot_batch.job.limits import MAX_NEW_TOKENS, checked_temperature, checked_top_p

URL = "/v1/chat/completions"
SCHEMA = pa.schema(
    [
        ("custom_id", pa.string()),
        ("model", pa.string()),
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("max_new_tokens", pa.int64()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
    ]
)
"""The columns of every job of this format. `model` is what the request asked for: the job's own
target answers all of them."""

_REQUEST = frozenset({"custom_id", "method", "url", "body"})
_LENGTHS = ("max_tokens", "max_completion_tokens")
_USED = frozenset({"model", "messages", "temperature", "top_p", "seed", "stop", *_LENGTHS})
# Fields that say, with these values, what is done anyway.
_HARMLESS: Mapping[str, object] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
}
# Fields that change no token, whatever they say.
_OF_NO_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})


def looks_like_requests(values: Mapping[str, object]) -> bool:
    """Whether a JSON object is a batch request."""
    return values.keys() >= _REQUEST and isinstance(values["body"], dict)


def columns_of(values: Mapping[str, object]) -> dict[str, object]:
    """The row of a request; RowFault `bad_request` naming what cannot be done."""
    body = values.get("body")
    if not isinstance(body, dict):
        raise RowFault("bad_request", "body is missing, or no object")
    for name in values:
        if name not in _REQUEST:
            raise RowFault("bad_request", f"{name} is not implemented")
    if (method := values.get("method", "POST")) != "POST":
        raise RowFault("bad_request", f"method {method!r} is not implemented, only POST is")
    if (url := values.get("url", URL)) != URL:
        raise RowFault("bad_request", f"url {url!r} is not implemented, only {URL} is")
    for name, value in body.items():
        if name in _USED or name in _OF_NO_EFFECT or value is None:
            continue
        if name not in _HARMLESS or value != _HARMLESS[name]:
            raise RowFault("bad_request", f"body.{name} is not implemented")
    return {
        "custom_id": values.get("custom_id"),
        "model": body.get("model"),
        "messages": _messages(body.get("messages")),
        "max_new_tokens": _length(body),
        "temperature": _number(body, "temperature", checked_temperature),
        "top_p": _number(body, "top_p", checked_top_p),
        "seed": _whole(body, "seed", 0, 2**63 - 1),
        "stop": _stop(body),
    }


def _length(body: Mapping[str, object]) -> int | None:
    given = [_whole(body, name, 1, MAX_NEW_TOKENS) for name in _LENGTHS]
    one, other = given
    if one is not None and other is not None and one != other:
        raise RowFault("bad_request", "body.max_tokens and body.max_completion_tokens differ")
    return other if one is None else one


def _whole(body: Mapping[str, object], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RowFault(
            "bad_request", f"body.{name} must be a whole number from {low} to {high}, got {value!r}"
        )
    return value


def _number(body: Mapping[str, object], name: str, check: Callable[[float], float]) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RowFault("bad_request", f"body.{name} must be a number, got {value!r}")
    try:
        return check(float(value))
    except (ValueError, OverflowError) as error:
        raise RowFault("bad_request", f"body.{name} {error}") from None


def _stop(body: Mapping[str, object]) -> list[str] | None:
    value = body.get("stop")
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RowFault("bad_request", f"body.stop must be texts, none empty, got {value!r}")
    return texts


def _messages(messages: object) -> object:
    if not isinstance(messages, list):
        raise RowFault("bad_request", "body.messages is missing, or no list")
    return [_message(message, f"body.messages[{at}]") for at, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, dict):
        raise RowFault("bad_request", f"{where} is no object")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise RowFault("bad_request", f"{where}.{name} is not implemented")
    content = message.get("content")
    if isinstance(content, list):  # in parts: text may be joined, anything else is no text
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RowFault("bad_request", f"{where}.content of type {kind!r} is not text")
        content = "".join(part["text"] for part in content)
    return {"role": message.get("role"), "content": content}
