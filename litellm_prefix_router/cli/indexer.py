"""`prefix-router indexer`: follow engine events and keep the index in Redis true. Run as many as you like."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer

from .index_options import ConfigOption, KeyPrefixOption, RedisUrlOption, settings_from
from .open_files import allow_many_files


def indexer(
    config: ConfigOption = None,
    redis_url: RedisUrlOption = None,
    key_prefix: KeyPrefixOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name in leases and status; default: host, process and chance.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Follow the replicas that gateways announce, share them with other indexers, drain on SIGTERM."""
    from ..events.indexer import Indexer
    from ..settings import SettingsError

    settings = settings_from(config, redis_url, key_prefix)
    if settings.redis_url.startswith("memory://"):
        raise SettingsError("redis_url: an indexer of its own process needs a Redis, memory:// is of one process")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("litellm_prefix_router").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    allow_many_files()

    async def run() -> None:
        service = Indexer(settings, indexer_id=name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        logging.getLogger("litellm_prefix_router").info("indexer %s started", service.indexer_id)
        await service.run()
        logging.getLogger("litellm_prefix_router").info("indexer %s drained", service.indexer_id)

    asyncio.run(run())
