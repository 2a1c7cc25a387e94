"""The lookup plan: which blocks of a chain to read next, given what was read. No I/O.

A replica that holds block i holds the blocks before it (engines cache prefixes and evict tails first), so the end of
its run can be bracketed: the first round reads the positions 0, 1, 3, 6, 10, ... and the last one, about √(2n) of
them; the second reads the gaps in which some live slot's run ends, each at most as long. The positions do not depend on
the prompt's length, so that placements, written at these positions only, meet later prompts of any length.

A plan works on several *levels* at once: level 0 is GPU memory, each further level also counts a slower tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache


@lru_cache(maxsize=1024)
def canonical_positions(length: int) -> tuple[int, ...]:
    """The triangular numbers below `length`: 0, 1, 3, 6, 10, ... (500 -> 32 of them, 8192 -> 128)."""
    positions = []
    at = step = 0
    while at < length:
        positions.append(at)
        step += 1
        at += step
    return tuple(positions)


@lru_cache(maxsize=1024)
def probe_positions(length: int) -> tuple[int, ...]:
    """What the first round reads: the canonical positions and the last block."""
    positions = canonical_positions(length)
    if length and positions[-1] != length - 1:
        return (*positions, length - 1)
    return positions


class LookupPlan:
    """One lookup: `probes` to read first, then `spans`, then `matches`.

    `live` is the mask of slots that count. A mask is an int with bit s set for slot s. At most `max_reads` further
    positions are asked for; past that the shallowest runs are rounded down to the probe before their end.
    """

    __slots__ = ("_brackets", "_ends", "_length", "_live", "_max_reads", "_starts", "probes", "spans")

    def __init__(self, length: int, live: int, levels: int = 1, max_reads: int = 512) -> None:
        self._length = length
        self._live = live
        self._max_reads = max_reads
        self._ends: list[dict[int, int]] = [{} for _ in range(levels)]
        self._brackets: list[list[tuple[int, int, int]]] = [[] for _ in range(levels)]
        self._starts: dict[tuple[int, int], int] = {}
        self.probes: tuple[int, ...] = probe_positions(length) if live else ()
        self.spans: list[int] = []

    def probed(self, masks: Sequence[Sequence[int]]) -> list[int]:
        """Take the first round's masks, `masks[level][k]` for `probes[k]`; returns the positions to read next."""
        wanted: dict[tuple[int, int], None] = {}
        for level, row in enumerate(masks):
            running, before = self._live, -1
            for position, mask in zip(self.probes, row, strict=True):
                going_on = running & mask
                if going_on != running:
                    ended = running ^ going_on
                    if position - before > 1 and before >= 0:
                        self._brackets[level].append((before, position, ended))
                        wanted[before, position] = None
                    elif before >= 0:
                        self._end(level, ended, before + 1)
                    running = going_on
                    if not running:
                        break
                before = position
            if running:
                self._end(level, running, self._length)
        for before, position in sorted(wanted, reverse=True):
            if len(self.spans) + position - before - 1 > self._max_reads:
                continue
            self._starts[before, position] = len(self.spans)
            self.spans.extend(range(before + 1, position))
        for level, brackets in enumerate(self._brackets):
            for before, position, ended in brackets:
                if (before, position) not in self._starts:
                    self._end(level, ended, before + 1)
            self._brackets[level] = [item for item in brackets if item[:2] in self._starts]
        return self.spans

    def filled(self, masks: Sequence[Sequence[int]]) -> None:
        """Take the second round's masks, `masks[level][k]` for `spans[k]`."""
        for level, brackets in enumerate(self._brackets):
            row = masks[level]
            for before, position, running in brackets:
                start = self._starts[before, position]
                for at, mask in enumerate(row[start : start + position - before - 1], before + 1):
                    going_on = running & mask
                    if going_on != running:
                        self._end(level, running ^ going_on, at)
                        running = going_on
                        if not running:
                            break
                if running:
                    self._end(level, running, position)

    def matches(self, level: int = 0) -> Mapping[int, int]:
        """Slot -> leading blocks, for the slots that hold at least the first block."""
        return self._ends[level]

    def _end(self, level: int, slots: int, blocks: int) -> None:
        ends = self._ends[level]
        while slots:
            highest = slots.bit_length() - 1
            ends[highest] = blocks
            slots ^= 1 << highest
