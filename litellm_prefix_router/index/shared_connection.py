"""One connection to Redis that all decisions of an event loop share.

Requests are written in order and Redis answers in order, so a deque of futures tells whose an answer is; requests of
one turn of the loop travel in one packet. redis-py's asyncio client lends a connection to one caller at a time
instead: under concurrency that takes a connection per decision, runs out of them, and costs 0.2-0.3 ms of CPU a call
against about 0.04 here. redis-py still opens the connection, since it knows TLS, ACLs and Sentinels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, NoScriptError, ReadOnlyError, ResponseError

from .wide_read import WideRead

_MORE = object()
"""The reader's sign that the next answer is not complete yet."""
_OPENING_S = 2.0
"""For a new connection, its greetings included, which redis-py itself would await for ever."""
_ERRORS: dict[str, type[ResponseError]] = {"NOSCRIPT": NoScriptError, "READONLY": ReadOnlyError}


class SharedConnection:
    """Sends commands for a redis.asyncio client; connects on first use and again after a loss."""

    def __init__(self, client: Any) -> None:
        self._client = client
        # a Cluster's client has no pool of its own: it sends each command to the node that it belongs to
        self._pool: Any = getattr(client, "connection_pool", None)
        self._link: _Link | None = None
        self._opening: asyncio.Task[_Link] | None = None

    @property
    def in_order(self) -> bool:
        """Whether commands that overlap are carried out in the order in which they were given."""
        return self._pool is not None

    @property
    def answers(self) -> int:
        """How many answers came on the present connection, those that nobody waits for any more included."""
        return self._link.answers if self._link is not None else 0

    async def execute(self, *command: Any) -> Any:
        """The answer to one command. Raises RedisError or OSError; cancelling it disturbs nobody else."""
        if self._pool is None:
            return await self._client.execute_command(*command)
        link = self._link
        if link is None or link.closed:
            link = await self._open()
        return await link.send(hiredis.pack_command(command))

    async def read(self, request: WideRead) -> list[bytes | None]:
        """As `execute`, for what is encoded already."""
        values: list[bytes | None]
        if self._pool is None:
            values = await self._client.execute_command(*request.command())
        else:
            link = self._link
            if link is None or link.closed:
                link = await self._open()
            values = await link.send(request.packed())
        return values

    def drop(self) -> None:
        """Give the connection up: nobody knows when, or whether, it will answer. The next command opens another."""
        if self._link is not None:
            self._link.abort()
            self._link = None
        if self._opening is not None:
            self._opening.cancel()

    async def close(self) -> None:
        self.drop()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _open(self) -> _Link:
        # one task for all who wait: a caller that gives up must not take the connection from the others
        if self._opening is None or self._opening.done():
            self._opening = asyncio.get_running_loop().create_task(self._connect())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.cancelled() and not (task is not None and task.cancelling()):
                raise RedisConnectionError("Connection given up.") from None
            raise

    async def _connect(self) -> _Link:
        connection = self._pool.make_connection()
        try:
            async with asyncio.timeout(_OPENING_S):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._link = _Link(connection, fails_over=isinstance(self._pool, SentinelConnectionPool))
        return self._link


class _Link(asyncio.Protocol):
    """Takes over the transport of a redis.asyncio connection that is open and has nothing under way."""

    def __init__(self, connection: Any, *, fails_over: bool) -> None:
        self._connection = connection  # kept: it closes its transport when it is collected
        self._fails_over = fails_over
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=_reply_error, notEnoughData=_MORE)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self.answers = 0
        self.closed = False
        self._transport: asyncio.Transport = connection._writer.transport
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            self.closed = True

    def send(self, packed: bytes) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        if self.closed:
            answer.set_exception(RedisConnectionError("Connection closed by server."))
            return answer
        self._waiting.append(answer)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)
        return answer

    def abort(self) -> None:
        self._transport.abort()
        self._lost("Connection given up.")

    # --- called by the event loop ---------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                self._answer(reply)
        except (InvalidResponse, IndexError):  # not Redis, or more answers than questions
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost("Connection closed by server.")

    # --------------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self.closed:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _answer(self, reply: Any) -> None:
        answer = self._waiting.popleft()
        self.answers += 1
        if self._fails_over and isinstance(reply, ReadOnlyError):
            # the primary of before a failover: ask the Sentinels again
            reply = RedisConnectionError("The previous primary is now a read-only replica.")
            self._loop.call_soon(self.abort)
        if answer.done():  # its caller gave up
            return
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _lost(self, why: str) -> None:
        self.closed = True
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(RedisConnectionError(why))


def _reply_error(text: str) -> ResponseError:
    kind, _, rest = text.partition(" ")
    made = _ERRORS.get(kind)
    return ResponseError(text) if made is None else made(rest)
