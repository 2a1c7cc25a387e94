"""One state of a pool's roster as a reader plans lookups by it. Never changes: a newer state is another object, so that
decisions that overlap with a change read, and interpret what they read, by one and the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec

from .contract import ReplicaRecord
from .layout import LOWER_TIERS, TIERS, Layout
from .records import decode_roster


class Roster:
    """`version` is the key's value that the state was read with, None where there is no roster."""

    def __init__(self, layout: Layout, version: bytes | None, fields: Mapping[bytes, bytes]) -> None:
        epoch = (version or b"").partition(b":")[0]
        self.version = version
        self.valid = bool(epoch) and fields.get(b"@e") == epoch
        """False: no indexer has written one, or it was lost."""
        self.records: Mapping[str, ReplicaRecord] = decode_roster(fields) if self.valid else {}
        self.slots = {r.slot: name for name, r in self.records.items() if r.slot is not None}
        self.live = sum(1 << slot for slot in self.slots)
        """Mask of the slots that count."""
        lower = [tier for tier in LOWER_TIERS if b"@t" + TIERS[tier] in fields]
        self.tiers = ("gpu", *lower)
        self.families = [layout.family(tier, epoch) for tier in self.tiers] if self.valid else []
        """What the block keys of each tier begin with."""

    def by_replica(self, runs: Mapping[int, int]) -> dict[str, int]:
        """Slot -> blocks, as replica -> blocks."""
        return {self.slots[slot]: count for slot, count in runs.items() if slot in self.slots}

    def seen(self, alive: bool) -> Mapping[str, ReplicaRecord]:
        """The records; where no indexer is left, what they say of their replicas is not exact any more."""
        return self.records if alive else self._abandoned

    @cached_property
    def _abandoned(self) -> Mapping[str, ReplicaRecord]:
        return {
            name: msgspec.structs.replace(record, knowledge="stale", note="no indexer follows its events")
            if record.slot is not None
            else record
            for name, record in self.records.items()
        }
