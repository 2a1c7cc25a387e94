"""The indexer against simulated replicas (real sockets, vLLM's schema) and a real Redis-protocol server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from litellm_prefix_router.events import follower as follower_module
from litellm_prefix_router.events import writing as writing_module
from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.fleet.discovery import ReplicaFacts
from litellm_prefix_router.index import ReplicaRecord
from litellm_prefix_router.index.layout import Layout, pools_key
from litellm_prefix_router.index.memory import MemoryIndex
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim.config import SimConfig
from litellm_prefix_router.sim.replica import SimReplica

from .conftest import eventually

POOL = "sim"


def body(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}


def chain(replica: SimReplica, text: str, size: int) -> list[int]:
    ids = replica.prompt_ids(body(text))
    return chain_hashes(as_token_ids(list(ids)), size, root_hash(POOL))


async def ask(replica: SimReplica, text: str) -> int:
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{replica.base_url}/v1/chat/completions", json=body(text), timeout=20)
    answer.raise_for_status()
    details = answer.json()["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@contextlib.asynccontextmanager
async def running(indexer: Indexer) -> AsyncIterator[Indexer]:
    task = asyncio.create_task(indexer.run())
    try:
        yield indexer
    finally:
        indexer.stop()
        await asyncio.wait_for(task, 10)


@pytest.fixture
async def fleet() -> AsyncIterator[list[SimReplica]]:
    replicas = [SimReplica(SimConfig(prefill_tokens_per_s=1e6, decode_tokens_per_s=1e4)) for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        for replica in replicas:
            await stack.enter_async_context(replica)
        yield replicas


def records(fleet: list[SimReplica]) -> list[ReplicaRecord]:
    return [ReplicaRecord(replica_id=r.base_url, address=r.base_url) for r in fleet]


async def knowledge(reader: Any) -> Mapping[str, str]:
    return {name: record.knowledge for name, record in (await reader.roster(POOL)).items()}


TEXT = "a shared system prompt that is long enough to fill a good number of blocks, again and again; " * 12


async def matches(reader: Any, fleet: list[SimReplica], text: str = TEXT) -> dict[int, int]:
    size = max((r.block_size for r in (await reader.roster(POOL)).values()), default=0) or 16
    found = (await reader.lookup(POOL, chain(fleet[0], text, size))).matches
    return {at: found[r.base_url] for at, r in enumerate(fleet) if r.base_url in found}


async def filled(reader: Any, fleet: list[SimReplica]) -> int:
    """Once all are followed, and all hold TEXT: its full blocks."""
    await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
    for replica in fleet:
        await ask(replica, TEXT)
    full = len(chain(fleet[0], TEXT, (await reader.roster(POOL))[fleet[0].base_url].block_size))
    await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(len(fleet)), full))
    return full


async def test_events_of_a_fleet_reach_the_index(settings: Settings, fleet: list[SimReplica]) -> None:
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    await ask(fleet[2], TEXT)  # before anyone listens: comes by replay
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        size = (await reader.roster(POOL))[fleet[2].base_url].block_size
        full = len(chain(fleet[2], TEXT, size))
        assert full > 10
        await eventually(lambda: matches(reader, fleet), {2: full})
        await ask(fleet[1], TEXT)
        await eventually(lambda: matches(reader, fleet), {1: full, 2: full})
        fleet[2].restart()
        await ask(fleet[2], "something else entirely " * 40)
        await eventually(lambda: matches(reader, fleet), {1: full})
    await reader.close()


async def test_takeover_keeps_the_slot_and_blinds_nobody(settings: Settings, fleet: list[SimReplica]) -> None:
    settings = settings.model_copy(update={"indexer_lease_s": 2.0})  # a lapse would count as another life
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings, indexer_id="first")):
        full = await filled(reader, fleet)
    slots = {name: (r.slot, r.incarnation) for name, r in (await reader.roster(POOL)).items()}
    await ask(fleet[3], "asked while nobody follows " * 40)
    async with running(Indexer(settings, indexer_id="second")):

        async def taken() -> set[tuple[str | None, str]]:
            return {(r.indexer, r.knowledge) for r in (await reader.roster(POOL)).values()}

        await eventually(taken, {("second", "exact")})
        roster = await reader.roster(POOL)
        assert {name: (r.slot, r.incarnation) for name, r in roster.items()} == slots
        assert await matches(reader, fleet) == dict.fromkeys(range(4), full)
        more = len(chain(fleet[0], "asked while nobody follows " * 40, roster[fleet[0].base_url].block_size))
        await eventually(lambda: matches(reader, fleet, "asked while nobody follows " * 40), {3: more})
    await reader.close()


async def test_an_emptied_redis_is_written_again_from_memory(
    settings: Settings, fleet: list[SimReplica], valkey: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)):
        full = await filled(reader, fleet)
        client = valkey.client()
        client.delete(*client.keys(settings.key_prefix + "*"))  # at once, or some of what is written again goes, too
        await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(4), full))
        assert "writing it again from memory" in caplog.text
    await reader.close()


async def test_a_replica_without_events_beside_ones_that_have_them(settings: Settings, fleet: list[SimReplica]) -> None:
    reader = RedisIndexReader(settings, "gw")
    nobody = "http://127.0.0.1:9"
    await reader.announce(POOL, [*records(fleet), ReplicaRecord(replica_id=nobody, address=nobody)], 30)
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet} | {nobody: "none"})
        assert (await reader.roster(POOL))[nobody].note == "replica does not answer"
    await reader.close()


async def test_a_replica_that_restarts_with_other_event_sockets_is_followed_there(
    settings: Settings, fleet: list[SimReplica]
) -> None:
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        await ask(fleet[0], TEXT)
        full = len(chain(fleet[0], TEXT, (await reader.roster(POOL))[fleet[0].base_url].block_size))
        await eventually(lambda: matches(reader, fleet), {0: full})
        left = fleet[0].event_endpoints
        await fleet[0].stop()
        async with SimReplica(dataclasses.replace(fleet[0].config, port=fleet[0].port)) as successor:
            assert successor.base_url == fleet[0].base_url
            assert successor.event_endpoints != left
            text = "asked before its new sockets are found " * 40  # comes by replay
            await ask(successor, text)
            more = len(chain(successor, text, (await reader.roster(POOL))[successor.base_url].block_size))
            await eventually(lambda: matches(reader, fleet, text), {0: more})
            await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
            assert await matches(reader, fleet) == {}
    await reader.close()


async def test_a_withdrawn_replica_leaves_the_roster(settings: Settings, fleet: list[SimReplica]) -> None:
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        await reader.announce(POOL, records(fleet)[1:], 30)
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet[1:]})
    await reader.close()


async def test_a_fault_while_writing_does_not_end_the_writing(
    settings: Settings, fleet: list[SimReplica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writing_module, "_RETRY_AFTER_FAULT_S", 0.05)
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)) as indexer:
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        original, faults = indexer._writer.apply, iter([RuntimeError("a fault"), RuntimeError("another")])

        async def apply(pool: str, writes: Any) -> Any:
            for fault in faults:
                raise fault
            return await original(pool, writes)

        monkeypatch.setattr(indexer._writer, "apply", apply)
        await ask(fleet[1], TEXT)
        size = (await reader.roster(POOL))[fleet[1].base_url].block_size
        await eventually(lambda: matches(reader, fleet), {1: len(chain(fleet[1], TEXT, size))})
    assert "a fault" in caplog.text
    await reader.close()


async def test_a_takeover_from_a_replica_that_is_slow_to_say_where_its_events_are(
    settings: Settings, fleet: list[SimReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"indexer_lease_s": 2.0})  # a lapse would count as another life
    monkeypatch.setattr(follower_module, "_ASK_AGAIN_S", 0.2)
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)):
        full = await filled(reader, fleet)
    slots = {name: (r.slot, r.incarnation) for name, r in (await reader.roster(POOL)).items()}
    original, slow = follower_module.ask_replica, True

    async def ask_slowly(client: httpx.AsyncClient, address: str) -> ReplicaFacts:
        facts = await original(client, address)
        return dataclasses.replace(facts, event_sources={}, unanswered=frozenset({"events"})) if slow else facts

    monkeypatch.setattr(follower_module, "ask_replica", ask_slowly)
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "stale" for r in fleet})
        assert await matches(reader, fleet) == dict.fromkeys(range(4), full)
        slow = False
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        assert {name: (r.slot, r.incarnation) for name, r in (await reader.roster(POOL)).items()} == slots
        assert await matches(reader, fleet) == dict.fromkeys(range(4), full)
    await reader.close()


async def test_a_pool_that_no_gateway_lists_any_more_is_let_go(settings: Settings, fleet: list[SimReplica]) -> None:
    settings = settings.model_copy(update={"announce_ttl_s": 0.5})
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings)) as indexer:
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        await reader._guard.execute("DEL", pools_key(settings.key_prefix))  # its entry lapses after two hours
        await asyncio.sleep(3 * settings.indexer_lease_s)
        assert len(indexer.following[POOL]) == len(fleet)  # what is announced is followed, listed or not
        await reader._guard.execute("DEL", Layout(settings.key_prefix, POOL).announced)

        async def followed() -> dict[str, list[ReplicaRecord]]:
            return indexer.following

        await eventually(followed, {})
        await reader.announce(POOL, records(fleet), 30)
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
    await reader.close()


async def test_two_indexers_share_and_take_over(settings: Settings, fleet: list[SimReplica]) -> None:
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 30)

    async def holders() -> list[str | None]:
        return sorted(r.indexer or "" for r in (await reader.roster(POOL)).values() if r.knowledge == "exact")

    async with running(Indexer(settings, indexer_id="a")):
        await eventually(holders, ["a"] * 4)
        async with running(Indexer(settings, indexer_id="b")):
            await eventually(holders, ["a", "a", "b", "b"])
        await eventually(holders, ["a"] * 4)
    await reader.close()


async def test_the_same_indexer_serves_the_memory_index(settings: Settings, fleet: list[SimReplica]) -> None:
    memory = MemoryIndex()
    reader = memory.reader("gw")
    await reader.announce(POOL, records(fleet), 30)
    async with running(Indexer(settings, writer=memory.writer())):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        await ask(fleet[0], TEXT)
        full = len(chain(fleet[0], TEXT, (await reader.roster(POOL))[fleet[0].base_url].block_size))
        await eventually(lambda: matches(reader, fleet), {0: full})
