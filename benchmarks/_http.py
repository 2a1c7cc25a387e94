"""A backend and a client that cost little, so that what is measured is what stands between them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

ANSWER = (
    b'{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}'
)
RESPONSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + str(len(ANSWER)).encode() + b"\r\n\r\n"
) + ANSWER


class Backend(asyncio.Protocol):
    """HTTP/1.1 with content-length: answers each request with RESPONSE."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = bytearray()
        self._wanted = -1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            if self._wanted < 0:
                end = self._buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self._buffer[:end]).lower()
                at = head.find(b"content-length: ")
                length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                self._wanted = end + 4 + length
            if len(self._buffer) < self._wanted:
                return
            del self._buffer[: self._wanted]
            self._wanted = -1
            self._transport.write(RESPONSE)


async def serve(ports: list[int]) -> None:
    """Backends on these ports, until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(Backend, "127.0.0.1", port)
    await asyncio.Event().wait()


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def post(self, body: bytes) -> tuple[float, bytes]:
        """(seconds, response head) of one chat completion. Raises RuntimeError unless it is answered with 200."""
        started = time.perf_counter()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self._writer.write(head + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"answered {answer[:60]!r}")
        if b"transfer-encoding: chunked" in answer:  # a body that the processor may look at has no length
            while size := int(await self._reader.readuntil(b"\r\n"), 16):
                await self._reader.readexactly(size + 2)
            await self._reader.readexactly(2)
        else:
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n", 1)[0])
            await self._reader.readexactly(length)
        return time.perf_counter() - started, answer

    def close(self) -> None:
        self._writer.close()


async def closed_loop(
    port: int, clients: int, count: int, body: Callable[[int], bytes]
) -> tuple[list[float], float, bytes]:
    """`count` requests by `clients` that each wait for their answer: (latencies in s, wall time in s, a head)."""
    numbers = iter(range(count))
    latencies: list[float] = []
    last = b""

    async def work() -> None:
        nonlocal last
        client = await Client(port).open()
        for number in numbers:
            seconds, last = await client.post(body(number))
            latencies.append(seconds)
        client.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    return latencies, time.perf_counter() - started, last


if __name__ == "__main__":
    asyncio.run(serve([int(port) for port in sys.argv[1:]]))
