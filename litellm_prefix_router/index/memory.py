"""The index in memory, for one process: the demo without Redis, tests, the SDK on a single machine.

Same contract and rules as in Redis (slots, leases, fences, lifetimes); lookups walk the chain instead of galloping.
One object serves any number of threads and event loops: `shared_memory_index` hands out one per name.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from .contract import BlockWrite, Claim, Fenced, IndexLookup, ReplicaLoad, ReplicaRecord
from .layout import LOWER_TIERS, TIERS
from .plan import canonical_positions
from .records import sum_loads

_EPOCH = "0000"


@dataclass
class _Pool:
    roster: dict[str, ReplicaRecord] = field(default_factory=dict)
    blocks: dict[str, dict[int, int]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    live: int = 0
    free: list[int] = field(default_factory=list)
    next_slot: int = 0
    leases: dict[str, tuple[int, float, str]] = field(default_factory=dict)
    indexers: dict[str, float] = field(default_factory=dict)
    announced: dict[str, tuple[float, dict[str, ReplicaRecord]]] = field(default_factory=dict)
    placed: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    loads: dict[str, tuple[float, Mapping[str, ReplicaLoad]]] = field(default_factory=dict)
    snapshots: dict[str, bytes] = field(default_factory=dict)
    places_until_sweep: int = 4096


class MemoryIndex:
    """What readers and writers of one process share. Use `reader(gateway_id)` and `writer()`."""

    def __init__(self, max_slots: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = defaultdict(_Pool)
        self._states: dict[str, tuple[float, bytes]] = {}
        self._fence = 0
        self._max_slots = max_slots
        self._clock = clock

    def reader(self, gateway_id: str = "gateway") -> MemoryIndexReader:
        return MemoryIndexReader(self, gateway_id)

    def writer(self) -> MemoryIndexWriter:
        return MemoryIndexWriter(self)

    def clear(self) -> None:
        """Forget everything, as a Redis that was restarted empty."""
        with self._lock:
            self._pools.clear()

    def block_count(self, pool: str, tier: str = "gpu") -> int:
        with self._lock:
            return len(self._pools[pool].blocks[tier])


class MemoryIndexReader:
    """IndexReader over a MemoryIndex."""

    breaker_state = "closed"

    def __init__(self, index: MemoryIndex, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._index = index
        self._own = {gateway_id}

    async def lookup(self, pool: str, blocks: Sequence[int]) -> IndexLookup:
        index = self._index
        now = index._clock()
        with index._lock:
            state = index._pools[pool]
            names = {r.slot: name for name, r in state.roster.items() if r.slot is not None}
            tiers = [state.blocks["gpu"]]
            matches = _runs(tiers, blocks, state.live, names)
            lower = {}
            for tier in LOWER_TIERS:
                if state.blocks[tier]:
                    tiers.append(state.blocks[tier])
                    lower[tier] = _runs(tiers, blocks, state.live, names)
            recent = {}
            for at in canonical_positions(len(blocks)):
                for name, until in state.placed.get(blocks[at], {}).items():
                    if until > now:
                        recent[name] = at + 1
            others = [share for name, (until, share) in state.loads.items() if until > now and name not in self._own]
            return IndexLookup(matches, recent, lower, sum_loads(others), dict(state.roster))

    async def roster(self, pool: str) -> Mapping[str, ReplicaRecord]:
        with self._index._lock:
            return dict(self._index._pools[pool].roster)

    async def announce(self, pool: str, replicas: Sequence[ReplicaRecord], ttl_s: float) -> None:
        with self._index._lock:
            listed = {record.replica_id: record for record in replicas}
            self._index._pools[pool].announced[self.gateway_id] = (self._index._clock() + ttl_s, listed)

    def place(self, pool: str, replica_id: str, blocks: Sequence[int], ttl_s: float) -> None:
        now = self._index._clock()
        with self._index._lock:
            state = self._index._pools[pool]
            for at in canonical_positions(len(blocks)):
                state.placed[blocks[at]][replica_id] = now + ttl_s
            state.places_until_sweep -= 1
            if state.places_until_sweep <= 0:  # bounded by what was placed within two lifetimes or 4096 calls
                state.places_until_sweep = 4096
                for block in [b for b, who in state.placed.items() if max(who.values()) <= now]:
                    del state.placed[block]

    async def placed(self) -> None:
        pass  # is there at once

    async def publish_loads(self, pool: str, gateway_id: str, loads: Mapping[str, ReplicaLoad], ttl_s: float) -> None:
        self._own.add(gateway_id)
        with self._index._lock:
            self._index._pools[pool].loads[gateway_id] = (self._index._clock() + ttl_s, dict(loads))

    async def publish_state(self, gateway_id: str, state: bytes, ttl_s: float) -> None:
        with self._index._lock:
            self._index._states[gateway_id] = (self._index._clock() + ttl_s, state)

    async def states(self) -> Mapping[str, bytes]:
        with self._index._lock:
            now = self._index._clock()
            return {name: state for name, (until, state) in self._index._states.items() if until > now}

    async def pools(self) -> Sequence[str]:
        with self._index._lock:
            return [name for name, pool in self._index._pools.items() if pool.announced]

    async def close(self) -> None:
        """Nothing to close: the index outlives its readers."""


class MemoryIndexWriter:
    """IndexWriter over a MemoryIndex. A retired slot's bits are dropped on the spot, so slots need no waiting time."""

    def __init__(self, index: MemoryIndex) -> None:
        self._index = index

    in_order = True

    async def pools(self) -> list[str]:
        with self._index._lock:
            return [name for name, state in self._index._pools.items() if state.announced]

    async def announced(self, pool: str) -> dict[str, ReplicaRecord]:
        now = self._index._clock()
        merged: dict[str, ReplicaRecord] = {}
        with self._index._lock:
            for until, listed in self._index._pools[pool].announced.values():
                for name, record in listed.items():
                    if until > now and (name not in merged or merged[name].events is None):
                        merged[name] = record
        return merged

    async def roster(self, pool: str) -> Mapping[str, ReplicaRecord]:
        with self._index._lock:
            return dict(self._index._pools[pool].roster)

    async def leases(self, pool: str) -> dict[str, str]:
        with self._index._lock:
            return {name: who for name, (_, _, who) in self._index._pools[pool].leases.items()}

    async def claim(self, pool: str, indexer: str, replicas: Mapping[str, int], ttl_s: float) -> Claim:
        index, now = self._index, self._index._clock()
        with index._lock:
            state = index._pools[pool]
            state.indexers[indexer] = now + ttl_s
            state.indexers = {name: until for name, until in state.indexers.items() if until > now}
            fair = -(-len(replicas) // len(state.indexers))
            renewed, free = set(), []
            for name, fence in replicas.items():
                held, until, who = state.leases.get(name, (0, 0.0, ""))
                if who == indexer and held == fence:
                    state.leases[name] = (fence, now + ttl_s, indexer)
                    renewed.add(name)
                elif until <= now or who == indexer:
                    free.append(name)
            claimed = {}
            for name in free[: max(0, fair - len(renewed))]:
                index._fence += 1
                claimed[name] = index._fence
                state.leases[name] = (index._fence, now + ttl_s, indexer)
            return Claim(_EPOCH, frozenset(renewed), claimed, fair, len(state.indexers))

    async def release(self, pool: str, indexer: str, leases: Mapping[str, int], *, leave: bool = False) -> None:
        with self._index._lock:
            state = self._index._pools[pool]
            for name, fence in leases.items():
                if state.leases.get(name, (0,))[0] == fence:
                    del state.leases[name]
            if leave:
                state.indexers.pop(indexer, None)

    async def begin_incarnation(self, pool: str, record: ReplicaRecord, fence: int) -> ReplicaRecord:
        with self._index._lock:
            state = self._checked(pool, record.replica_id, fence)
            old = state.roster.get(record.replica_id)
            self._drop_slot(state, old)
            slot: int | None = None
            if state.free:
                slot = state.free.pop()
            elif state.next_slot < self._index._max_slots:
                slot = state.next_slot
                state.next_slot += 1
            if slot is not None:
                state.live |= 1 << slot
            number = (old.incarnation if old else 0) + 1
            begun = msgspec.structs.replace(record, slot=slot, incarnation=number, epoch=_EPOCH)
            state.roster[record.replica_id] = begun
            return begun

    async def apply(self, pool: str, writes: Sequence[BlockWrite]) -> frozenset[str]:
        refused = set()
        with self._index._lock:
            state = self._index._pools[pool]
            for write in writes:
                name, slot = write.record.replica_id, write.record.slot
                lease = state.leases.get(name)
                if lease is None or lease[0] != write.fence or slot is None or not state.live >> slot & 1:
                    refused.add(name)
                    continue
                table, bit = state.blocks[write.tier], 1 << slot
                for block in np.frombuffer(write.blocks, "<u8").tolist():
                    if write.held:
                        table[block] = table.get(block, 0) | bit
                    elif (mask := table.get(block)) is not None:
                        if mask & ~bit:
                            table[block] = mask & ~bit
                        else:
                            del table[block]
        return frozenset(refused)

    async def update(self, pool: str, record: ReplicaRecord, fence: int, *, urgent: bool = True) -> bool:
        with self._index._lock:
            state = self._checked(pool, record.replica_id, fence)
            old = state.roster.get(record.replica_id)
            if record.slot is not None and (old is None or old.slot != record.slot):
                return False
            if record.slot is None:
                self._drop_slot(state, old)
            number = old.incarnation if old else 0
            state.roster[record.replica_id] = msgspec.structs.replace(record, incarnation=number, epoch=_EPOCH)
            return True

    async def retire(self, pool: str, replica_id: str, fence: int) -> None:
        with self._index._lock:
            state = self._checked(pool, replica_id, fence)
            self._drop_slot(state, state.roster.pop(replica_id, None))
            state.leases.pop(replica_id, None)
            state.snapshots.pop(replica_id, None)

    async def save_snapshot(self, pool: str, replica_id: str, fence: int, blob: bytes) -> None:
        with self._index._lock:
            self._checked(pool, replica_id, fence).snapshots[replica_id] = blob

    async def load_snapshot(self, pool: str, replica_id: str) -> bytes | None:
        with self._index._lock:
            return self._index._pools[pool].snapshots.get(replica_id)

    async def close(self) -> None:
        """Nothing to close: the index outlives its writers."""

    def _checked(self, pool: str, replica_id: str, fence: int) -> _Pool:
        state = self._index._pools[pool]
        lease = state.leases.get(replica_id)
        if lease is None or lease[0] != fence:
            raise Fenced(replica_id)
        return state

    def _drop_slot(self, state: _Pool, record: ReplicaRecord | None) -> None:
        if record is None or record.slot is None:
            return
        bit = 1 << record.slot
        state.live &= ~bit
        for table in state.blocks.values():
            for block in [block for block, mask in table.items() if mask & bit]:
                table[block] &= ~bit
                if not table[block]:
                    del table[block]
        state.free.append(record.slot)


def _runs(
    tables: Sequence[Mapping[int, int]], blocks: Sequence[int], live: int, names: Mapping[int, str]
) -> dict[str, int]:
    """Replica -> leading blocks that it holds in any of the tables."""
    found: dict[str, int] = {}
    running = live
    for at, block in enumerate(blocks):
        mask = 0
        for table in tables:
            mask |= table.get(block, 0)
        _note(found, running & ~mask, at, names)
        running &= mask
        if not running:
            return found
    _note(found, running, len(blocks), names)
    return found


def _note(found: dict[str, int], slots: int, count: int, names: Mapping[int, str]) -> None:
    while slots and count:
        lowest = slots & -slots
        name = names.get(lowest.bit_length() - 1)
        if name is not None:
            found[name] = count
        slots ^= lowest


_shared: dict[str, MemoryIndex] = {}
_shared_lock = threading.Lock()


def shared_memory_index(name: str) -> MemoryIndex:
    """The process's index of that name (the part after memory://)."""
    with _shared_lock:
        return _shared.setdefault(name, MemoryIndex())
