"""The best that any routing could do: one cache as large as all replicas' together, and every request goes to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .block_cache import BlockCache, Labels
from .hashing import BlockHasher, Digest


class IdealCache:
    """One cache that serves requests one after the other, by the engine's rules."""

    def __init__(self, usable_blocks: int, block_size: int) -> None:
        self._cache = BlockCache(usable_blocks + 1, block_size, events=False)
        self._hasher = BlockHasher()

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = ()) -> int:
        """Prompt tokens that come from the cache; afterwards it holds the prompt and the answer's full blocks.

        A sequence longer than the whole cache is cut to it.
        """
        size = self._cache.block_size
        tokens = [*prompt, *answer[:-1]][: self._cache.capacity * size]
        digests: list[Digest] = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = digests[-1] if digests else None
            digests.append(self._hasher.block(parent, tokens[start : start + size]))
        hits = self._cache.match(digests, len(prompt))
        self._cache.pin(hits)
        blocks = hits + self._cache.allocate(-(-len(tokens) // size) - len(hits))
        self._cache.store(blocks, digests, tokens, len(hits), Labels())
        self._cache.release(blocks)
        return len(hits) * size


def ideal_hit_rate(
    requests: Iterable[tuple[Sequence[int], Sequence[int]]], *, usable_blocks: int, block_size: int
) -> float:
    """Share of all prompt tokens that the ideal cache would serve. `requests`: (prompt ids, answer ids), in order.

    `usable_blocks`: of all replicas together (each has one block less than its num_blocks). 0.0 without requests.
    """
    cache = IdealCache(usable_blocks, block_size)
    prompt_tokens = cached_tokens = 0
    for prompt, answer in requests:
        prompt_tokens += len(prompt)
        cached_tokens += cache.serve(prompt, answer)
    return cached_tokens / prompt_tokens if prompt_tokens else 0.0
