"""Which replica holds which block: the contract, and Redis and memory behind it.

`open_reader` and `open_writer` choose by `redis_url`; everything else in here is theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .contract import (
    BlockWrite,
    Claim,
    Fenced,
    IndexLookup,
    IndexReader,
    IndexUnavailable,
    IndexWriter,
    ReplicaLoad,
    ReplicaRecord,
)

if TYPE_CHECKING:
    from ..settings import Settings

__all__ = [
    "BlockWrite",
    "Claim",
    "Fenced",
    "IndexLookup",
    "IndexReader",
    "IndexUnavailable",
    "IndexWriter",
    "ReplicaLoad",
    "ReplicaRecord",
    "open_reader",
    "open_writer",
]


def open_reader(settings: Settings, gateway_id: str | None = None) -> IndexReader:
    """A reader for the running event loop. Connects on first use. Raises SettingsError for a bad `redis_url`.

    Pass one `gateway_id` for all readers of a process.
    """
    from .connect import check_url

    if check_url(settings.redis_url) == "memory":
        from .memory import shared_memory_index

        return shared_memory_index(_memory_name(settings)).reader(gateway_id or "gateway")
    from .redis_reader import RedisIndexReader

    return RedisIndexReader(settings, gateway_id)


def open_writer(settings: Settings) -> IndexWriter:
    """A writer for the running event loop. Raises SettingsError for a bad `redis_url`."""
    from .connect import check_url

    if check_url(settings.redis_url) == "memory":
        from .memory import shared_memory_index

        return shared_memory_index(_memory_name(settings)).writer()
    from .redis_writer import RedisIndexWriter

    return RedisIndexWriter(settings)


def _memory_name(settings: Settings) -> str:
    return f"{settings.key_prefix}/{settings.redis_url.partition('://')[2]}"
