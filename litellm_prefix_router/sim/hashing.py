"""Block hashes the engine's way: a chain of sha256 digests over a serialized (parent, tokens, extra).

Independent of `prompt/blocks.py` on purpose: the router must never be able to rely on the engine's names of blocks.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

Digest = bytes
Extra = tuple[tuple[str, ...], ...] | None
"""What belongs to a block's identity beside its tokens, tagged: (("lora", name, path), ("cache_salt", salt))."""


def _pickled(value: Any) -> Digest:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _cbor_head(major: int, number: int) -> bytes:
    """First bytes of a CBOR item in canonical (shortest) form."""
    if number < 24:
        return bytes([major << 5 | number])
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * width:
            return bytes([major << 5 | code]) + number.to_bytes(width, "big")
    raise OverflowError(f"{number} does not fit a CBOR head")


def cbor(value: Any) -> bytes:
    """Canonical CBOR of None, non-negative integers, bytes, text and sequences of these."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return _cbor_head(3, len(raw)) + raw
    return _cbor_head(4, len(value)) + b"".join(map(cbor, value))


def _cbor_hashed(value: Any) -> Digest:
    return hashlib.sha256(cbor(value)).digest()


_ALGORITHMS: dict[str, Callable[[Any], Digest]] = {"sha256": _pickled, "sha256_cbor": _cbor_hashed}


class BlockHasher:
    """Digests of blocks. `algorithm`: "sha256" or "sha256_cbor"; `seed` names the root of all chains."""

    def __init__(self, algorithm: str = "sha256", seed: str = "vllm-none-hash") -> None:
        self._hash = _ALGORITHMS[algorithm]
        self._root = self._hash(seed)

    def block(self, parent: Digest | None, tokens: Sequence[int], extra: Extra = None) -> Digest:
        """Digest of one block of `tokens` after `parent` (None: the first block)."""
        return self._hash((self._root if parent is None else parent, tuple(tokens), extra))


def short(digest: Digest) -> int:
    """The 64 bits (unsigned) by which events name a block."""
    return int.from_bytes(digest[-8:], "big")
