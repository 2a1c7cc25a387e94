"""Both implementations of the index behind one fixture."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from litellm_prefix_router.index.memory import MemoryIndex
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.settings import Settings


@pytest.fixture
def settings(valkey: Any) -> Settings:
    """Settings on the shared server under a prefix of their own; a generous timeout, since tests share two cores."""
    return Settings(redis_url=valkey.connection_url, key_prefix=f"t-{uuid.uuid4().hex[:8]}", redis_timeout_ms=2000)


@dataclass
class Index:
    reader: Callable[..., Any]
    writer: Callable[[], Any]
    kind: str


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest, settings: Settings) -> Any:
    made: list[Any] = []

    def keep(thing: Any) -> Any:
        made.append(thing)
        return thing

    if request.param == "memory":
        memory = MemoryIndex()
        yield Index(lambda gateway="a": keep(memory.reader(gateway)), lambda: keep(memory.writer()), "memory")
    else:
        yield Index(
            lambda gateway="a": keep(RedisIndexReader(settings, gateway)),
            lambda: keep(RedisIndexWriter(settings)),
            "redis",
        )
    for thing in made:
        await thing.close()
