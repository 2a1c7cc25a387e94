from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from litellm_prefix_router.settings import Settings

from .engines import WireEngine

StartEngine = Callable[..., WireEngine]


@pytest.fixture
def settings(valkey: Any) -> Settings:
    return Settings(
        redis_url=valkey.connection_url,
        key_prefix=f"t-{uuid.uuid4().hex[:8]}",
        redis_timeout_ms=2000,
        indexer_lease_s=0.6,
        replay_timeout_s=2.0,
    )


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Makes engines with the arguments of `WireEngine`, and stops them however the test ends."""
    engines: list[WireEngine] = []

    def start(*args: Any, **kwargs: Any) -> WireEngine:
        engines.append(WireEngine(*args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


async def eventually(check: Callable[[], Awaitable[Any]], want: Any, within_s: float = 20.0) -> None:
    """Wait until `check()` answers `want`; fails with the last answer."""
    deadline = time.monotonic() + within_s
    while (got := await check()) != want:
        if time.monotonic() > deadline:
            raise AssertionError(f"still {got!r}, wanted {want!r}")
        await asyncio.sleep(0.02)
