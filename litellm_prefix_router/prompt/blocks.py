"""Block hashes: the identity of a block, computed from token ids alone.

A block's hash is ``xxh3_64(token ids of the block as uint32-LE, seed = the parent's hash)``; the first block's seed is
the *root*, which carries everything that keeps two caches apart although their tokens are equal: the pool, the LoRA
adapter and the cache salt. Both sides use this module: the prompt that is routed and the engine's events. Engine
hashes never come in here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

TokenIds = npt.NDArray[np.uint32]
"""Token ids as the engine prefills them, shape (n,), little-endian uint32."""


def as_token_ids(ids: Sequence[int] | npt.NDArray[Any]) -> TokenIds:
    """Copy a sequence of token ids into the array that is hashed. Raises OverflowError for ids outside uint32."""
    return np.asarray(ids, dtype="<u4")


def root_hash(pool: str, lora: str | None = None, cache_salt: str | None = None) -> int:
    """Seed of a chain: 64 bits over pool, adapter and salt, each length-prefixed so that no two triples collide."""
    parts = b"".join(
        len(raw).to_bytes(4, "little", signed=True) + raw if raw is not None else b"\xff\xff\xff\xff"
        for raw in (_encode(pool), _encode(lora), _encode(cache_salt))
    )
    return int(xxh3_64_intdigest(parts))


def _encode(text: str | None) -> bytes | None:
    # surrogatepass: a lone surrogate in a salt is odd, not a reason to fail
    return None if text is None else text.encode("utf-8", "surrogatepass")


def chain_hashes(
    token_ids: TokenIds,
    block_size: int,
    root: int,
    extra: Mapping[int, bytes] | None = None,
) -> list[int]:
    """Hashes of the full blocks of `token_ids`, in order; the tail that fills no block has none.

    `extra` maps a block's position to bytes that belong to its identity beside its tokens (an image's digest and
    offset); they are appended to the block's token bytes.
    """
    step = block_size * 4
    raw = memoryview(token_ids.tobytes())
    hashes: list[int] = []
    parent = root
    for index, start in enumerate(range(0, len(raw) - step + 1, step)):
        block = raw[start : start + step]
        if extra is not None and index in extra:
            parent = xxh3_64_intdigest(bytes(block) + extra[index], parent)
        else:
            parent = xxh3_64_intdigest(block, parent)
        hashes.append(parent)
    return hashes
