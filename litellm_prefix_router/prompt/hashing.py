"""Block hashes of a prompt whose beginning was hashed before: the same numbers as blocks.chain_hashes, sooner.

A conversation's next turn repeats thousands of blocks. They are looked up in groups: the key is a hash over the
group's ids and the hash of the block before it, so one look-up stands for _GROUP blocks.
"""

from __future__ import annotations

import secrets

import xxhash

from .blocks import TokenIds, chain_hashes
from .cache import PromptCache

_GROUP = 64
_BYTES_PER_HASH = 40
"""A Python integer of 64 bits and its place in a list."""


class BlockHasher:
    """chain_hashes with a memory. Safe to share between threads."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        self._seed = secrets.randbits(63)

    def hashes(self, token_ids: TokenIds, block_size: int, root: int) -> list[int]:
        """As blocks.chain_hashes without `extra`."""
        step = block_size * _GROUP
        groups = len(token_ids) // step
        if groups < 2:
            return chain_hashes(token_ids, block_size, root)
        raw = token_ids.view("u1").data
        result: list[int] = []
        parent = root
        for index in range(groups):
            piece = raw[index * step * 4 : (index + 1) * step * 4]
            key = ("blocks", parent, block_size, xxhash.xxh3_128_intdigest(piece, self._seed))
            known = self._cache.get_many((key,))[0]
            if known is None:
                known = chain_hashes(token_ids[index * step : (index + 1) * step], block_size, parent)
                self._cache.put(key, known, _BYTES_PER_HASH * _GROUP)
            result += known
            parent = result[-1]
        result += chain_hashes(token_ids[groups * step :], block_size, parent)
        return result
