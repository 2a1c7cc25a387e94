"""`prefix-router indexer`: follow engine events and keep the index in Redis true. Run as many as you like."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer


def indexer(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the settings, or a LiteLLM config with a prefix_router section.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Where the index is; overrides the settings.")] = None,
    key_prefix: Annotated[str | None, typer.Option(help="First part of every key; overrides the settings.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name in leases and status; default: host, process and chance.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Follow the replicas that gateways announce, share them with other indexers, drain on SIGTERM."""
    from ..events.indexer import Indexer
    from ..settings import SettingsError, load_settings, load_settings_file

    settings = load_settings_file(config) if config else load_settings()
    changes = {k: v for k, v in {"redis_url": redis_url, "key_prefix": key_prefix}.items() if v is not None}
    settings = settings.model_copy(update=changes)
    if settings.redis_url.startswith("memory://"):
        raise SettingsError("redis_url: an indexer of its own process needs a Redis, memory:// is of one process")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    logging.getLogger("litellm_prefix_router").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    async def run() -> None:
        service = Indexer(settings, indexer_id=name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, service.stop)
        logging.getLogger("litellm_prefix_router").info("indexer %s started", service.indexer_id)
        await service.run()
        logging.getLogger("litellm_prefix_router").info("indexer %s drained", service.indexer_id)

    asyncio.run(run())
