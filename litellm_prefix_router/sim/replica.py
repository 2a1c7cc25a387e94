"""A simulated replica that serves: `async with SimReplica(SimConfig(...)) as replica: replica.base_url`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import uvicorn

from .api import Api
from .config import SimConfig
from .faults import Faults
from .rank import Rank
from .tokenizer import SimTokenizer


class _Server(uvicorn.Server):  # type: ignore[misc]  # untyped here
    """A server inside someone else's event loop: signals are the caller's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class SimReplica:
    """One replica on the running event loop: its HTTP port and, for each rank, its event sockets.

    Several replicas in one process may share a `tokenizer`. `faults` can be set while it runs.
    """

    def __init__(self, config: SimConfig | None = None, *, tokenizer: SimTokenizer | None = None) -> None:
        self.config = config or SimConfig()
        self.faults = Faults()
        self.tokenizer = tokenizer or SimTokenizer(self.config.model_folder)
        self.ranks = [Rank(self.config, number, self.faults) for number in range(self.config.data_parallel_size)]
        self._api = Api(self.config, self.tokenizer, self.ranks, self.faults)
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self.port = self.config.port

    @property
    def base_url(self) -> str:
        """Address of the HTTP API, without a path."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    @property
    def event_endpoints(self) -> list[str]:
        """Address a subscriber connects to, one a rank (or has to bind, where the engine connects)."""
        return [self._reachable(rank.publisher.endpoint) for rank in self.ranks if rank.publisher]

    @property
    def replay_endpoints(self) -> list[str]:
        """Address of the replay socket, one a rank that has one."""
        endpoints = [rank.publisher.replay_endpoint for rank in self.ranks if rank.publisher]
        return [self._reachable(endpoint) for endpoint in endpoints if endpoint]

    def prompt_ids(self, body: Mapping[str, Any]) -> Sequence[int]:
        """Prompt tokens of a chat body, as this replica prefills it."""
        return self.tokenizer.chat(body)

    def restart(self) -> None:
        """Another life, on the same ports: empty cache, sequence numbers from 0, running requests fail."""
        self._api.restart()

    async def start(self) -> None:
        """Serve. Raises OSError where an address is taken."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.config.host, self.config.port))
        except OSError:
            listener.close()
            raise
        self._socket = listener
        self.port = listener.getsockname()[1]
        try:
            for rank in self.ranks:
                rank.start()
        except BaseException:
            await self.stop()
            raise
        config = uvicorn.Config(
            self._api.app(), log_level="critical", access_log=False, lifespan="off", backlog=2048,
            timeout_graceful_shutdown=1, timeout_keep_alive=75,
        )  # fmt: skip
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        """Stop serving: running requests end, sockets close. Safe to call twice."""
        for rank in self.ranks:
            await rank.stop()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def wait(self) -> None:
        """Until the server has ended by itself."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def __aenter__(self) -> SimReplica:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self.stop()

    def _reachable(self, endpoint: str) -> str:
        return endpoint.replace("*", self.config.host)
