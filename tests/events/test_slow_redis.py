"""A Redis that answers 100 ms late: too late for decisions, in time for indexers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest

from litellm_prefix_router.decision import Receipt, Source
from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.fleet.discovery import ReplicaFacts
from litellm_prefix_router.fleet.pool import Fleet, Pool, Replica
from litellm_prefix_router.index import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.layout import pack_hashes
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash
from litellm_prefix_router.prompt.encoded import CacheIdentity, EncodedPrompt
from litellm_prefix_router.request import RoutingRequest
from litellm_prefix_router.router import PrefixRouter
from litellm_prefix_router.settings import Settings

from .conftest import StartEngine, eventually
from .test_indexer import POOL, running
from .test_transport import known_chains

LATE_S = 0.1
NAMES = tuple("abcd")
_COMMAND = re.compile(rb"\*\d+\r\n\$\d+\r\n([A-Z]+)\r\n")


class LateProxy:
    """Passes Redis's answers on after `delay_s`; counts the commands that come through."""

    def __init__(self, host: str, port: int) -> None:
        self.delay_s = 0.0
        self.commands: Counter[str] = Counter()
        self._upstream = (host, port)
        self._pumps: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection(*self._upstream)
        answers: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        for work in (self._ask(reader, to_redis), self._hear(from_redis, answers), self._answer(answers, writer)):
            pump = asyncio.create_task(work)
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _ask(self, reader: asyncio.StreamReader, to_redis: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.commands.update(name.decode() for name in _COMMAND.findall(data))
            to_redis.write(data)
        to_redis.close()

    async def _hear(self, from_redis: asyncio.StreamReader, answers: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while data := await from_redis.read(1 << 16):
            answers.put_nowait((loop.time() + self.delay_s, data))
        answers.put_nowait((0.0, b""))

    async def _answer(self, answers: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while (item := await answers.get())[1]:
            await asyncio.sleep(item[0] - loop.time())  # each answer late, not each later than the one before
            writer.write(item[1])
        writer.close()


@pytest.fixture
async def proxy(settings: Settings) -> AsyncIterator[tuple[LateProxy, Settings]]:
    """The proxy, and default settings that lead through it."""
    host, port = settings.redis_url.removeprefix("redis://").split("/")[0].split(":")
    late = LateProxy(host, int(port))
    async with late.serving() as url:
        yield late, Settings(redis_url=url, key_prefix=settings.key_prefix)


class Ids:
    """Token ids straight from the body."""

    state = "ready"

    async def encode(self, path: str, body: Any) -> EncodedPrompt:
        return EncodedPrompt(as_token_ids(body["prompt"]), CacheIdentity(), "ids")

    def blocks(self, encoded: EncodedPrompt, pool: str, block_size: int) -> list[int]:
        return chain_hashes(encoded.token_ids, block_size, root_hash(pool))


def decides(settings: Settings, reader: RedisIndexReader) -> Callable[[list[int]], Awaitable[Receipt]]:
    replicas = {name: Replica(name, name, "m", facts=ReplicaFacts(block_size=16)) for name in NAMES}
    pool = Pool("chat", replicas, encoder=Ids())  # type: ignore[arg-type]
    router = PrefixRouter(settings, Fleet([pool]), lambda: reader, rng=Random(1))

    async def decide(prompt: list[int]) -> Receipt:
        decision = await router.route(RoutingRequest("chat", "/v1/completions", {"prompt": prompt}, NAMES))
        router.finished(decision)
        return decision.receipt

    return decide


async def test_decisions_do_without_a_late_redis_and_take_it_up_again(
    proxy: tuple[LateProxy, Settings], settings: Settings
) -> None:
    late, through = proxy
    writer, reader = RedisIndexWriter(settings), RedisIndexReader(through)
    prompt = list(range(100, 165))
    claim = await writer.claim("m", "ix", dict.fromkeys(NAMES, 0), 600)
    for name, fence in claim.claimed.items():
        record = await writer.begin_incarnation("m", ReplicaRecord(name, name, knowledge="exact"), fence)
        if name == "c":
            held = pack_hashes(chain_hashes(as_token_ids(prompt), 16, root_hash("m")))
            await writer.apply("m", [BlockWrite(record, fence, True, held)])
    decide = decides(through, reader)

    async def seen() -> tuple[str, Source, str, int]:
        receipt = await decide(prompt)
        return receipt.choice, receipt.source, receipt.reason, receipt.match_tokens

    await eventually(seen, ("c", Source.EXACT, "ok", 64))
    late.delay_s = LATE_S
    await eventually(seen, ("c", Source.APPROXIMATE, "index_unavailable", 0))  # where it was sent lately
    while reader.breaker_state == "closed":
        await decide(prompt)
    asked = late.commands["MGET"]
    for _ in range(500):
        await decide(prompt)
        await asyncio.sleep(0.001)
    # a probe that got through all the same costs a decision or two their time; without a breaker it is one MGET each
    assert late.commands["MGET"] - asked < 150
    late.delay_s = 0.0
    await eventually(seen, ("c", Source.EXACT, "ok", 64))
    await reader.close()
    await writer.close()


async def test_a_late_redis_costs_no_indexer_its_leases(
    proxy: tuple[LateProxy, Settings], settings: Settings, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, through = proxy
    rounds: Counter[str] = Counter()
    original = RedisIndexWriter.claim

    async def counted(self: Any, pool: str, indexer: str, *rest: Any) -> Any:
        claim = await original(self, pool, indexer, *rest)
        rounds[indexer] += 1
        return claim

    monkeypatch.setattr(RedisIndexWriter, "claim", counted)
    engines = [start_engine(POOL) for _ in range(4)]
    reader, writer = RedisIndexReader(settings, "gw"), RedisIndexWriter(settings)
    await reader.announce(POOL, [engine.record for engine in engines], 600)
    async with running(Indexer(through, indexer_id="one")) as one, running(Indexer(through, indexer_id="two")) as two:

        async def shares() -> list[int]:
            return sorted(len(indexer.following.get(POOL, ())) for indexer in (one, two))

        await eventually(shares, [2, 2])
        before = await fences(writer)
        late.delay_s = LATE_S
        rounds.clear()
        for seed in range(3):
            for engine in engines:
                engine.store(seed, 40)

        async def went_on() -> bool:
            return min(rounds["one"], rounds["two"]) >= 4

        await eventually(went_on, True, 60)
        assert await fences(writer) == before
        for engine in engines:
            await eventually(lambda engine=engine: known_chains(reader, engine), (3, "exact"))
        late.delay_s = 0.0
    await reader.close()
    await writer.close()


async def test_many_replicas_are_taken_and_handed_over_however_late_redis_is(
    proxy: tuple[LateProxy, Settings], settings: Settings, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    late, through = proxy
    late.delay_s = LATE_S
    reader = RedisIndexReader(settings, "gw")
    pools = {f"pool-{number}": [start_engine(f"pool-{number}", framing=None) for _ in range(10)] for number in range(4)}
    for pool, engines in pools.items():
        await reader.announce(pool, [engine.record for engine in engines], 600)

    async def holders() -> Counter[str | None]:
        rosters = [await reader.roster(pool) for pool in pools]
        return Counter(r.indexer for roster in rosters for r in roster.values() if r.knowledge == "exact")

    async def held_by(indexer: str) -> int:
        rosters = [await reader.roster(pool) for pool in pools]
        return sum(r.indexer == indexer for roster in rosters for r in roster.values())

    async with running(Indexer(through, indexer_id="one")):
        await eventually(holders, {"one": 40}, 60)
        for engines in pools.values():
            for engine in engines:
                engine.store(1)  # something to hand over
        async with running(Indexer(through, indexer_id="two")):
            await eventually(lambda: held_by("two"), 20, 60)
            late.delay_s = 0.0
            for engines in pools.values():
                for engine in engines:
                    engine.store(2)  # engines that cannot replay are known exactly from their next event on
            await eventually(holders, {"one": 20, "two": 20}, 60)

            async def known() -> bool:
                return all(
                    [
                        (await reader.lookup(pool, chain)).matches.get(engine.record.replica_id) == len(chain)
                        for pool, engines in pools.items()
                        for engine in engines
                        for chain in engine.held
                    ]
                )

            await eventually(known, True, 60)  # what was stored before the hand-over, too
    assert "lost the lease" not in caplog.text
    await reader.close()


async def fences(writer: RedisIndexWriter) -> dict[str, bytes]:
    """Replica -> number of its lease: another one after each change of hands, and after each lapse."""
    held = await writer._hash(writer._layout(POOL).leases)
    return {name.decode(): lease.split(b":")[0] for name, lease in held.items() if not name.startswith(b"@")}
