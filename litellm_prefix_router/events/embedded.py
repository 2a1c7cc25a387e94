"""The indexer inside a gateway process: a daemon thread with its own event loop, so that requests are not slowed."""

from __future__ import annotations

import asyncio
import logging
import threading

from ..settings import Settings

logger = logging.getLogger("litellm_prefix_router.events")


class EmbeddedIndexer:
    """`start` and `stop` from any thread, each harmless when repeated."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()

    def start(self) -> None:
        if self._thread is None:
            self._ready.clear()
            self._thread = threading.Thread(target=self._main, name="prefix-router-indexer", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Drain and end; past `timeout_s` the thread is left to the process's end and its leases lapse."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ready.wait(timeout_s)
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:  # it ended just now
                pass
        thread.join(timeout_s)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:
            logger.exception("the embedded indexer ended")

    async def _run(self) -> None:
        from .indexer import Indexer

        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._ready.set()
        while not self._stop.is_set():
            indexer = Indexer(self._settings)
            work = asyncio.create_task(indexer.run())
            asked = asyncio.create_task(self._stop.wait())
            await asyncio.wait((work, asked), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                indexer.stop()
                await work
                return
            asked.cancel()
            error = work.exception()
            logger.error("the embedded indexer failed and starts again", exc_info=error)
            await asyncio.sleep(1.0)
