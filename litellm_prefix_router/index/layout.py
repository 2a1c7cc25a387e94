"""Names of everything that the index keeps in Redis: one owner of the key format.

All keys of a pool share one hash tag, so that a Cluster keeps them on one node and an `MGET` or a script may touch
several of them. Per pool, with P = ``<key_prefix>{<11 characters over the pool's name>}``::

    P:v          version of the roster, "<epoch>:<counter>"; read along with every lookup
    P:r          hash: the roster, replica id -> "<slot>:<incarnation>:<json>"; "@e" the epoch, "@t" lower tiers in use
    P:s          hash: slots; "@e" epoch, "@c" counter, "@n" next slot, "@m" mask of live slots, "<slot>" -> reusable at
    P:k          hash: leases, replica id -> "<fence>:<until ms>:<indexer>"; "@i<indexer>" -> alive until; "@f" fence
    P:a          hash: announcements, "l<gateway>" -> json, "u<gateway>" -> until ms
    P:i          some indexer looks after the pool (vanishes when none does)
    P:g          gateways with a lease on their load, one "<until ms> <id>" a line
    P:l<gateway> its load, msgpack
    P:b<epoch><hash>   bitmap of the slots that hold the block in GPU memory (c, d: CPU memory, storage)
    P:p<hash>    placements, 8 bytes each: replica tag, expiry
    P:t<replica> snapshot of the tracker

and once ``<key_prefix>:pools``, the pools that were announced lately, and ``<key_prefix>{states}[:<gateway>]``, what
gateways say of themselves for `prefix-router status`. The epoch (two bytes) changes when the roster was
lost (an emptied Redis, eviction): bitmaps of another epoch are out of reach and fade by their lifetime.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_digest, xxh32_digest

from ..settings import SettingsError

TIERS = {"gpu": b"b", "cpu": b"c", "storage": b"d"}
"""Tier -> key family, fastest first."""
LOWER_TIERS = tuple(tier for tier in TIERS if tier != "gpu")


class Layout:
    """Keys of one pool."""

    __slots__ = ("alive", "announced", "base", "gateways", "leases", "placed", "pool", "roster", "slots", "version")

    def __init__(self, key_prefix: str, pool: str) -> None:
        tag = base64.urlsafe_b64encode(xxh3_64_digest(pool.encode("utf-8", "surrogatepass"))).rstrip(b"=")
        self.pool = pool
        self.base = check_prefix(key_prefix) + b"{" + tag + b"}:"
        self.version = self.base + b"v"
        self.roster = self.base + b"r"
        self.slots = self.base + b"s"
        self.leases = self.base + b"k"
        self.announced = self.base + b"a"
        self.alive = self.base + b"i"
        self.gateways = self.base + b"g"
        self.placed = self.base + b"p"

    def load(self, gateway: str) -> bytes:
        return self.base + b"l" + gateway.encode()

    def snapshot(self, replica_id: str) -> bytes:
        return self.base + b"t" + replica_id.encode()

    def family(self, tier: str, epoch: bytes) -> bytes:
        """First part of the block keys of a tier; `epoch` is 4 hexadecimal digits as the version has them."""
        return self.base + TIERS[tier] + bytes.fromhex(epoch.decode())


def check_prefix(key_prefix: str) -> bytes:
    """The prefix as bytes. Raises SettingsError for braces, which would misplace the Cluster's hash tag."""
    if "{" in key_prefix or "}" in key_prefix:
        raise SettingsError(f"key_prefix: must not contain braces (got {key_prefix!r})")
    return key_prefix.encode()


def pools_key(key_prefix: str) -> bytes:
    return check_prefix(key_prefix) + b":pools"


def states_key(key_prefix: str) -> bytes:
    """Sorted set of gateways that say how they are: id -> until (Unix seconds)."""
    return check_prefix(key_prefix) + b"{states}"


def state_key(key_prefix: str, gateway: str) -> bytes:
    return states_key(key_prefix) + b":" + gateway.encode()


def pack_hashes(blocks: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.uint64]]) -> bytes:
    """Block hashes as the scripts take them: 8 bytes each, little-endian."""
    return np.asarray(blocks, dtype="<u8").tobytes()


def replica_tag(replica_id: str) -> bytes:
    """4 bytes that stand for a replica in placements. A collision costs a cache miss."""
    return bytes(xxh32_digest(replica_id.encode()))
