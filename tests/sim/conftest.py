"""A running replica and a client for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from litellm_prefix_router.sim import SimConfig, SimReplica
from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.tokenizer import SimTokenizer

FAST = {"prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 5e3}


@pytest.fixture(scope="session")
def tokenizer() -> SimTokenizer:
    return SimTokenizer(TINY_MODEL)


@pytest.fixture
async def replica(tokenizer: SimTokenizer) -> AsyncIterator[SimReplica]:
    config = SimConfig(num_blocks=256, lora_modules={"adapter": "/adapters/one"}, topic="kv", **FAST)
    async with SimReplica(config, tokenizer=tokenizer) as running:
        yield running


@pytest.fixture
async def client(replica: SimReplica) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=replica.base_url, timeout=10) as session:
        yield session


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for a condition on this event loop."""
    import asyncio

    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)
