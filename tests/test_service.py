"""What a gateway's core does around the router: here, when it may begin to serve."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from litellm_prefix_router.fleet.pool import Pool, Replica
from litellm_prefix_router.service import RouterService
from litellm_prefix_router.settings import Settings


class Loading:
    """An encoder whose tokenizer is being loaded, for as long as the test wants."""

    state = "loading"


@contextmanager
def service(encoder: Any, **settings: Any) -> Iterator[RouterService]:
    """A running core whose only replica is not there, and whose pool has this encoder as soon as that is known."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        running = RouterService(Settings(redis_url="memory://warm", embedded_indexer=False, **settings))
        running.encoders.equip = lambda pool: setattr(pool, "encoder", encoder)  # type: ignore[method-assign]
        running.set_pools({"chat": Pool("chat", {address: Replica(address, address, "tiny")})})
        running.start()
        try:
            yield running
        finally:
            running.stop()


async def test_a_gateway_is_warm_when_its_tokenizers_are() -> None:
    encoder = Loading()
    with service(encoder, startup_wait_s=60) as running:
        warm = asyncio.create_task(running.warm_up())
        while not running._asked:
            await asyncio.sleep(0.01)
        assert running.warming
        assert not warm.done()
        encoder.state = "ready"
        await asyncio.wait_for(warm, 10)
        assert not running.warming


def test_an_event_loop_that_ended_leaves_no_connection_behind(valkey: Any) -> None:
    service = RouterService(Settings(redis_url=valkey.connection_url, embedded_indexer=False, redis_timeout_ms=5000))
    before = len(valkey.client().client_list())
    for _ in range(8):  # as a script does that calls asyncio.run for each of its jobs
        loop = asyncio.new_event_loop()
        loop.run_until_complete(service_roster(service))
        loop.close()
    gc.collect()
    assert len(service._readers) == 1
    assert len(valkey.client().client_list()) <= before + 2


async def service_roster(service: RouterService) -> None:
    await service._reader().roster("m")


@pytest.mark.parametrize("encoder", [None, Loading()])
async def test_neither_absent_replicas_nor_an_endless_load_keep_it_from_serving(encoder: Any) -> None:
    with service(encoder, startup_wait_s=60 if encoder is None else 0.2) as running:
        await asyncio.wait_for(running.warm_up(), 10)
