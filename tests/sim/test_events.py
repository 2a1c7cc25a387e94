"""Event frames on the wire: order, replay, gaps, resets, other lives, and engines that connect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from litellm_prefix_router.sim import SimConfig, SimReplica
from litellm_prefix_router.sim.publisher import END_OF_REPLAY, engine_binds, for_rank
from litellm_prefix_router.sim.tokenizer import SimTokenizer

from .conftest import FAST, until

TIMEOUT_MS = 5000


@pytest.fixture
def context() -> AsyncIterator[zmq.asyncio.Context]:
    made: zmq.asyncio.Context = zmq.asyncio.Context()
    yield made  # type: ignore[misc]
    made.destroy(linger=0)


def socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    made = context.socket(kind)
    made.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    if kind == zmq.SUB:
        made.setsockopt(zmq.SUBSCRIBE, b"")
    return made


async def frame(sub: zmq.asyncio.Socket) -> tuple[bytes, int, list[Any]]:
    topic, sequence, payload = await sub.recv_multipart()
    return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


async def ask(client: httpx.AsyncClient, first: int, length: int = 33, **options: Any) -> dict[str, Any]:
    body = {"prompt": list(range(first, first + length)), "max_tokens": 1, **options}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def subscribed(context: zmq.asyncio.Context, replica: SimReplica, client: httpx.AsyncClient) -> Any:
    """A subscriber that certainly hears: frames before its subscription arrived are lost, as in the real engine."""
    sub = socket(context, zmq.SUB)
    sub.connect(replica.event_endpoints[0])
    first = 1
    while True:
        await ask(client, first)
        if await sub.poll(50):
            while (await frame(sub))[1] < replica.ranks[0].publisher.sequence - 1:  # type: ignore[union-attr]
                pass  # one that came late is no news
            return sub
        first += 40


async def test_frames_are_numbered_and_hold_the_tokens(
    context: zmq.asyncio.Context, client: httpx.AsyncClient, replica: SimReplica
) -> None:
    sub = await subscribed(context, replica, client)
    before = replica.ranks[0].publisher.sequence  # type: ignore[union-attr]
    await ask(client, 1000)
    await ask(client, 2000, cache_salt="tenant")
    topic, sequence, (_, events, rank) = await frame(sub)
    assert (topic, sequence, rank) == (b"kv", before, 0)
    assert events[0]["type"] == "BlockStored" and events[0]["token_ids"] == list(range(1000, 1032))
    _, sequence, (_, events, _) = await frame(sub)
    assert sequence == before + 1
    assert events[0]["extra_keys"] == [["tenant"], None]


async def replayed(context: zmq.asyncio.Context, replica: SimReplica, start: int) -> list[int]:
    dealer = socket(context, zmq.DEALER)
    dealer.connect(replica.replay_endpoints[0])
    await dealer.send_multipart([start.to_bytes(8, "big")])  # without the empty part: ignored
    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
    numbers = []
    while True:
        empty, topic, sequence, payload = await dealer.recv_multipart()
        assert empty == b""
        if sequence == END_OF_REPLAY:
            assert (topic, payload) == (b"", b"")
            return numbers
        assert topic == b"kv"
        numbers.append(int.from_bytes(sequence, "big"))


async def test_replay_gives_what_the_buffer_still_has(tokenizer: SimTokenizer, context: zmq.asyncio.Context) -> None:
    async with SimReplica(SimConfig(topic="kv", buffer_steps=4, **FAST), tokenizer=tokenizer) as replica:
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            for number in range(7):
                await ask(client, number * 100)
        assert await replayed(context, replica, 0) == [3, 4, 5, 6]
        assert await replayed(context, replica, 5) == [5, 6]
        assert await replayed(context, replica, 7) == []


async def test_lost_frames_leave_a_gap_that_replay_can_fill(
    context: zmq.asyncio.Context, client: httpx.AsyncClient, replica: SimReplica
) -> None:
    sub = await subscribed(context, replica, client)
    start = replica.ranks[0].publisher.sequence  # type: ignore[union-attr]
    assert (await client.post("/sim/fault", json={"drop_frames": 1})).json()["drop_frames"] == 1
    await ask(client, 1000)
    await ask(client, 2000)
    assert (await frame(sub))[1] == start + 1
    assert start in await replayed(context, replica, start)
    replica.faults.forget_frames = 1
    await ask(client, 3000)
    assert await replayed(context, replica, start) == [start, start + 1]


async def test_a_reset_is_told_with_the_next_step(
    context: zmq.asyncio.Context, client: httpx.AsyncClient, replica: SimReplica
) -> None:
    sub = await subscribed(context, replica, client)
    assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
    assert not await sub.poll(50)
    assert (await ask(client, 1))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    _, _, (_, events, _) = await frame(sub)
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_a_restart_says_nothing_and_counts_from_zero(
    context: zmq.asyncio.Context, client: httpx.AsyncClient, replica: SimReplica
) -> None:
    sub = await subscribed(context, replica, client)
    await client.post("/sim/restart")
    assert (await ask(client, 1))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await frame(sub))[1] == 0


async def test_an_engine_that_connects_is_heard_by_a_bound_consumer(
    tokenizer: SimTokenizer, context: zmq.asyncio.Context
) -> None:
    sub = socket(context, zmq.SUB)
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    config = SimConfig(events_endpoint=f"tcp://127.0.0.1:{port}", **FAST)
    async with SimReplica(config, tokenizer=tokenizer) as replica:
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            told = (await client.get("/kv_event_sources")).json()["0"]
            assert told["endpoint"] == config.events_endpoint and told["replay_endpoint"].startswith("tcp://*:")
            first = 0
            while not await sub.poll(50):  # until the connection stands
                await ask(client, first)
                first += 40
            assert (await frame(sub))[2][1][0]["type"] == "BlockStored"


async def test_ranks_publish_on_ports_of_their_own(tokenizer: SimTokenizer, context: zmq.asyncio.Context) -> None:
    async with SimReplica(SimConfig(data_parallel_size=2, **FAST), tokenizer=tokenizer) as replica:
        assert len(set(replica.event_endpoints + replica.replay_endpoints)) == 4
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            body = {"prompt": list(range(33)), "max_tokens": 1}
            for rank in range(2):
                await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})
        for rank in replica.ranks:
            assert rank.publisher is not None and rank.publisher.sequence == 1


async def test_without_events_nothing_is_told(tokenizer: SimTokenizer) -> None:
    async with SimReplica(SimConfig(events=False, **FAST), tokenizer=tokenizer) as replica:
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            assert (await client.get("/kv_event_sources")).json() == {}
            assert (await ask(client, 0))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert (await ask(client, 0))["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        assert replica.event_endpoints == []


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [("tcp://*:5557", True), ("tcp://[::]:5557", True), ("ipc:///tmp/x", True), ("tcp://10.0.0.1:5557", False)],
)
def test_who_binds(endpoint: str, binds: bool) -> None:
    assert engine_binds(endpoint) is binds


def test_the_port_of_a_rank() -> None:
    assert for_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert for_rank("ipc:///tmp/x", 0) == "ipc:///tmp/x"
    with pytest.raises(ValueError, match="several data-parallel ranks"):
        for_rank("ipc:///tmp/x", 1)


async def test_an_address_in_use_is_one_clear_error(tokenizer: SimTokenizer, replica: SimReplica) -> None:
    port = int(replica.event_endpoints[0].rpartition(":")[2])
    with pytest.raises(OSError, match=str(port)):
        await SimReplica(SimConfig(events_port=port), tokenizer=tokenizer).start()
    await until(lambda: True)
