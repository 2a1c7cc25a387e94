"""Reads `cached_tokens` out of a response as it passes, streamed or whole, without keeping or parsing it.

Inside JSON text a quotation mark is escaped, so the key followed by a number can't be something that the model wrote:
the last occurrence is the engine's own report.
"""

from __future__ import annotations

import re

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)(?=[^\d])')
_CARRY_BYTES = 96
"""What may have to be seen again with the next chunk: a key and its number."""


class UsageReader:
    """Feed it the body's chunks in order."""

    def __init__(self) -> None:
        self._carry = b""
        self.cached_tokens: int | None = None
        """As last reported; None until it was."""

    def feed(self, chunk: bytes) -> None:
        """The next chunk, of any size, cut anywhere."""
        text = self._carry + chunk
        for found in _CACHED.finditer(text):
            self.cached_tokens = int(found[1])
        self._carry = text[-_CARRY_BYTES:]


def readable(content_encoding: str | None) -> bool:
    """Whether a body with this content-encoding can be read as it is."""
    return content_encoding in (None, "", "identity")
