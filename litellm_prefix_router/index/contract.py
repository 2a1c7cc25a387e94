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
    note: str | None = None
    """Why knowledge is not exact, for people."""


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

    async def place(self, pool: str, replica_id: str, blocks: Sequence[int], ttl_s: float) -> None:
        """Remember that a prompt with these blocks was sent to the replica (placement memory)."""
        ...

    async def publish_loads(self, pool: str, gateway_id: str, loads: Mapping[str, ReplicaLoad], ttl_s: float) -> None:
        """Replace this gateway's share of the load; it vanishes `ttl_s` seconds after the last call."""
        ...

    async def close(self) -> None: ...


class IndexWriter(Protocol):
    """What an indexer needs. `fence` is the token of its lease on the replica; a stale one is refused (Fenced)."""

    async def begin_incarnation(self, pool: str, record: ReplicaRecord, fence: int) -> ReplicaRecord:
        """Give the replica a fresh slot, publish it in the roster, retire the old one. O(1) for readers."""
        ...

    async def store(self, pool: str, slot: int, blocks: Sequence[int], fence: int, tier: str = "gpu") -> None: ...

    async def remove(self, pool: str, slot: int, blocks: Sequence[int], fence: int, tier: str = "gpu") -> None: ...

    async def update(self, pool: str, record: ReplicaRecord, fence: int) -> None:
        """Publish a changed record (knowledge, last event, note) of the same incarnation."""
        ...

    async def retire(self, pool: str, replica_id: str, fence: int) -> None:
        """Take the replica off the roster; its slot is recycled once no bitmap can mention it."""
        ...


class Fenced(Exception):
    """Another indexer holds the lease on this replica now: stop writing for it."""
