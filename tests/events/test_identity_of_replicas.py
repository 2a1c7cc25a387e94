"""Which replica is which: addresses that are used again or differ by a port only, replicas that are silent or gone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim.config import SimConfig
from litellm_prefix_router.sim.replica import SimReplica

from .conftest import StartEngine, eventually
from .test_indexer import POOL, TEXT, ask, chain, knowledge, matches, records, running
from .test_transport import FAST, free_port, known_chains, serving


@pytest.mark.parametrize("asked_before", [False, True])
async def test_an_address_reused_by_a_new_engine(settings: Settings, asked_before: bool) -> None:
    """It never said that it holds the old one's blocks, whether or not it has spoken when it is found."""
    config = SimConfig(**FAST, port=free_port(), events_port=free_port(), replay_port=free_port())
    old = SimReplica(config)
    async with serving([SimConfig(**FAST)]) as others, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(old.stop)
        reader = RedisIndexReader(settings, "gw")
        await old.start()
        fleet = [old, *others]
        await reader.announce(POOL, records(fleet), 60)
        async with running(Indexer(settings)):
            await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
            for replica in fleet:
                await ask(replica, TEXT)
            full = len(chain(old, TEXT, 16))
            await eventually(lambda: matches(reader, fleet), {0: full, 1: full})
            life = (await reader.roster(POOL))[old.base_url].incarnation
            await old.stop()
            async with SimReplica(config) as new:
                assert new.base_url == old.base_url
                if asked_before:
                    await ask(new, "what the new engine was asked " * 40)
                await eventually(lambda: matches(reader, fleet), {1: full})
                await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
                assert (await reader.roster(POOL))[old.base_url].incarnation > life
                half = TEXT[: len(TEXT) // 2]
                await ask(new, half)
                both = [a for a, b in zip(chain(new, half, 16), chain(new, TEXT, 16), strict=False) if a == b]
                known = {0: len(chain(new, half, 16)), 1: len(both)}
                await eventually(lambda: matches(reader, fleet, half), known)
        await reader.close()


async def test_two_replicas_behind_one_ip_on_different_ports(settings: Settings) -> None:
    async with serving([SimConfig(**FAST)] * 2) as fleet:
        assert len({r.base_url.rpartition(":")[0] for r in fleet}) == 1
        reader = RedisIndexReader(settings, "gw")
        await reader.announce(POOL, records(fleet), 60)
        async with running(Indexer(settings)):
            await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
            await ask(fleet[0], TEXT)
            await ask(fleet[1], "something else " * 60)
            await eventually(lambda: matches(reader, fleet), {0: len(chain(fleet[0], TEXT, 16))})
            fleet[1].restart()
            other = "another life " * 60
            await ask(fleet[1], other)
            await eventually(lambda: matches(reader, fleet, other), {1: len(chain(fleet[1], other, 16))})
            assert await matches(reader, fleet) == {0: len(chain(fleet[0], TEXT, 16))}
        await reader.close()


async def test_a_replica_that_never_sends_events_beside_ones_that_do(settings: Settings) -> None:
    """One has events switched off, one has nothing to say; the others are known exactly all the same."""
    configs = [SimConfig(**FAST), SimConfig(**FAST), SimConfig(**FAST, events=False), SimConfig(**FAST)]
    async with serving(configs) as fleet:
        reader = RedisIndexReader(settings, "gw")
        await reader.announce(POOL, records(fleet), 60)
        async with running(Indexer(settings)):
            levels = ["exact", "exact", "none", "exact"]
            await eventually(lambda: knowledge(reader), dict(zip([r.base_url for r in fleet], levels, strict=True)))
            for replica in fleet[:3]:
                await ask(replica, TEXT)
            full = len(chain(fleet[0], TEXT, 16))
            await eventually(lambda: matches(reader, fleet), {0: full, 1: full})
            roster = await reader.roster(POOL)
            assert roster[fleet[2].base_url].slot is None and roster[fleet[3].base_url].blocks == 0
            assert "publishes no KV events" in (roster[fleet[2].base_url].note or "")
        await reader.close()


async def test_events_queued_before_a_removal_arriving_after_it(settings: Settings, start_engine: StartEngine) -> None:
    """The replica is withdrawn while its events still wait to be written; they must not bring it back."""
    gone, stays = start_engine(POOL), start_engine(POOL)
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, [gone.record, stays.record], 60)
    async with running(Indexer(settings)) as indexer:
        await eventually(lambda: known_chains(reader, gone), (0, "exact"))
        await eventually(lambda: known_chains(reader, stays), (0, "exact"))
        gone.store(1)
        await eventually(lambda: known_chains(reader, gone), (1, "exact"))
        on_its_way, go_on = asyncio.Event(), asyncio.Event()
        original = indexer._writer.apply

        async def held_up(pool: str, writes: Any) -> Any:
            on_its_way.set()
            await go_on.wait()
            return await original(pool, writes)

        indexer._writer.apply = held_up  # type: ignore[method-assign]
        for seed in range(2, 50):
            gone.store(seed)
        await on_its_way.wait()
        await reader.announce(POOL, [stays.record], 60)

        async def listed() -> set[str]:
            return set(await reader.roster(POOL))

        await eventually(listed, {stays.record.replica_id})
        go_on.set()
        gone.store(50)
        stays.store(51)
        await eventually(lambda: known_chains(reader, stays), (1, "exact"))
        assert await known_chains(reader, gone) == (0, "") and await listed() == {stays.record.replica_id}
        await reader.announce(POOL, [gone.record, stays.record], 60)  # back again: it has had no restart
        await eventually(lambda: known_chains(reader, gone), (50, "exact"))
    await reader.close()
