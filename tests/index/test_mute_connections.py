"""A connection to Redis that goes mute without a word (a host that is gone, a partition) is given up for a new one,
however busy the event loop is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from litellm_prefix_router.background import BackgroundLoop
from litellm_prefix_router.index.contract import IndexUnavailable
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings


class Proxy:
    """Forwards to a Redis; `mute` decides for each connection (from 0) whether what it sends is swallowed by now."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.connections = 0
        self.mute: Callable[[int], bool] = lambda number: False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        there, here = await asyncio.open_connection("127.0.0.1", self._target)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await asyncio.gather(self._pump(reader, here, number), self._pump(there, writer, number))
        for each in (writer, here):
            each.close()

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, number: int) -> None:
        while data := await source.read(65536):
            if not self.mute(number):
                target.write(data)
        target.close()


@pytest.fixture
def proxy(valkey: Any) -> Iterator[tuple[Proxy, str]]:
    made = Proxy(valkey.port)
    elsewhere = BackgroundLoop("proxy")  # which the tests' own loop does not hold up

    async def listen() -> int:
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    yield made, f"redis://127.0.0.1:{elsewhere.submit(listen()).result()}/1"
    elsewhere.stop()


@contextlib.asynccontextmanager
async def busy(turn_s: float) -> AsyncIterator[None]:
    """An event loop that turns only so often."""

    async def work() -> None:
        while True:
            time.sleep(turn_s)  # noqa: ASYNC251 - the point of it
            await asyncio.sleep(0)

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()


async def answers(reader: RedisIndexReader, count: int) -> None:
    """Until that many lookups in a row were answered."""
    row = 0
    async with asyncio.timeout(30):
        while row < count:
            try:
                await reader.lookup("p", [1, 2, 3])
                row += 1
            except IndexUnavailable:
                row = 0
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("turn_s", [0.0, 0.003, 0.006])
async def test_a_connection_that_goes_mute_is_replaced(turn_s: float, proxy: tuple[Proxy, str]) -> None:
    made, url = proxy
    reader = RedisIndexReader(Settings(redis_url=url, redis_timeout_ms=15, redis_probe_ms=20))
    async with busy(turn_s):
        await answers(reader, 5)
        before = made.connections
        made.mute = lambda number: number < before
        await answers(reader, 20)
        assert made.connections > before
    await reader.close()


async def test_an_opening_that_is_never_answered_is_given_up(proxy: tuple[Proxy, str]) -> None:
    made, url = proxy
    made.mute = lambda number: number == 0
    reader = RedisIndexReader(Settings(redis_url=url, redis_timeout_ms=50, redis_probe_ms=20))
    await answers(reader, 20)
    await reader.close()
