"""OpenAI batch requests as rows: `{"custom_id", "method", "url", "body"}` a line.

A field of the body is used, or is one that changes nothing, or else its row is an error that names
it: no request is answered as if it had asked for less than it did.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from spot_batch.inputs.chat import joined
from spot_batch.inputs.errors import RowFault
from spot_batch.inputs.given import number, texts, whole
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

_CODE = "bad_request"
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
        raise RowFault(_CODE, "body is missing, or no object")
    for name in values:
        if name not in _REQUEST:
            raise RowFault(_CODE, f"{name} is not implemented")
    if (method := values.get("method", "POST")) != "POST":
        raise RowFault(_CODE, f"method {method!r} is not implemented, only POST is")
    if (url := values.get("url", URL)) != URL:
        raise RowFault(_CODE, f"url {url!r} is not implemented, only {URL} is")
    for name, value in body.items():
        if name in _USED or name in _OF_NO_EFFECT or value is None:
            continue
        if name not in _HARMLESS or value != _HARMLESS[name]:
            raise RowFault(_CODE, f"body.{name} is not implemented")
    return {
        "custom_id": values.get("custom_id"),
        "model": body.get("model"),
        "messages": _messages(body.get("messages")),
        "max_new_tokens": _length(body),
        "temperature": number(
            body.get("temperature"), "body.temperature", checked_temperature, code=_CODE
        ),
        "top_p": number(body.get("top_p"), "body.top_p", checked_top_p, code=_CODE),
        "seed": whole(body.get("seed"), "body.seed", 0, 2**63 - 1, code=_CODE),
        "stop": texts(body.get("stop"), "body.stop", code=_CODE),
    }


def _length(body: Mapping[str, object]) -> int | None:
    one, other = (
        whole(body.get(name), f"body.{name}", 1, MAX_NEW_TOKENS, code=_CODE) for name in _LENGTHS
    )
    if one is not None and other is not None and one != other:
        raise RowFault(_CODE, "body.max_tokens and body.max_completion_tokens differ")
    return other if one is None else one


def _messages(messages: object) -> object:
    if not isinstance(messages, list):
        raise RowFault(_CODE, "body.messages is missing, or no list")
    return [_message(message, f"body.messages[{at}]") for at, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, dict):
        raise RowFault(_CODE, f"{where} is no object")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value is not None:
            raise RowFault(_CODE, f"{where}.{name} is not implemented")
    content = message.get("content")
    if isinstance(content, list):
        content = joined(content, where, code=_CODE)
    return {"role": message.get("role"), "content": content}
