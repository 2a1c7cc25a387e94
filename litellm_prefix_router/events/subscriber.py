"""ZMQ under an asyncio loop: live streams and replays as callbacks. Knows frames, not what is in them.

`zmq.asyncio` costs a task switch per message; here the loop watches the socket's descriptor and a callback takes what
is there. The descriptor is edge-triggered, so it is read until ZMQ says that nothing is left. A slow reader costs a gap
at the high-water mark, never memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from .addresses import StreamAddress

logger = logging.getLogger("litellm_prefix_router.events")

OnFrame = Callable[[int, bytes], None]
_HIGH_WATER_MARK = 4096
"""Frames of one stream that may wait to be read, some 4 KB each. The engine keeps more (vLLM: 100,000), and a gap costs
a replay. Fewer than the tracker's remembered digests, so that what a replay overtook is known."""
_BURST = 64
"""Messages taken in one go before other callbacks get their turn."""
_BUSY_S = 0.002
_END = b"\xff" * 8


class _Drained:
    """A socket read by callback. While `busy` says so, what arrives waits in ZMQ, up to its high-water mark."""

    def __init__(
        self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None], busy: Callable[[], bool] = bool
    ) -> None:
        self._socket = socket
        self._busy = busy
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._handle: asyncio.Handle | None = None
        self._look_at = 0.0
        self._loop.add_reader(self._fd, self._drain)
        self._handle = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._socket.closed:
            return
        if self._busy():
            if self._handle is None or self._handle.cancelled() or self._loop.time() >= self._look_at:
                self._look_at = self._loop.time() + _BUSY_S
                self._handle = self._loop.call_at(self._look_at, self._drain)
            return
        for _ in range(_BURST):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
            if self._socket.closed:
                return
        self._handle = self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            if self._handle is not None:
                self._handle.cancel()
            self._socket.close(linger=0)


class Subscription:
    """One listener of a stream. `on_reconnect` is called when its connection was lost and is back."""

    def __init__(
        self, hub: SubscriberHub, key: tuple[str, bool], topic: bytes | None, on_frame: OnFrame,
        on_connection: Callable[[bool], None],
    ) -> None:  # fmt: skip
        self._hub = hub
        self.key = key
        self.topic = topic
        self.on_frame = on_frame
        self.on_connection = on_connection

    def close(self) -> None:
        self._hub._leave(self)


class _Stream:
    """One SUB socket and its listeners: several where engines connect to one endpoint of ours, told apart by topic."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, bind: bool, hub: SubscriberHub) -> None:
        self.listeners: list[Subscription] = []
        try:
            socket = context.socket(zmq.SUB)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{endpoint}: {error}") from None
        try:
            monitor = _configure(socket, endpoint, hub.hwm)
            if bind:
                _bind(socket, endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close(linger=0)
            raise OSError(error.errno, f"{endpoint}: {error}") from None
        self._socket = socket
        self._connections = 0
        self._frames = _Drained(socket, self._frame, hub.busy)
        self._events = _Drained(monitor, self._event)

    def _frame(self, parts: list[bytes]) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            return
        for listener in tuple(self.listeners):
            if listener.topic is None or listener.topic == parts[0]:
                listener.on_frame(int.from_bytes(parts[1], "big"), parts[2])

    def _event(self, parts: list[bytes]) -> None:
        up = parse_monitor_message(parts)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._connections = max(0, self._connections + (1 if up else -1))
        for listener in tuple(self.listeners):
            listener.on_connection(up)
            if not up and self._connections:
                listener.on_connection(True)

    def add(self, listener: Subscription) -> None:
        self.listeners.append(listener)
        if self._connections:
            asyncio.get_running_loop().call_soon(listener.on_connection, True)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
        self._events.close()
        self._frames.close()


class SubscriberHub:
    """All sockets of one event loop; while `busy()`, nothing is read. ZMQ's own threads are shared (one is plenty)."""

    def __init__(self, hwm: int = _HIGH_WATER_MARK, busy: Callable[[], bool] = bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._streams: dict[tuple[str, bool], _Stream] = {}
        self.hwm = hwm
        self.busy = busy

    def subscribe(
        self, address: StreamAddress, on_frame: OnFrame, on_connection: Callable[[bool], None]
    ) -> Subscription:
        """Listen. Raises OSError for an endpoint that cannot be used, or that cannot be told from another's."""
        key = (address.endpoint, address.bind)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream(self._context, address.endpoint, address.bind, self)
        elif address.bind and any(other.topic in (None, address.topic) for other in stream.listeners):
            raise OSError(f"several engines send to {address.endpoint} under one topic: give each its own")
        subscription = Subscription(self, key, address.topic, on_frame, on_connection)
        stream.add(subscription)
        return subscription

    def replay(
        self, endpoint: str, start: int, on_frame: OnFrame, on_end: Callable[[str | None], None], silence_s: float
    ) -> Replay:
        """Ask for frames from `start` on; `on_end(None)` after the last, or with what went wrong."""
        return Replay(self._context, endpoint, start, on_frame, on_end, silence_s, self.busy)

    def _leave(self, subscription: Subscription) -> None:
        stream = self._streams.get(subscription.key)
        if stream is None or subscription not in stream.listeners:
            return
        stream.listeners.remove(subscription)
        _, bound = subscription.key
        if bound:  # its port is not free at once: whoever subscribes again in the same breath takes up this socket
            asyncio.get_running_loop().call_soon(self._close_unused, subscription.key)
        else:
            self._close_unused(subscription.key)

    def _close_unused(self, key: tuple[str, bool]) -> None:
        stream = self._streams.get(key)
        if stream is not None and not stream.listeners:
            del self._streams[key]
            stream.close()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._context.destroy(linger=0)


class Replay:
    """One replay under way. Both framings: with a topic part (vLLM >= 0.26, SGLang) and without."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int, on_frame: OnFrame,
        on_end: Callable[[str | None], None], silence_s: float, busy: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._on_frame = on_frame
        self._on_end = on_end
        self._silence_s = silence_s
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._done = False
        self._heard = self._loop.time()
        self._drained: _Drained | None = None
        try:
            self._drained = _Drained(self._ask(context, endpoint, start), self._take, busy)
        except zmq.ZMQError as error:  # no file descriptor left, an endpoint that makes no sense
            self._timer = self._loop.call_later(0.0, self._finish, f"{endpoint}: {error}")
        else:
            self._timer = self._loop.call_later(silence_s, self._check)

    @staticmethod
    def _ask(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, start: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, 0)  # what was asked for is wanted, all of it
            socket.connect(endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _take(self, parts: list[bytes]) -> None:
        self._heard = self._loop.time()
        if len(parts) < 3 or self._done:
            return
        seq, payload = parts[-2], parts[-1]
        if seq == _END:
            self._finish(None)
        elif len(seq) == 8:
            self._on_frame(int.from_bytes(seq, "big"), payload)

    def _check(self) -> None:
        rest = self._heard + self._silence_s - self._loop.time()
        if self._busy():  # it is us who does not listen
            self._heard = self._loop.time()
            rest = self._silence_s
        if rest > 0:
            self._timer = self._loop.call_later(rest, self._check)
        else:
            self._finish(f"no answer for {self._silence_s:.0f} s")

    def _finish(self, problem: str | None) -> None:
        if not self._done:
            self.cancel()
            self._on_end(problem)

    def cancel(self) -> None:
        """Stop without a further call."""
        self._done = True
        self._timer.cancel()
        if self._drained is not None:
            self._drained.close()


def _configure(socket: zmq.Socket[bytes], endpoint: str, hwm: int) -> zmq.Socket[bytes]:
    """Prepare a socket for a stream; the socket that tells of its connections."""
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if endpoint.startswith("tcp://"):  # a host that vanishes without a word
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        # the engine knows us by a name or an address that is not one of this host's interfaces (NAT, a Service)
        port = endpoint.rpartition(":")[2]
        if error.errno == zmq.EADDRINUSE or not endpoint.startswith("tcp://") or not port.isdigit():
            raise
        socket.bind(f"tcp://*:{port}")
