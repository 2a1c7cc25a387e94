"""One data-parallel rank at work: drives an Engine in real time, hands out its tokens and publishes its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from .block_cache import BlockCache
from .config import SimConfig
from .engine import Engine, Request
from .faults import Faults
from .hashing import BlockHasher
from .publisher import Address, Publisher, for_rank
from .wire import encode_batch

# A step that begins late because the event loop was busy is shortened by at most this, so that pace is kept.
MAX_CATCH_UP_S = 0.05


class EngineDied(Exception):
    """The engine went away under a running request."""


class Rank:
    """Runs from `start` to `stop` on the current event loop."""

    def __init__(self, config: SimConfig, number: int, faults: Faults) -> None:
        self.number = number
        self.started_at = time.time()
        self._config = config
        self._faults = faults
        self._wake = asyncio.Event()
        self._queues: dict[Request, asyncio.Queue[int | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.engine = self._new_engine()
        self.publisher = self._new_publisher() if config.events else None

    def start(self) -> None:
        """Open the sockets and begin to work."""
        if self.publisher is not None:
            self.publisher.start()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop at once; running requests end with EngineDied."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all()
        if self.publisher is not None:
            await self.publisher.stop()

    def restart(self) -> None:
        """Another life: the cache is empty, sequence numbers begin at 0, running requests fail, nothing says so."""
        self.engine = self._new_engine()
        self._fail_all()
        if self.publisher is not None:
            self.publisher.restart()
        self.started_at = time.time()
        self._wake.set()

    @property
    def load(self) -> tuple[int, int]:
        """(waiting requests, running requests)."""
        return len(self.engine.waiting), len(self.engine.running)

    def submit(self, request: Request) -> AsyncIterator[int]:
        """Queue a request; iterate over its tokens as they are sampled. Closing the iterator aborts the request.

        Raises ValueError if it can never fit; the iterator raises EngineDied.
        """
        engine = self.engine
        engine.add(request)
        queue = self._queues[request] = asyncio.Queue()
        self._wake.set()
        return self._tokens(engine, request, queue)

    def abort(self, request: Request) -> None:
        """End a request early. Safe at any time."""
        self.engine.abort(request)
        self._queues.pop(request, None)

    async def _tokens(
        self, engine: Engine, request: Request, queue: asyncio.Queue[int | None]
    ) -> AsyncIterator[int]:  # fmt: skip
        try:
            for _ in range(len(request.answer)):
                token = await queue.get()
                if token is None:
                    raise EngineDied("the engine is gone")
                yield token
        finally:
            engine.abort(request)
            self._queues.pop(request, None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if self.engine.idle:
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
            await self._faults.thawed()
            engine = self.engine
            step = engine.plan()
            if not step.work:
                # Nothing fits although nothing runs cannot be (add refuses it); do not spin should it ever be.
                self._wake.clear()
                await self._wake.wait()
                continue
            seconds = step.prefill_tokens / self._config.prefill_tokens_per_s
            if step.decodes:
                # One pass does both: the longer of the two is what it takes.
                seconds = max(seconds, 1.0 / self._config.decode_tokens_per_s)
            due = max(due, loop.time() - MAX_CATCH_UP_S) + seconds * self._faults.slow_factor
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self._faults.thawed()
            if engine is not self.engine:
                continue  # restarted meanwhile
            tokens = engine.complete(step)
            events = engine.take_events()
            if events and self.publisher is not None:
                self.publisher.publish(encode_batch(time.time(), events, self.number))
            for request, token in tokens:
                queue = self._queues.get(request)
                if queue is not None:
                    queue.put_nowait(token)

    def _fail_all(self) -> None:
        for queue in self._queues.values():
            queue.put_nowait(None)
        self._queues.clear()

    def _new_engine(self) -> Engine:
        config = self._config
        cache = BlockCache(
            config.num_blocks, config.block_size, integer_hashes=config.integer_hashes, events=config.events
        )
        return Engine(
            cache,
            BlockHasher(config.hash_algorithm, config.hash_seed),
            max_batched_tokens=config.max_batched_tokens,
            max_requests=config.max_requests,
        )

    def _new_publisher(self) -> Publisher:
        config, rank = self._config, self.number
        if config.events_endpoint is not None:
            address = Address.of(for_rank(config.events_endpoint, rank))
        else:
            address = Address.on_port(config.host, config.events_port and config.events_port + rank)
        replay: Address | None = None
        if config.replay_endpoint is not None:
            replay = Address.of(for_rank(config.replay_endpoint, rank))
        elif config.replay_port is not None:
            replay = Address.on_port(config.host, config.replay_port and config.replay_port + rank)
        return Publisher(
            address, replay, topic=config.topic, buffer_steps=config.buffer_steps, faults=self._faults
        )  # fmt: skip
