"""The index is compared with what engines do and what gateways see, and mends itself where they disagree."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest

from litellm_prefix_router.events import follower as follower_module
from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.index import ReplicaRecord
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim.config import SimConfig
from litellm_prefix_router.sim.replica import SimReplica

from .conftest import eventually
from .test_indexer import POOL, TEXT, ask, chain, knowledge, matches, records, running

CONFIG = SimConfig(prefill_tokens_per_s=1e6, decode_tokens_per_s=1e4)


async def full_chain(reader: Any, replica: SimReplica, text: str = TEXT) -> int:
    return len(chain(replica, text, (await reader.roster(POOL))[replica.base_url].block_size))


async def test_an_engine_that_works_and_is_not_heard_is_stale_until_it_is_heard_again(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"vitals_interval_s": 0.2})
    async with SimReplica(CONFIG) as replica, contextlib.AsyncExitStack() as stack:
        reader = RedisIndexReader(settings, "gw")
        stack.push_async_callback(reader.close)
        await reader.announce(POOL, records([replica]), 60)
        await stack.enter_async_context(running(Indexer(settings)))
        await eventually(lambda: knowledge(reader), {replica.base_url: "exact"})
        await ask(replica, TEXT)
        await eventually(lambda: matches(reader, [replica]), {0: await full_chain(reader, replica)})
        replica.faults.update({"drop_frames": 1_000_000})
        unheard = f"the first prompt that nobody heard of; {TEXT}"
        await ask(replica, unheard)
        numbers = itertools.count()

        async def working() -> dict[int, int]:
            await ask(replica, f"prompt {next(numbers)} of many; {TEXT}")
            return await matches(reader, [replica], unheard)

        # found out, connected anew, and what was missed has come by replay
        await eventually(working, {0: await full_chain(reader, replica, unheard)}, 60.0)
        await eventually(lambda: knowledge(reader), {replica.base_url: "exact"})
        assert "no event came while the engine computed" in caplog.text


async def test_an_engine_that_comes_back_with_another_event_port_is_found(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "_LOOK_S", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        reader = RedisIndexReader(settings, "gw")
        stack.push_async_callback(reader.close)
        async with SimReplica(CONFIG) as first:
            await reader.announce(POOL, records([first]), 60)
            await stack.enter_async_context(running(Indexer(settings)))
            await eventually(lambda: knowledge(reader), {first.base_url: "exact"})
            await ask(first, TEXT)
            await eventually(lambda: matches(reader, [first]), {0: await full_chain(reader, first)})
            port, blocks = first.port, await full_chain(reader, first)
        second = await stack.enter_async_context(SimReplica(replace(CONFIG, port=port)))
        assert second.base_url == first.base_url
        # the old one's blocks are not the new one's
        await eventually(lambda: matches(reader, [second]), {})
        await eventually(lambda: knowledge(reader), {second.base_url: "exact"})
        await ask(second, TEXT)
        await eventually(lambda: matches(reader, [second]), {0: blocks})


async def test_an_old_event_port_that_another_engine_took_is_left(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "_LOOK_S", 0.2)
    settings = settings.model_copy(update={"vitals_interval_s": 0.0})
    async with contextlib.AsyncExitStack() as stack:
        reader = RedisIndexReader(settings, "gw")
        stack.push_async_callback(reader.close)
        async with SimReplica(CONFIG) as first:
            await reader.announce(POOL, records([first]), 60)
            await stack.enter_async_context(running(Indexer(settings)))
            await eventually(lambda: knowledge(reader), {first.base_url: "exact"})
            port, (events,) = first.port, first.event_endpoints
        # while nothing answers at the replica's own address, its stream connects to the port's new owner
        other = await stack.enter_async_context(SimReplica(replace(CONFIG, events_port=int(events.rpartition(":")[2]))))
        texts: list[str] = []

        async def taken_for_the_first() -> bool:
            texts.append(f"prompt {len(texts)} of another engine; {TEXT}")
            await ask(other, texts[-1])
            await asyncio.sleep(0.1)
            return bool(await matches(reader, [first], texts[-1]))

        await eventually(taken_for_the_first, True)
        second = await stack.enter_async_context(SimReplica(replace(CONFIG, port=port)))
        await eventually(lambda: matches(reader, [second], texts[-1]), {})
        await eventually(lambda: knowledge(reader), {second.base_url: "exact"})
        own = f"what only the second was asked; {TEXT}"
        await ask(second, own)
        await eventually(lambda: matches(reader, [second], own), {0: await full_chain(reader, second, own)})


async def test_a_doubted_replica_is_read_anew_once_for_each_doubt(settings: Settings) -> None:
    settings = settings.model_copy(update={"indexer_lease_s": 2.0})  # a lapse would count as another life
    async with SimReplica(CONFIG) as replica, SimReplica(CONFIG) as other, contextlib.AsyncExitStack() as stack:
        reader = RedisIndexReader(settings, "gw")
        stack.push_async_callback(reader.close)
        await reader.announce(POOL, records([replica, other]), 60)
        await stack.enter_async_context(running(Indexer(settings)))
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in (replica, other)})
        for each in (replica, other):
            await ask(each, TEXT)
        blocks = await full_chain(reader, replica)
        await eventually(lambda: matches(reader, [replica, other]), {0: blocks, 1: blocks})

        async def lives() -> dict[str, int]:
            return {name: record.incarnation for name, record in (await reader.roster(POOL)).items()}

        before = await lives()
        doubted = [ReplicaRecord(replica.base_url, replica.base_url, doubted_at=1.7e9), *records([other])]
        await reader.announce(POOL, doubted, 60)
        after = {**before, replica.base_url: before[replica.base_url] + 1}
        assert (await reader.roster(POOL))[other.base_url].incarnation == before[other.base_url]
        await eventually(lives, after)
        await eventually(lambda: matches(reader, [replica, other]), {0: blocks, 1: blocks})
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in (replica, other)})
        # what another gateway doubted before then is settled, and what it doubts soon after has to wait
        for doubted_at in (1.7e9 + 1, time.time() + 3600):
            again = [ReplicaRecord(replica.base_url, replica.base_url, doubted_at=doubted_at), *records([other])]
            await reader.announce(POOL, again, 60)
            await asyncio.sleep(1.5)
        assert await lives() == after


async def test_an_event_socket_that_gateways_name_differently_from_now_on_is_taken(settings: Settings) -> None:
    async with SimReplica(CONFIG) as replica, SimReplica(CONFIG) as other, contextlib.AsyncExitStack() as stack:
        reader = RedisIndexReader(settings, "gw")
        stack.push_async_callback(reader.close)
        wrong = ReplicaRecord(replica.base_url, replica.base_url, events="tcp://127.0.0.1:1")
        await reader.announce(POOL, [wrong, *records([other])], 60)
        await stack.enter_async_context(running(Indexer(settings)))
        await ask(replica, TEXT)
        await eventually(lambda: knowledge(reader), {replica.base_url: "stale", other.base_url: "exact"})
        (events,), (replay,) = replica.event_endpoints, replica.replay_endpoints
        right = ReplicaRecord(replica.base_url, replica.base_url, events=events, replay=replay)
        await reader.announce(POOL, [right, *records([other])], 60)
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in (replica, other)})
        await eventually(lambda: matches(reader, [replica, other]), {0: await full_chain(reader, replica)})
