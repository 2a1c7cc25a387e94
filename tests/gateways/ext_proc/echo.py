"""A backend that tells exactly what it received, and streams events when asked; raw asyncio, to be quick."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class Echo:
    """One backend. GET /health; /stream?n=&gap_ms= sends n events, usage and [DONE]; all else echoes."""

    def __init__(self) -> None:
        self.healthy = True
        self.status = 200
        self.requests = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """As a killed process: refuse connections, reset the open ones."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                    method, target, _ = head[0].split(" ")
                    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
                    body = await self._body(reader, headers)
                    await self._answer(writer, method, target, headers, body)
        finally:
            self._open.discard(writer)
            writer.close()

    @staticmethod
    async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            pieces = []
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                pieces.append(await reader.readexactly(size))
                await reader.readexactly(2)
            await reader.readuntil(b"\r\n")
            return b"".join(pieces)
        return await reader.readexactly(int(headers.get("content-length", "0")))

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        url = urlsplit(target)
        if url.path == "/health":
            status = "200 OK" if self.healthy else "503 Service Unavailable"
            writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode())
            return
        self.requests += method == "POST"  # the processor asks with GET what a replica is
        if url.path == "/stream":
            await self._stream(writer, dict(parse_qsl(url.query)))
            return
        answer: dict[str, Any] = {
            "endpoint": self.endpoint,
            "method": method,
            "target": target,
            "headers": headers,
            "length": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
            "body": body.decode("utf-8", "replace") if len(body) < 10_000 else None,
        }
        raw = json.dumps(answer).encode()
        reason = "OK" if self.status == 200 else "Failed"
        head = f"HTTP/1.1 {self.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n"
        writer.write(f"{head}\r\n".encode() + raw)
        await writer.drain()

    @staticmethod
    async def _stream(writer: asyncio.StreamWriter, options: dict[str, str]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        usage = {"choices": [], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 48}}}
        events = [json.dumps({"n": i}) for i in range(int(options["n"]))] + [json.dumps(usage), "[DONE]"]
        for event in events:
            data = f"data: {event}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(float(options.get("gap_ms", "0")) / 1e3)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
