"""The index as indexers write it, in Redis: leases, roster, blocks, snapshots. A verb is one script (see there)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..settings import Settings
from .connect import connect
from .contract import BlockWrite, Claim, Fenced, ReplicaRecord
from .layout import TIERS, Layout, pools_key
from .records import as_fields, decode_roster, encode_record, merge_announcements
from .redis_guard import RedisGuard
from .scripts import BEGIN, CLAIM, RELEASE, RETIRE, SNAPSHOT, UPDATE, WRITE

_LINGER_MARGIN_S = 60.0
"""Added to a block's lifetime before a retired slot is used again: writes under way, expiry that lags."""


class RedisIndexWriter:
    """IndexWriter over Redis, for one event loop. Failures raise IndexUnavailable; all writes are idempotent."""

    def __init__(self, settings: Settings, *, client: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._guard = RedisGuard(
            client if client is not None else connect(settings.redis_url, settings, max_connections=16),
            settings.redis_write_timeout_ms / 1000,
            settings.redis_probe_ms / 1000,
            clock,
        )
        self._layouts: dict[str, Layout] = {}
        self._block_ttl_s = max(1, round(settings.block_ttl_s))
        self._ttl_s = 2 * self._block_ttl_s + int(_LINGER_MARGIN_S)
        self._linger_ms = int((self._block_ttl_s + min(_LINGER_MARGIN_S, self._block_ttl_s)) * 1000)

    @property
    def in_order(self) -> bool:
        return self._guard.in_order

    async def pools(self) -> list[str]:
        key = pools_key(self._settings.key_prefix)
        raw = await self._guard.execute("ZRANGE", key, 0, -1)
        return [name.decode("utf-8", "surrogatepass") for name in raw]

    async def announced(self, pool: str) -> dict[str, ReplicaRecord]:
        layout = self._layout(pool)
        fields, (seconds, _) = await asyncio.gather(self._hash(layout.announced), self._guard.execute("TIME"))
        live = [
            value
            for name, value in sorted(fields.items())
            if name.startswith(b"l") and int(fields.get(b"u" + name[1:], b"0")) > int(seconds) * 1000
        ]
        return merge_announcements(live)

    async def roster(self, pool: str) -> dict[str, ReplicaRecord]:
        return decode_roster(await self._hash(self._layout(pool).roster))

    async def leases(self, pool: str) -> dict[str, str]:
        """Replica id -> indexer that holds the lease on it, for `status`; lapsed leases included."""
        fields = await self._hash(self._layout(pool).leases)
        return {
            name.decode(): value.split(b":", 2)[2].decode()
            for name, value in fields.items()
            if not name.startswith(b"@") and value.count(b":") >= 2
        }

    async def claim(self, pool: str, indexer: str, replicas: Mapping[str, int], ttl_s: float) -> Claim:
        args: list[Any] = [indexer, int(ttl_s * 1000), self._ttl_s]
        for name, fence in replicas.items():
            args += (name, fence)
        epoch, fair, alive, mine, claimed = await self._script(
            CLAIM, [*self._state(pool), self._layout(pool).alive], args
        )
        return Claim(
            epoch=epoch.decode(),
            renewed=frozenset(name.decode() for name in mine),
            claimed={name.decode(): int(fence) for name, fence in zip(claimed[::2], claimed[1::2], strict=True)},
            fair_share=int(fair),
            indexers=int(alive),
        )

    async def release(self, pool: str, indexer: str, leases: Mapping[str, int], *, leave: bool = False) -> None:
        args: list[Any] = [indexer if leave else ""]
        for name, fence in leases.items():
            args += (name, fence)
        await self._script(RELEASE, [self._layout(pool).leases], args)

    async def begin_incarnation(self, pool: str, record: ReplicaRecord, fence: int) -> ReplicaRecord:
        args = [
            record.replica_id, fence, encode_record(record), self._ttl_s, self._linger_ms, self._settings.max_slots
        ]  # fmt: skip
        answer = await self._script(BEGIN, self._state(pool), args)
        if answer[0] == b"fenced":
            raise Fenced(record.replica_id)
        _, slot, incarnation, epoch = answer
        return msgspec.structs.replace(
            record, slot=int(slot) if slot else None, incarnation=int(incarnation), epoch=epoch.decode()
        )

    async def apply(self, pool: str, writes: Sequence[BlockWrite]) -> frozenset[str]:
        refused: set[str] = set()
        layout = self._layout(pool)
        step = self._settings.write_batch_blocks * 8
        batch: list[BlockWrite] = []
        room = step
        for write in writes:
            for start in range(0, len(write.blocks), step):
                part = write.blocks[start : start + step]
                if len(part) > room:
                    refused |= await self._send(layout, batch)
                    batch, room = [], step
                batch.append(write if len(part) == len(write.blocks) else _part(write, part))
                room -= len(part)
        return frozenset(refused | await self._send(layout, batch))

    async def update(self, pool: str, record: ReplicaRecord, fence: int, *, urgent: bool = True) -> bool:
        args = [
            record.replica_id, fence, "" if record.slot is None else record.slot, encode_record(record), self._ttl_s,
            self._linger_ms, int(urgent), record.epoch,
        ]  # fmt: skip
        answer = await self._script(UPDATE, self._state(pool), args)
        if answer == b"fenced":
            raise Fenced(record.replica_id)
        return bool(answer == b"ok")

    async def retire(self, pool: str, replica_id: str, fence: int) -> None:
        keys = [*self._state(pool), self._layout(pool).snapshot(replica_id)]
        if await self._script(RETIRE, keys, [replica_id, fence, self._ttl_s, self._linger_ms]) == b"fenced":
            raise Fenced(replica_id)

    async def save_snapshot(self, pool: str, replica_id: str, fence: int, blob: bytes) -> None:
        layout = self._layout(pool)
        keys = [layout.leases, layout.snapshot(replica_id)]
        if await self._script(SNAPSHOT, keys, [replica_id, fence, self._ttl_s, blob]) == b"fenced":
            raise Fenced(replica_id)

    async def load_snapshot(self, pool: str, replica_id: str) -> bytes | None:
        key = self._layout(pool).snapshot(replica_id)
        blob: bytes | None = await self._guard.execute("GET", key)
        return blob

    async def close(self) -> None:
        await self._guard.close()

    def _layout(self, pool: str) -> Layout:
        layout = self._layouts.get(pool)
        if layout is None:
            layout = self._layouts[pool] = Layout(self._settings.key_prefix, pool)
        return layout

    def _state(self, pool: str) -> list[bytes]:
        layout = self._layout(pool)
        return [layout.roster, layout.slots, layout.version, layout.leases]

    async def _send(self, layout: Layout, batch: Sequence[BlockWrite]) -> set[str]:
        if not batch:
            return set()
        args: list[Any] = [layout.base, self._block_ttl_s]
        for write in batch:
            record = write.record
            slot = -1 if record.slot is None else record.slot
            args += (int(write.held), TIERS[write.tier], record.epoch, slot, record.replica_id, write.fence)
            args.append(write.blocks)
        refused = await self._script(WRITE, [layout.slots, layout.leases, layout.roster], args)
        return {batch[number - 1].record.replica_id for number in refused}

    async def _hash(self, key: bytes) -> dict[bytes, bytes]:
        return as_fields(await self._guard.execute("HGETALL", key))

    async def _script(self, script: str, keys: list[bytes], args: list[Any]) -> Any:
        return await self._guard.run_script(script, keys, args)


def _part(write: BlockWrite, blocks: bytes) -> BlockWrite:
    return BlockWrite(write.record, write.fence, write.held, blocks, write.tier)
