"""Messages as people store them: OpenAI's role and content, content in parts, ShareGPT's turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from spot_batch.inputs.errors import RowFault

SHAREGPT = ("from", "value")
_ROLE_OF = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def is_messages(kind: pa.DataType) -> bool:
    """Whether a column holds [{role, content}] or [{from, value}]."""
    types = pa.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    item = kind.value_type
    if not types.is_struct(item):
        return False
    names = {item.field(i).name for i in range(item.num_fields)}
    return names >= {"role", "content"} or names >= set(SHAREGPT)


def message_of(stored: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with a role and a text as its content; RowFault `bad_prompt` where it has none."""
    given = {name: part for name, part in stored.items() if part is not None}
    if "role" not in given and "from" in given:
        given = in_roles(given)
        if given["role"] is None:
            raise RowFault("bad_prompt", f"{where}: who is {stored['from']!r}? want human or gpt")
    if isinstance(given.get("content"), list):
        given["content"] = joined(given["content"], where, code="bad_prompt")
    for name in ("role", "content"):
        if not isinstance(given.get(name), str):
            kind = type(given[name]).__name__ if name in given else "null"
            raise RowFault("bad_prompt", f"{where}: its {name} must be text, got {kind}")
    return given


def in_roles(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of ShareGPT's as a message with a role (None for an unknown one) and a content."""
    if stored.get("from") is None:
        return dict(stored)
    rest = {name: part for name, part in stored.items() if name not in SHAREGPT}
    return {**rest, "role": _ROLE_OF.get(stored["from"]), "content": stored.get("value")}


def joined(parts: list[Any], where: str, *, code: str) -> str:
    """A content in parts: text is joined, anything else is RowFault `code`."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowFault(code, f"{where}: a content of type {kind!r} is not text")
    return "".join(part["text"] for part in parts)
