"""Asks replicas for their health and resolves endpoint names: the I/O behind `HealthBook` and `Directory`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import httpx

from ...settings import EnvoySettings
from .directory import Directory
from .health import HealthBook

logger = logging.getLogger("litellm_prefix_router")

_LOOK_S = 0.05


class Prober:
    """Runs on the gateway's event loop. `on_change` is called when the directory's pools have changed."""

    def __init__(
        self, options: EnvoySettings, directory: Directory, health: HealthBook, on_change: Callable[[], object]
    ) -> None:
        self._options = options
        self._directory = directory
        self._health = health
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[str] = set()
        self._resolved: dict[str, list[str]] = {}

    async def start(self) -> None:
        """Resolve names once, then go on in the background."""
        await self.resolve_now()
        for work in (self._probe_forever(), self._resolve_forever()):
            self._keep(asyncio.create_task(work))

    async def stop(self) -> None:
        """End the background work."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe_forever(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=60)
        async with httpx.AsyncClient(timeout=self._options.health_timeout_s, limits=limits, trust_env=False) as client:
            while True:
                addresses = self._directory.addresses()
                self._health.keep(addresses)
                for address in self._health.due():
                    if address not in self._asking and address in addresses:
                        self._asking.add(address)
                        self._keep(asyncio.create_task(self._probe(client, address)))
                await asyncio.sleep(min(_LOOK_S, self._options.health_interval_s))

    async def _probe(self, client: httpx.AsyncClient, address: str) -> None:
        try:
            answer = await client.get(f"{address}{self._options.health_path}")
        except httpx.TimeoutException:
            self._health.unanswered(address)
        except (httpx.HTTPError, httpx.InvalidURL):
            self._health.probed(address, False)
        else:
            self._health.probed(address, answer.status_code < 300)
        finally:
            self._asking.discard(address)

    async def _resolve_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.resolve_interval_s)
            await self.resolve_now()

    async def resolve_now(self) -> None:
        """Look up every name. One that can't be resolved keeps its addresses: a broken DNS must not empty a pool."""
        if not self._directory.names:
            return
        names = sorted(self._directory.names)
        answers = await asyncio.gather(*(resolve(name) for name in names))
        for name, found in zip(names, answers, strict=True):
            if found:
                self._resolved[name] = found
            else:
                logger.warning("endpoint name %s cannot be resolved", name)
        if self._directory.update(self._resolved):
            self._on_change()


async def resolve(name: str) -> list[str]:
    """ip:port of every address of name:port, sorted; empty if it has none."""
    host, _, port = name.rpartition(":")
    found: list[str] = []
    with contextlib.suppress(OSError):
        loop = asyncio.get_running_loop()
        for family, _, _, _, where in await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            found.append(f"[{where[0]}]:{port}" if family == socket.AF_INET6 else f"{where[0]}:{port}")
    return sorted(set(found))
