"""Sends one rank's event batches as the engine does: ZMQ PUB with sequence numbers, and a ROUTER that replays them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import zmq
from zmq.asyncio import Context as AsyncContext
from zmq.asyncio import Socket as AsyncSocket

from .faults import Faults

END_OF_REPLAY = b"\xff" * 8
HIGH_WATER_MARK = 100_000


def engine_binds(endpoint: str) -> bool:
    """The engine's rule: a wildcard or a local transport is bound, any other address is connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def for_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: the port plus the rank."""
    if rank == 0:
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise ValueError(f"several data-parallel ranks need tcp:// endpoints with a port, got {endpoint!r}")
    return f"{head}{colon}{int(port) + rank}"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a socket is: what to hand to ZMQ, and what the engine tells about it."""

    open: str
    told: str

    @classmethod
    def on_port(cls, host: str, port: int) -> Address:
        """A bound port of this host (0: any free one), told in the shape that means `bound`."""
        shown = f"[{host}]" if ":" in host else host
        return cls(f"tcp://{shown}:{port or '*'}", f"tcp://*:{port or '*'}")

    @classmethod
    def of(cls, endpoint: str) -> Address:
        """An endpoint exactly as configured."""
        return cls(endpoint, endpoint)


class Publisher:
    """One rank's sockets. `publish` after `start`; `stop` closes both."""

    def __init__(
        self, address: Address, replay: Address | None, *, topic: str, buffer_steps: int, faults: Faults
    ) -> None:
        self.endpoint = address.told
        self.replay_endpoint = replay.told if replay else None
        self.sequence = 0
        self._address = address
        self._replay = replay
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._faults = faults
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publish: zmq.Socket[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Open the sockets. Raises OSError where an address is taken or makes no sense."""
        try:
            self._open()
        except zmq.ZMQError as error:
            raise OSError(
                error.errno, f"{error} ({self._address.open}, {self._replay and self._replay.open})"
            ) from None

    def _open(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.IPV6, 1)  # for all its sockets
        self._publish = self._context.socket(zmq.PUB)
        self._publish.setsockopt(zmq.LINGER, 0)
        self._publish.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        if engine_binds(self._address.told):
            self._publish.bind(self._address.open)
            self.endpoint = self._with_port(self._publish, self._address)
        else:
            self._publish.connect(self._address.open)
        if self._replay is not None:
            router: AsyncSocket = AsyncContext(self._context).socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            try:
                router.bind(self._replay.open)
            except zmq.ZMQError:
                router.close()  # the context would wait for it for ever
                raise
            self.replay_endpoint = self._with_port(router, self._replay)
            self._task = asyncio.create_task(self._serve_replay(router))

    async def stop(self) -> None:
        """Close the sockets. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._publish = None

    def publish(self, payload: bytes) -> None:
        """Send one batch under the next sequence number."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        if self._faults.use("forget_frames"):
            return
        self._buffer.append((sequence, payload))
        if self._publish is not None and not self._faults.use("drop_frames"):
            self._publish.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def restart(self) -> None:
        """Begin again at 0 with an empty buffer, as a restarted engine does: without a word."""
        self.sequence = 0
        self._buffer.clear()

    async def _serve_replay(self, router: AsyncSocket) -> None:
        try:
            while True:
                parts = await router.recv_multipart()
                if len(parts) != 3 or parts[1] or len(parts[2]) != 8:
                    continue  # the engine ignores what is not [client, empty, 8 bytes]
                await self._faults.thawed()
                client, start = parts[0], int.from_bytes(parts[2], "big")
                for sequence, payload in list(self._buffer):
                    if sequence >= start:
                        number = sequence.to_bytes(8, "big")
                        await router.send_multipart((client, b"", self._topic, number, payload))
                await router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
        finally:
            router.close()

    @staticmethod
    def _with_port(socket: zmq.Socket[bytes] | AsyncSocket, address: Address) -> str:
        if not address.open.endswith(":*"):
            return address.told
        actual = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(actual, bytes)
        return address.told[:-1] + actual.decode().rstrip("\x00").rpartition(":")[2]
