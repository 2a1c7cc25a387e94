"""Calls to Redis with a bound on time and a circuit breaker; every failure leaves as IndexUnavailable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from ..patience import PatientTimeout
from .breaker import CircuitBreaker
from .contract import IndexUnavailable
from .scripts import run_script
from .shared_connection import SharedConnection
from .wide_read import WideRead

_STALL = 2.0
"""A timeout that was noticed later than this multiple of the bound is the event loop's fault, not Redis's."""


class RedisGuard:
    """Drives a CircuitBreaker around a client. Bound to one event loop, as the client is."""

    def __init__(self, client: Any, timeout_s: float, probe_s: float, clock: Callable[[], float] = time.monotonic):
        self._client = client
        self._connection = SharedConnection(client)
        self.breaker = CircuitBreaker(probe_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self._probe: asyncio.Task[None] | None = None
        self._late_since: float | None = None
        """When an answer did not come in time, and none has come since."""

    async def execute(self, *command: Any) -> Any:
        """The answer to a command within the bound. Raises IndexUnavailable; at once while the breaker is open."""
        return await self._bounded(self._connection.execute, *command)

    @property
    def in_order(self) -> bool:
        """Whether calls that overlap are carried out in the order in which they were made."""
        return self._connection.in_order

    async def read(self, request: WideRead) -> list[bytes | None]:
        """The answer to a wide read, as `execute`."""
        values: list[bytes | None] = await self._bounded(self._connection.read, request)
        return values

    async def run_script(self, script: str, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """The answer of one of our scripts, as `execute`."""
        return await self._bounded(run_script, self._connection.execute, script, keys, args)

    async def _bounded(self, call: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        if not self.breaker.allows:
            if self.breaker.probe_due(self._clock()):
                self._probe = asyncio.get_running_loop().create_task(self._probe_once())
            raise IndexUnavailable(f"Redis not reachable ({self.breaker.reason}); waiting for it to answer")
        began, heard = self._clock(), self._connection.answers
        try:
            async with PatientTimeout(self._timeout_s):
                answer = await call(*arguments)
            self._late_since = None
            return answer
        except TimeoutError:
            # a busy loop reads late, but it reads: nothing at all is the connection's fault, however slow the loop
            if heard == self._connection.answers or self._clock() - began < self._timeout_s * _STALL:
                self._late(began)
            raise IndexUnavailable(f"Redis did not answer within {self._timeout_s * 1000:.0f} ms") from None
        except ResponseError as error:  # it does answer (out of memory, no permission): the next call may well succeed
            raise IndexUnavailable(f"Redis: {describe(error)}") from error
        except (RedisError, RedisClusterException, OSError) as error:
            reason = describe(error)
            self._failed(reason)
            raise IndexUnavailable(f"Redis: {reason}") from error

    def _late(self, began: float) -> None:
        """One late answer may be a crowded machine's fault, and to shut Redis out would cost many decisions more; a
        call that began after it and is late, too, tells."""
        if self._late_since is None:
            self._late_since = self._clock()
        elif began >= self._late_since:
            self._failed("timeout")

    def _failed(self, reason: str) -> None:
        self._late_since = None
        self.breaker.failed(self._clock(), reason)
        self._connection.drop()

    async def _probe_once(self) -> None:
        try:
            async with PatientTimeout(self._timeout_s):
                await self._client.ping()
        except (TimeoutError, RedisError, RedisClusterException, OSError) as error:
            self.breaker.failed(self._clock(), describe(error))
        except BaseException:
            self.breaker.failed(self._clock(), "probe cancelled")
            raise
        else:
            self.breaker.succeeded()

    async def close(self) -> None:
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._connection.close()
        await self._client.aclose()


def describe(error: BaseException) -> str:
    """One short line for a log or a receipt."""
    if isinstance(error, TimeoutError) or type(error).__name__ == "TimeoutError":
        return "timeout"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
