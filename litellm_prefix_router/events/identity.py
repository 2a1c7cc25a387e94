"""What separates two blocks with equal tokens: adapter, salt, images. One encoding for events and for requests.

vLLM's `extra_keys` of a block is an untagged list ``[lora name?, [mm id, offset]*, cache salt (block 0 only)?, digest
of prompt embeddings?]``: the adapter's name is known from elsewhere and stripped first; a string left in the first
block of a chain is the salt, which our root hash carries; the rest is mixed into the block's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def block_extra(items: Iterable[Any]) -> bytes:
    """Bytes to mix into a block's hash (chain_hashes `extra`) for its multimodal parts, in the order of the prompt.

    An item is ``(mm id, offset)``, the offset in tokens as vLLM counts it in `extra_keys`; a string or bytes stand for
    keys that have no offset. Empty input gives b"": no entry then.
    """
    out = []
    for item in items:
        if isinstance(item, (list, tuple)):
            out.append(b"m" + len(item).to_bytes(4, "little") + b"".join(_scalar(part) for part in item))
        else:
            out.append(_scalar(item))
    return b"".join(out)


def split_extra_keys(keys: Sequence[Any] | None, lora: str | None, first: bool) -> tuple[str | None, bytes]:
    """(cache salt, block_extra bytes) of one block's `extra_keys`; `first`: the block begins its chain."""
    if not keys:
        return None, b""
    rest = list(keys)
    if lora is not None and rest[0] == lora:
        rest.pop(0)
    salt: str | None = None
    if first:
        for at, item in enumerate(rest):
            if isinstance(item, str):
                salt = rest.pop(at)
                break
    return salt, block_extra(rest) if rest else b""


def _scalar(value: Any) -> bytes:
    if isinstance(value, bytes):
        return b"b" + len(value).to_bytes(4, "little") + value
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "little", signed=True)
    raw = str(value).encode("utf-8", "surrogatepass")
    return b"s" + len(raw).to_bytes(4, "little") + raw
