"""Sends placements to Redis behind the decisions: one script call at a time, each with what came up during the last.

A gateway that decides a thousand times a second thus makes a few hundred calls, and never waits for one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from .contract import IndexUnavailable
from .redis_guard import RedisGuard
from .scripts import PLACE

_REPLICAS_PER_KEY = 16
"""Most replicas that one placement key remembers (8 bytes each)."""
_BATCH = 16
"""Placements of one call. A script keeps Redis from serving others: a placement takes it 0.02-0.1 ms."""
_WAITING = 1024
"""Placements that may wait; beyond it the oldest are forgotten, as they would soon lapse anyway."""


class PlacementSender:
    """Belongs to the event loop that first uses it. Failures are left to the next lookup to report, which meets them
    too."""

    def __init__(self, guard: RedisGuard) -> None:
        self._guard = guard
        self._waiting: deque[tuple[bytes, tuple[Any, ...]]] = deque(maxlen=_WAITING)
        self._sending: asyncio.Task[None] | None = None
        self._failure: IndexUnavailable | None = None

    def add(self, base: bytes, tag: bytes, ttl_s: int, hashes: bytes) -> None:
        """`base`: what the pool's placement keys begin with; `hashes`: packed blocks at canonical positions."""
        self._waiting.append((base, (tag, ttl_s, hashes)))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def sent(self) -> None:
        """Wait until nothing waits. Raises IndexUnavailable if something could not be sent since the last call."""
        if self._sending is not None:
            await asyncio.shield(self._sending)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Give up what still waits."""
        self._waiting.clear()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    async def _send(self) -> None:
        while self._waiting:
            base = self._waiting[0][0]
            args: list[Any] = [_REPLICAS_PER_KEY]
            for _ in range(_BATCH):
                if not self._waiting or self._waiting[0][0] != base:
                    break
                args += self._waiting.popleft()[1]
            try:
                await self._guard.run_script(PLACE, [base], args)
            except IndexUnavailable as unavailable:
                self._failure = unavailable
