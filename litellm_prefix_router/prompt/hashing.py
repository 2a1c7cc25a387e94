"""Block hashes of a prompt whose beginning was hashed before: the same numbers as blocks.chain_hashes, sooner.

A conversation's next turn repeats thousands of blocks. They are looked up in groups: the key is a hash over the
group's ids and the hash of the block before it.
"""

from __future__ import annotations

import secrets

import xxhash

from .blocks import TokenIds, chain_hashes
from .cache import PromptCache

_GROUPS = (512, 32)
"""Blocks a look-up stands for: large groups for a long beginning, small ones for its end."""
_BYTES_PER_HASH = 40
"""A Python integer of 64 bits and its place in a list."""


class BlockHasher:
    """chain_hashes with a memory. Safe to share between threads."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        self._seed = secrets.randbits(63)

    def hashes(self, token_ids: TokenIds, block_size: int, root: int) -> list[int]:
        """As blocks.chain_hashes without `extra`."""
        if len(token_ids) < 2 * block_size * _GROUPS[-1]:
            return chain_hashes(token_ids, block_size, root)
        raw = token_ids.view("u1").data
        result: list[int] = []
        start, parent = 0, root
        for blocks in _GROUPS:
            step = block_size * blocks
            while start + step <= len(token_ids):
                piece = raw[start * 4 : (start + step) * 4]
                key = (parent, block_size, xxhash.xxh3_128_intdigest(piece, self._seed))
                known = self._cache.get_many((key,))[0]
                if known is None:
                    known = chain_hashes(token_ids[start : start + step], block_size, parent)
                    self._cache.put(key, known, _BYTES_PER_HASH * blocks)
                result += known
                parent = known[-1]
                start += step
        result += chain_hashes(token_ids[start:], block_size, parent)
        return result
