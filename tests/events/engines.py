"""Engines as the wire shows them: numbered frames from a PUB socket and a ROUTER that replays them, no model behind."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from litellm_prefix_router.index import ReplicaRecord
from litellm_prefix_router.prompt.blocks import as_token_ids, chain_hashes, root_hash

SIZE = 4
Framing = Literal["topic", "bare"]
"""Of replayed frames: with the topic in front (vLLM from 0.26 on, SGLang) or without it (before)."""


class WireEngine:
    """One rank that stores chains. `held` is what an index of `pool` should know of it, chain by chain."""

    def __init__(
        self,
        pool: str,
        *,
        endpoint: str = "tcp://127.0.0.1:*",
        topic: bytes = b"",
        framing: Framing | None = "topic",
        hwm: int = 100_000,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """`framing` None: it cannot replay. `hwm`: frames that wait for a slow reader before they are lost."""
        self.held: list[list[int]] = []
        self.asked: list[int] = []
        """Where replays were to start."""
        self._pool = pool
        self._topic = topic
        self._framing = framing
        self._frames: deque[tuple[int, bytes]] = deque()
        self._sequence = 0
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, hwm)
        self._pub.bind(endpoint)
        self._task: asyncio.Task[None] | None = None
        self._router: zmq.asyncio.Socket | None = None
        replay = None
        if framing is not None:
            self._router = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.bind("tcp://127.0.0.1:*")
            replay = _endpoint(self._router)
            self._task = asyncio.create_task(self._serve_replay(self._router))
        events = _endpoint(self._pub)
        # nothing answers at the API's address: what is configured has to do
        self.record = ReplicaRecord(f"http://127.0.0.1:9/{events}", "http://127.0.0.1:9", events=events, replay=replay)

    def store(self, seed: int, blocks: int = 3, *, lost: bool = False) -> None:
        """A prompt that nothing else shares is computed; `lost`: its frame never reaches a reader."""
        ids = [(seed * 7919 + at * 31) % 50_000 for at in range(blocks * SIZE - 1)] + [seed]
        chain = chain_hashes(as_token_ids(ids), SIZE, root_hash(self._pool))
        event = {
            "type": "BlockStored", "block_hashes": [(block + 1) % 2**64 for block in chain], "parent_block_hash": None,
            "token_ids": ids, "block_size": SIZE, "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        sequence, payload = self._sequence, msgspec.msgpack.encode([float(self._sequence), [event], 0])
        self._sequence += 1
        self.held.append(chain)
        if self._framing is not None:
            self._frames.append((sequence, payload))
        if not lost:
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def stop(self) -> None:
        """Close every socket: a context that is collected with one open waits for it without end."""
        if self._task is not None:
            self._task.cancel()
        if self._router is not None:
            self._router.close(linger=0)
        self._pub.close(linger=0)
        if self._own_context:
            self._context.term()

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        front = (self._topic,) if self._framing == "topic" else ()
        end_front = (b"",) if self._framing == "topic" else ()
        while True:
            client, _, start = await router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for sequence, payload in list(self._frames):
                if sequence >= self.asked[-1]:
                    await router.send_multipart((client, b"", *front, sequence.to_bytes(8, "big"), payload))
            await router.send_multipart((client, b"", *end_front, b"\xff" * 8, b""))


def _endpoint(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> str:
    raw = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(raw, bytes)
    return raw.rstrip(b"\x00").decode()
