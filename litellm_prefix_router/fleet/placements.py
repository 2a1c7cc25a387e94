"""Placement memory of one gateway: which prompts went where, recently.

It stands beside the exact index (siblings that arrive together go together before the first event has come), and in
its place where there are no events or no Redis. Bounded by age and by the number of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf


class PlacementMemory:
    """Block hash -> time of the last placement, per replica. `clock` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], max_blocks: int = 500_000) -> None:
        self._clock = clock
        self._max_blocks = max_blocks
        self._placed: dict[str, OrderedDict[int, float]] = {}
        self._count = 0

    def place(self, replica_id: str, blocks: Sequence[int]) -> None:
        """Remember that a prompt with these blocks was sent to the replica."""
        held = self._placed.setdefault(replica_id, OrderedDict())
        now = self._clock()
        before = len(held)
        # deepest first: when memory runs out the tails go before the beginnings that they need
        for block in reversed(blocks):
            held[block] = now
            held.move_to_end(block)
        self._count += len(held) - before
        while self._count > self._max_blocks:
            victim = max(self._placed.values(), key=len)
            victim.popitem(last=False)
            self._count -= 1

    def match(self, replica_id: str, blocks: Sequence[int], max_age_s: float) -> int:
        """Leading blocks placed at the replica within `max_age_s`: O(log n), since placements are whole prefixes."""
        held = self._placed.get(replica_id)
        if not held or not blocks:
            return 0
        horizon = self._clock() - max_age_s
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if held.get(blocks[middle - 1], -inf) >= horizon:
                low = middle
            else:
                high = middle - 1
        return low

    def matches(self, replicas: Sequence[str], blocks: Sequence[int], max_age_s: float) -> Mapping[str, int]:
        """`match` for each replica; those without one are absent."""
        found = ((replica, self.match(replica, blocks, max_age_s)) for replica in replicas)
        return {replica: count for replica, count in found if count}

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or its cache is."""
        self._count -= len(self._placed.pop(replica_id, ()))

    def __len__(self) -> int:
        return self._count
