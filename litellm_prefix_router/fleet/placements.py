"""Placement memory of one gateway: which prompts went where, recently.

It stands beside the exact index (siblings that arrive together go together before the first event has come), and in
its place where there are no events or no Redis. Bounded by age and by the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

_EMPTY: dict[int, float] = {}


class PlacementMemory:
    """Block hash -> time of the last placement, per replica. `clock` gives seconds, monotonic.

    Kept in two generations: when the young one is half of what is allowed, the old one is dropped whole. So placing a
    prompt is one dictionary update, whatever its length, and what was placed within the last half stays.
    """

    def __init__(self, clock: Callable[[], float], max_blocks: int = 500_000) -> None:
        self._clock = clock
        self._half = max(1, max_blocks // 2)
        self._young: dict[str, dict[int, float]] = {}
        self._old: dict[str, dict[int, float]] = {}
        self._young_count = 0

    def place(self, replica_id: str, blocks: Sequence[int]) -> None:
        """Remember that a prompt with these blocks was sent to the replica; of a longer one, the first `half`."""
        if len(blocks) > self._half:
            blocks = blocks[: self._half]
        if self._young_count + len(blocks) > self._half:
            self._old, self._young, self._young_count = self._young, {}, 0
        held = self._young.setdefault(replica_id, {})
        before = len(held)
        held.update(dict.fromkeys(blocks, self._clock()))
        self._young_count += len(held) - before

    def match(self, replica_id: str, blocks: Sequence[int], max_age_s: float) -> int:
        """Leading blocks placed at the replica within `max_age_s`: O(log n), since placements are whole prefixes."""
        young = self._young.get(replica_id, _EMPTY)
        old = self._old.get(replica_id, _EMPTY)
        if not blocks or not (young or old):
            return 0
        horizon = self._clock() - max_age_s
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            block = blocks[middle - 1]
            if young.get(block, -inf) >= horizon or old.get(block, -inf) >= horizon:
                low = middle
            else:
                high = middle - 1
        return low

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or its cache is."""
        self._young_count -= len(self._young.pop(replica_id, _EMPTY))
        self._old.pop(replica_id, None)

    def __len__(self) -> int:
        return sum(len(held) for generation in (self._young, self._old) for held in generation.values())
