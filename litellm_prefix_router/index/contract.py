"""The index's contract: which replica holds which block, who the replicas are, and how busy they are.

Two implementations stand behind it, Redis (shared by gateways and indexers) and memory (one process), and pass the
same tests. Readers are gateways, writers are indexers; a reader needs one or two round trips for a lookup, whatever
the prompt's length and the number of replicas.

Vocabulary: a *slot* is a small integer that one incarnation of one replica's cache owns; a new incarnation gets a new
slot, so that whatever is still written about the old one lands where no reader looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class ReplicaRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One replica as the roster knows it. `replica_id` is "<api address>" or "<api address>#<dp rank>"."""

    replica_id: str
    address: str
    """Base URL of the API without /v1, such as "http://10.0.0.7:8000"."""
    dp_rank: int = 0
    slot: int | None = None
    """Where this incarnation's blocks are; None until an indexer has begun one."""
    incarnation: int = 0
    """Counts the lives of this replica's cache."""
    block_size: int = 0
    """Tokens per block as the engine's events or metrics say; 0: not known yet."""
    knowledge: str = "none"
    """"exact" (its events are followed), "degraded", "stale", "none" (no events: approximate at best)."""
    events: str | None = None
    """Event endpoint to use instead of the one that the replica reports, or None."""
    replay: str | None = None
    indexer: str | None = None
    """Id of the indexer that follows this replica."""
    last_event_at: float = 0.0
    """Unix time of the last event batch, 0.0 before the first."""
    blocks: int = 0
    """Blocks of its GPU memory that the index holds."""
    note: str | None = None
    """Why knowledge is not exact, for people."""
    doubted_at: float = 0.0
    """Unix time at which a gateway found that responses contradict the index; the indexer then reads anew."""
    epoch: str = ""
    """Which life of the roster the slot belongs to; filled in by the index."""


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """Work in flight on one replica, as counted by gateways from dispatch to end of response."""

    requests: int = 0
    prefill_tokens: int = 0
    """Uncached prompt tokens of requests that have not yet sent their first token."""
    active_tokens: int = 0
    """Prompt tokens of all requests in flight: the KV memory that they pin, roughly."""

    def __add__(self, other: ReplicaLoad) -> ReplicaLoad:
        return ReplicaLoad(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.active_tokens + other.active_tokens,
        )


class IndexLookup(msgspec.Struct, frozen=True):
    """What one lookup learned, by replica id; replicas without a match are absent from the maps."""

    matches: Mapping[str, int]
    """Leading blocks that the replica's GPU memory holds, from engine events."""
    recent: Mapping[str, int] = {}
    """Leading blocks that gateways placed there within the placement lifetime (shared placement memory)."""
    lower: Mapping[str, Mapping[str, int]] = {}
    """tier ("cpu", "storage") -> replica -> leading blocks that it or a faster tier holds."""
    loads: Mapping[str, ReplicaLoad] = {}
    """Sum over all *other* gateways with a live lease."""
    roster: Mapping[str, ReplicaRecord] = {}


class IndexUnavailable(Exception):
    """The index cannot answer (connection, timeout, open breaker). Callers degrade; nothing else is raised."""


class IndexReader(Protocol):
    """What a gateway needs."""

    async def lookup(self, pool: str, blocks: Sequence[int]) -> IndexLookup:
        """Matches for a chain of block hashes (may be empty: then only loads and roster)."""
        ...

    async def roster(self, pool: str) -> Mapping[str, ReplicaRecord]: ...

    async def announce(self, pool: str, replicas: Sequence[ReplicaRecord], ttl_s: float) -> None:
        """Say which replicas this gateway serves; indexers follow what is announced. Renewed before `ttl_s`."""
        ...

    def place(self, pool: str, replica_id: str, blocks: Sequence[int], ttl_s: float) -> None:
        """Tell the other gateways soon that a prompt with these blocks was sent to the replica (placement memory)."""
        ...

    async def placed(self) -> None:
        """Wait until what was placed can be read by others. Raises IndexUnavailable where it was lost."""
        ...

    async def publish_loads(self, pool: str, gateway_id: str, loads: Mapping[str, ReplicaLoad], ttl_s: float) -> None:
        """Replace this gateway's share of the load; it vanishes `ttl_s` seconds after the last call."""
        ...

    async def publish_state(self, gateway_id: str, state: bytes, ttl_s: float) -> None:
        """Say how this gateway is, for `prefix-router status` (JSON); vanishes `ttl_s` seconds after the last call."""
        ...

    async def states(self) -> Mapping[str, bytes]:
        """What the live gateways say of themselves, by gateway id."""
        ...

    async def pools(self) -> Sequence[str]:
        """Pools that gateways announced lately."""
        ...

    @property
    def breaker_state(self) -> str:
        """ "closed", "open" or "probing"."""
        ...

    async def close(self) -> None: ...


class BlockWrite(msgspec.Struct, frozen=True):
    """Blocks that a replica's incarnation now holds, or holds no more. `fence` is the token of the writer's lease."""

    record: ReplicaRecord
    """As returned by `begin_incarnation`: slot and epoch count."""
    fence: int
    held: bool
    blocks: bytes
    """Block hashes, packed 8 bytes each (layout.pack_hashes)."""
    tier: str = "gpu"


class Claim(msgspec.Struct, frozen=True):
    """What one round of renewing and taking leases came to."""

    epoch: str
    """Life of the roster; when it differs from a record's, the roster was lost: write everything again."""
    renewed: frozenset[str]
    claimed: Mapping[str, int]
    """Replica id -> fence of the leases that are new to this indexer."""
    fair_share: int
    """Replicas that each live indexer should hold at most."""
    indexers: int
    """Live indexers, this one included."""


class IndexWriter(Protocol):
    """What an indexer needs. A write by one that lost its lease is refused (Fenced, or listed by `apply`)."""

    @property
    def in_order(self) -> bool:
        """Whether calls that overlap take effect in the order in which they were made."""
        ...

    async def pools(self) -> Sequence[str]:
        """Pools that gateways announced lately."""
        ...

    async def announced(self, pool: str) -> Mapping[str, ReplicaRecord]:
        """Replicas that some gateway with a live lease serves."""
        ...

    async def claim(self, pool: str, indexer: str, replicas: Mapping[str, int], ttl_s: float) -> Claim:
        """Renew the leases held (replica id -> fence) and take free ones (fence 0) up to a fair share."""
        ...

    async def release(self, pool: str, indexer: str, leases: Mapping[str, int], *, leave: bool = False) -> None:
        """Give leases up (replica id -> fence); `leave`: this indexer is going away."""
        ...

    async def roster(self, pool: str) -> Mapping[str, ReplicaRecord]: ...

    async def begin_incarnation(self, pool: str, record: ReplicaRecord, fence: int) -> ReplicaRecord:
        """Give the replica a fresh slot, publish it in the roster, retire the old one. O(1) for readers.

        The answer has no slot when all `max_slots` are taken or not yet reusable. Raises Fenced.
        """
        ...

    async def apply(self, pool: str, writes: Sequence[BlockWrite]) -> frozenset[str]:
        """Write in order; idempotent. Returns the replicas whose writes were refused (lease, slot or epoch lost)."""
        ...

    async def update(self, pool: str, record: ReplicaRecord, fence: int, *, urgent: bool = True) -> bool:
        """Publish a changed record of the same incarnation (without a slot: of a replica that has no events).

        `urgent`: readers notice with their next lookup, otherwise within seconds. False: the incarnation is not
        current any more. Raises Fenced.
        """
        ...

    async def retire(self, pool: str, replica_id: str, fence: int) -> None:
        """Take the replica off the roster and end the lease; its slot is recycled once no bitmap can mention it."""
        ...

    async def save_snapshot(self, pool: str, replica_id: str, fence: int, blob: bytes) -> None:
        """Keep a tracker's state for whoever follows this replica next. Raises Fenced."""
        ...

    async def load_snapshot(self, pool: str, replica_id: str) -> bytes | None: ...

    async def close(self) -> None: ...


class Fenced(Exception):
    """Another indexer holds the lease on this replica now: stop writing for it."""
