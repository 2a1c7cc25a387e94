"""A prompt's likeness without a tokenizer: hashes over its text in chunks.

Where token ids cannot be had (no tokenizer yet, a refused template, a huge body), placements are still remembered and
found again by this chain: good for approximate placement, never for an exact match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 256
"""About 64 tokens of English text."""
BYTES_PER_TOKEN = 4
MAX_BYTES = 256 * 1024
"""Beginnings of this length tell prompts apart; the rest is not read."""
MAX_DEPTH = 32

_PROMPT_FIELDS = ("tools", "instructions", "system", "messages", "input", "prompt")
"""In the order in which templates print them: what many requests share comes first."""


def fingerprint_blocks(body: Mapping[str, Any], root: int) -> list[int]:
    """Chained hashes over the prompt's text in chunks of CHUNK_BYTES; full chunks only. Never raises."""
    text = bytearray()
    for name in _PROMPT_FIELDS:
        for piece in _pieces(body.get(name), 0):
            text += piece[:MAX_BYTES].encode("utf-8", "surrogatepass")
            text += b"\0"
            if len(text) >= MAX_BYTES:
                break
    hashes = []
    parent = root
    for start in range(0, min(len(text), MAX_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        parent = xxh3_64_intdigest(bytes(text[start : start + CHUNK_BYTES]), parent)
        hashes.append(parent)
    return hashes


def estimate_tokens(body: Mapping[str, Any]) -> int:
    """About how many tokens the prompt has, by its length in characters."""
    total = 0
    for name in _PROMPT_FIELDS:
        for piece in _pieces(body.get(name), 0):
            total += len(piece)
            if total > 8 * 1024 * 1024:
                return total // BYTES_PER_TOKEN
    return total // BYTES_PER_TOKEN


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH or value is None:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _pieces(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pieces(item, depth + 1)
    else:
        yield repr(value)
