"""`prefix-router indexer` as a process of its own: paused and fenced, killed and succeeded, drained on SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings
from litellm_prefix_router.sim.replica import SimReplica

from .conftest import eventually
from .test_indexer import POOL, TEXT, ask, chain, fleet, matches, records  # noqa: F401  # fleet is a fixture


def spawn(settings: Settings, name: str) -> subprocess.Popen[str]:
    code = "from litellm_prefix_router.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "indexer", "--redis-url", settings.redis_url, "--key-prefix",
         settings.key_prefix, "--name", name],
        env={"PREFIX_ROUTER_INDEXER_LEASE_S": "0.6", "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def holders(reader: Any) -> set[tuple[str | None, str]]:
    return {(r.indexer, r.knowledge) for r in (await reader.roster(POOL)).values()}


async def test_paused_killed_and_drained(settings: Settings, fleet: list[SimReplica]) -> None:  # noqa: F811
    reader = RedisIndexReader(settings, "gw")
    await reader.announce(POOL, records(fleet), 120)
    for replica in fleet:
        await ask(replica, TEXT)
    first = spawn(settings, "first")
    second = None
    try:
        await eventually(lambda: holders(reader), {("first", "exact")})
        full = len(chain(fleet[0], TEXT, 16))
        await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(4), full))
        first.send_signal(signal.SIGSTOP)
        second = spawn(settings, "second")
        await eventually(lambda: holders(reader), {("second", "exact")})
        await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(4), full))
        other = "news while one is paused " * 40
        await ask(fleet[1], other)
        fleet[0].restart()
        await ask(fleet[0], "another life " * 40)
        await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(1, 4), full))
        first.send_signal(signal.SIGCONT)  # its leases are gone: it may not write into what the other holds
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        # in time, since a lease may lapse on a stalled machine; what the first wrote now would stay
        await eventually(lambda: holders(reader), {("second", "exact")})
        await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(1, 4), full))
        second.kill()
        second.wait()
        third = spawn(settings, "third")
        try:
            await eventually(lambda: holders(reader), {("third", "exact")})
            await eventually(lambda: matches(reader, fleet), dict.fromkeys(range(1, 4), full))
            third.send_signal(signal.SIGTERM)
            assert third.wait(20) == 0
            assert "drained" in third.stderr.read()  # type: ignore[union-attr]
        finally:
            third.kill()
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
    await reader.close()


def test_an_indexer_needs_a_redis_of_its_own() -> None:
    process = subprocess.run(
        [sys.executable, "-c", "from litellm_prefix_router.cli import main; main()", "indexer", "--redis-url",
         "memory://x"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 2 and process.stderr.count("\n") == 1 and "redis_url" in process.stderr
