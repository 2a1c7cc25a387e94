"""What one engine rank holds: engine block name -> our hash, its parent, and how many copies per tier.

Compact on purpose (a large replica holds millions of blocks): rows in typed arrays, one dict from name to row. A row
lives while some tier holds the block or while it is *dormant*: known by name, not known to be held. Dormant rows are
what is left after a gap; a child that the engine stores proves that its ancestors are held, and wakes them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

_LITTLE = sys.byteorder == "little"
MAX_COPIES = 8
"""Copies counted per block: re-reported blocks (kv_cache_report_mode=full) would otherwise count up for ever."""


class LedgerImage(msgspec.Struct, array_like=True):
    """A ledger in bytes, for a snapshot: rows in an order in which parents need not come first."""

    names: bytes
    ours: bytes
    parents: bytes
    above: bytes
    copies: dict[str, bytes]


class Ledger:
    """Rows of one rank. `held` counts blocks per tier; hashes are ints below 2**64."""

    __slots__ = ("_above", "_copies", "_free", "_ours", "_parents", "_rows", "held")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._rows: dict[int, int] = {}
        self._ours = array("Q")
        self._parents = array("i")
        self._above = array("I")  # low bits of the parent's hash: a row may have gone to another block since
        self._copies: dict[str, bytearray] = {"gpu": bytearray()}
        self._free: list[int] = []
        self.held: dict[str, int] = {"gpu": 0}

    def __len__(self) -> int:
        return len(self._rows)

    def our_hash(self, name: int) -> int | None:
        row = self._rows.get(name)
        return None if row is None else self._ours[row]

    def copies(self, name: int, tier: str = "gpu") -> int:
        row = self._rows.get(name)
        return 0 if row is None or tier not in self._copies else self._copies[tier][row]

    def add(self, name: int, ours: int, parent: int | None, tier: str) -> bool:
        """Count one more copy. True: the tier did not hold the block before."""
        copies = self._copies.get(tier)
        if copies is None:
            copies = self._copies[tier] = bytearray(len(self._ours))
            self.held[tier] = 0
        row = self._rows.get(name)
        if row is None:
            above = -1 if parent is None else self._rows.get(parent, -1)
            check = self._ours[above] & 0xFFFFFFFF if above >= 0 else 0
            if self._free:
                row = self._free.pop()
                self._ours[row] = ours
                self._parents[row] = above
                self._above[row] = check
            else:
                row = len(self._ours)
                self._ours.append(ours)
                self._parents.append(above)
                self._above.append(check)
                for counts in self._copies.values():
                    counts.append(0)
            self._rows[name] = row
        count = copies[row]
        if count < MAX_COPIES:
            copies[row] = count + 1
        if count == 0:
            self.held[tier] += 1
        return count == 0

    def extend(self, names: list[int], ours: list[int], parent: int | None, tier: str) -> list[int]:
        """`add` for a chain below `parent`; our hashes of the blocks that the tier did not hold before."""
        rows, copies = self._rows, self._copies.get(tier)
        if (
            copies is None
            or self._free
            or len(self._copies) > 1
            or not names
            or len(set(names)) < len(names)
            or any(map(rows.__contains__, names))
        ):
            fresh = []
            for name, block in zip(names, ours, strict=True):
                if self.add(name, block, parent, tier):
                    fresh.append(block)
                parent = name
            return fresh
        # the usual case by far, in bulk: a new chain, one tier, no rows to use again
        first, count = len(self._ours), len(names)
        above = -1 if parent is None else rows.get(parent, -1)
        self._parents.append(above)
        self._parents.extend(range(first, first + count - 1))
        self._above.append(self._ours[above] & 0xFFFFFFFF if above >= 0 else 0)
        self._ours.extend(ours)
        # the low halves of the hashes just added, as they lie in memory
        halves = np.frombuffer(self._ours[first:-1].tobytes(), np.uint32)
        self._above.frombytes(halves[0 if _LITTLE else 1 :: 2].tobytes())
        copies.extend(b"\x01" * count)
        rows.update(zip(names, range(first, first + count), strict=True))
        self.held[tier] += count
        return ours

    def drop(self, name: int, tier: str) -> int | None:
        """Count one copy less. Our hash where that was the tier's last one, else None."""
        row = self._rows.get(name)
        copies = self._copies.get(tier)
        if row is None or copies is None:
            return None
        count = copies[row]
        gone = count == 1
        if count:
            copies[row] = count - 1
        if gone:
            self.held[tier] -= 1
        if not any(counts[row] for counts in self._copies.values()):
            del self._rows[name]
            self._free.append(row)
        return self._ours[row] if gone else None

    def wake(self, name: int) -> list[int]:
        """Mark a block and its dormant ancestors as held in GPU memory; our hashes of those that were not."""
        woken: list[int] = []
        copies = self._copies["gpu"]
        row = self._rows.get(name, -1)
        while row >= 0 and not copies[row]:
            copies[row] = 1
            woken.append(self._ours[row])
            above = self._parents[row]
            row = above if above >= 0 and self._ours[above] & 0xFFFFFFFF == self._above[row] else -1
        self.held["gpu"] += len(woken)
        return woken

    def sleep(self) -> None:
        """Forget what is held and keep the names (dormant)."""
        for tier in self._copies:
            self._copies[tier] = bytearray(len(self._ours))
            self.held[tier] = 0

    @property
    def rows(self) -> int:
        """Rows in use or free: the range that `hashes` slices."""
        return len(self._ours)

    def hashes(self, tier: str = "gpu", start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint64]:
        """Our hashes of the blocks that the tier holds, in no order; of the rows `start` to `stop` alone if given."""
        if tier not in self._copies:
            return np.empty(0, np.uint64)
        held = np.frombuffer(bytes(self._copies[tier][start:stop]), np.uint8) > 0
        return np.frombuffer(self._ours[start:stop].tobytes(), np.uint64)[held]

    def image(self) -> LedgerImage:
        names = np.zeros(len(self._ours), np.uint64)
        for name, row in self._rows.items():
            names[row] = name
        return LedgerImage(
            names.tobytes(),
            self._ours.tobytes(),
            self._parents.tobytes(),
            self._above.tobytes(),
            {tier: bytes(counts) for tier, counts in self._copies.items()},
        )

    @classmethod
    def of(cls, image: LedgerImage, free: Iterable[int]) -> Ledger:
        """A ledger as it was; `free` are the rows that were not in use."""
        ledger = cls()
        ledger._ours.frombytes(image.ours)
        ledger._parents.frombytes(image.parents)
        ledger._above.frombytes(image.above)
        ledger._copies = {tier: bytearray(counts) for tier, counts in image.copies.items()}
        ledger._free = list(free)
        unused = set(ledger._free)
        names = np.frombuffer(image.names, np.uint64).tolist()
        ledger._rows = {name: row for row, name in enumerate(names) if row not in unused}
        ledger.held = {tier: sum(1 for count in counts if count) for tier, counts in ledger._copies.items()}
        return ledger

    @property
    def free_rows(self) -> list[int]:
        return self._free
