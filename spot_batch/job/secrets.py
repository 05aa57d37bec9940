"""Credentials stay out of specs, and out of whatever is said or written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

# One slash is enough: that is what a pathlib path leaves of a URL's two.
_USER = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]+:/{1,2})(?:[^/?#\s]*|[^/\s]*:[^/\s]*)@", re.I)
_SECRET_PARAMETER = re.compile(
    r"(?P<key>[?&;#](?P<name>[\w.%~-]*(?:token|secret|passw(?:or)?d|passphrase|pwd|signature"
    r"|credentials?|authorization|accesskey(?:id)?|apikey|(?<![a-z0-9])(?:key|sig|auth))))"
    r"=[^&\s]+",  # a quote may be part of it: rather star out the quote that ends it too
    re.I,
)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]+:/{1,2}\S+", re.I)


def redacted(text: str) -> str:
    """The text with users, passwords and secret parameters of URLs starred out."""
    return _SECRET_PARAMETER.sub(r"\g<key>=***", _USER.sub(r"\g<scheme>***@", text))


def credentials_in(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """(key, kind of credential) of every URL in the tree that holds one; never the credential."""
    if isinstance(value, str):
        for url in _URL.findall(value):
            if _USER.search(url):
                yield path, "a user or password in a URL"
            for parameter in _SECRET_PARAMETER.finditer(url):
                yield path, f"{parameter['name']}= in a URL"
    elif isinstance(value, BaseModel):
        yield from credentials_in(value.model_dump(), path, seen)
    elif isinstance(value, Mapping | list | tuple):
        if id(value) in seen:  # an anchor met again: once is enough, and it may hold itself
            return
        seen.add(id(value))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from credentials_in(key, f"a key of {path or 'the spec'}", seen)
                yield from credentials_in(inner, f"{path}.{key}" if path else str(key), seen)
        else:
            for inner in value:
                yield from credentials_in(inner, path, seen)
