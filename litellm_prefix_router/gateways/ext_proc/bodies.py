"""The request body: read as the engine will read it, and, where asked for, given a cache salt or another model name.

An edit replaces the values of top-level members in place (or adds a member at the end), so that everything else
reaches the engine byte for byte.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

import msgspec

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
SALT_HEX_DIGITS = 32


def read_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object that engines will see; None if it is no JSON or no object."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = json.loads(body)  # NaN, a BOM, UTF-16, lone surrogates: engines take them
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def salt_of(tenant: str, secret: str) -> str:
    """The tenant's cache salt: nobody who lacks the secret can name another tenant's."""
    return hmac.new(secret.encode(), tenant.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
        :SALT_HEX_DIGITS
    ]


def edit_object(body: bytes, changes: Mapping[str, Any]) -> bytes:
    """`body`, a JSON object, with top-level members set to these values. Raises ValueError if it is no object."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    spans, end, empty = _members(text)
    pieces: list[str] = []
    at = 0
    for key, start, stop in spans:
        if key in changes:
            pieces += (text[at:start], json.dumps(changes[key]))
            at = stop
    pieces.append(text[at:end])
    present = {key for key, _, _ in spans}
    for key, value in changes.items():
        if key not in present:
            pieces.append(f"{'' if empty else ','}{json.dumps(key)}:{json.dumps(value)}")
            empty = False
    pieces.append(text[end:])
    return "".join(pieces).encode("utf-8", "surrogatepass")


def _members(text: str) -> tuple[list[tuple[str, int, int]], int, bool]:
    """((key, start of its value, end of its value), ...), where the closing brace stands, whether it is empty."""
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("not a JSON object")
    at = _skip(text, at + 1)
    spans: list[tuple[str, int, int]] = []
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError("a member has no name")
        key, at = scanstring(text, at + 1, False)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a member has no value")
        start = _skip(text, at + 1)
        try:
            _, stop = _DECODER.raw_decode(text, start)
        except (StopIteration, RecursionError):
            raise ValueError("a member has no value") from None
        spans.append((key, start, stop))
        at = _skip(text, stop)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("the object does not end")
    return spans, at, not spans


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at
