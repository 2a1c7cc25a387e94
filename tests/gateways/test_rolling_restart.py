"""A rolling restart under load: two LiteLLM gateways and two indexers over four replicas, each restarted twice.

The test plays the load balancer as well as the clients: a gateway is taken out of rotation before it is told to end,
and comes back in when it says that it is ready. Each step waits for what it needs, so a slow machine only sends less.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import httpx
import pytest
import yaml

from litellm_prefix_router.demo.processes import Processes, consecutive_ports, free_ports
from litellm_prefix_router.demo.stack import BLOCK_SIZE, MODEL, Stack, _command, proxy_config
from litellm_prefix_router.demo.traffic import RequestFailed, Seen, ask
from litellm_prefix_router.index import open_reader
from litellm_prefix_router.settings import load_settings_file
from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.words import prose

from .conftest import until

pytestmark = pytest.mark.slow

REPLICAS, CLIENTS, TURNS = 4, 8, 5
THINK_S = (0.8, 1.8)
"""Between an answer and the client's next turn: 8 clients send about 5 requests a second."""
INEXACT_SHARE, WRONG_SHARE = 0.006, 0.02
"""At most so many decisions may rest on less than exact knowledge, and predict other cached tokens than reported."""
KEY = "sk-rolling"


class Gateway:
    """One LiteLLM proxy that can be replaced by another life of itself, on the same port."""

    def __init__(self, name: str, processes: Processes, config: Path) -> None:
        self.name = name
        self.stack: Stack | None = None
        """Where to send requests; None: out of rotation."""
        self.answered = 0
        """Requests, by this life of it."""
        self._processes = processes
        self._config = config
        (self._port,) = free_ports(1)
        self._lives = itertools.count(1)
        self._in_flight = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        url = f"http://127.0.0.1:{self._port}"
        self._process = self._processes.start(
            f"{self.name}-{next(self._lives)}",
            [
                *_command("litellm"),
                *("--config", str(self._config), "--host", "127.0.0.1", "--port", str(self._port)),
                *("--telemetry", "False"),
            ],
            {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
        )
        self.client = httpx.AsyncClient(timeout=60)
        await until(lambda: answers(self.client, f"{url}/health/readiness"), f"{self.name} is ready", 120)
        self.answered = 0
        self.stack = Stack(self.name, "litellm", url, "", KEY, (), "", "", self._config)

    async def ask(self, messages: list[dict[str, str]]) -> Seen:
        assert self.stack is not None
        self._in_flight += 1
        try:
            return await ask(self.client, self.stack, messages, 12)
        finally:
            self._in_flight -= 1
            self.answered += 1

    async def restart(self) -> None:
        self.stack = None
        await self.end()
        await self.start()

    async def end(self) -> None:
        """As a load balancer has it done: the signal comes at once, what is in flight is still answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait, 60)
        await until(lambda: not self._in_flight, f"{self.name} answered what it had taken")
        await self.client.aclose()


class Indexer:
    """One `prefix-router indexer`."""

    def __init__(self, name: str, processes: Processes, config: Path) -> None:
        self.name = name
        self._processes = processes
        self._config = config
        self._lives = itertools.count(1)

    def start(self) -> None:
        self.life = f"{self.name}-{next(self._lives)}"
        options = ("--config", str(self._config), "--name", self.life)
        self._process = self._processes.start(self.life, [*_command("prefix-router"), "indexer", *options])

    async def restart(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self._process.wait, 60) == 0
        self.start()


@dataclass
class Load:
    """Clients with conversations that grow turn by turn, each below a system prompt of its own, through any gateway
    that is in rotation."""

    gateways: list[Gateway]
    seen: list[Seen] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    over: bool = False

    async def client(self, number: int) -> None:
        rng = Random(number)
        system = {"role": "system", "content": prose(rng, 300)}
        while not self.over:
            messages = [system]
            for _ in range(TURNS):
                messages = [*messages, {"role": "user", "content": prose(rng, 40)}]
                gateway = rng.choice([g for g in self.gateways if g.stack is not None])
                try:
                    one = await gateway.ask(messages)
                except (RequestFailed, httpx.HTTPError) as error:
                    self.failed.append(f"{gateway.name}: {error!r}")
                    break
                self.seen.append(one)
                messages = [*messages, {"role": "assistant", "content": one.answer}]
                await asyncio.sleep(rng.uniform(*THINK_S))
                if self.over:
                    break


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def followed_by(config: Path) -> Counter[str]:
    """Indexer -> replicas that it knows exactly."""
    reader = open_reader(load_settings_file(config), "test")
    try:
        roster = await reader.roster(MODEL)
    finally:
        await reader.close()
    return Counter(str(record.indexer) for record in roster.values() if record.knowledge == "exact")


def model_of_usual_size(folder: Path) -> Path:
    """The tiny model with 150,000 tokens: its tokenizer takes a second or two to load, as those of real models do, and
    a gateway that served before would show."""
    shutil.copytree(TINY_MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    ids = itertools.count(1 + max(*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])))
    for pair in itertools.product(list(vocabulary)[:400], repeat=2):
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = next(ids)
            merges.append(list(pair))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": next(ids)}), encoding="utf-8")
    return folder


def wrong(one: Seen) -> bool:
    return int(one.receipt["match"].partition("/")[0]) != one.cached_tokens


async def test_a_rolling_restart_of_gateways_and_indexers_blinds_nobody(redis_server, tmp_path):
    pytest.importorskip("litellm")
    first = consecutive_ports(REPLICAS)
    urls = [f"http://127.0.0.1:{port}" for port in range(first, first + REPLICAS)]
    settings = {
        "redis_url": redis_server.connection_url,
        "key_prefix": "rolling",
        "embedded_indexer": False,
        # gaps in knowledge are looked for, not those in the CPU time of a machine that carries all of this and more
        "deadline_ms": 1000,
        "redis_timeout_ms": 500,
        "startup_wait_s": 60,
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(proxy_config(urls, settings)), encoding="utf-8")
    with Processes(tmp_path) as processes:
        processes.start(
            "replicas",
            [
                *_command("prefix-router"),
                *("sim-replica", "--replicas", str(REPLICAS), "--port", str(first), "--model-name", MODEL),
                *("--model-folder", str(model_of_usual_size(tmp_path / "model")), "--block-size", str(BLOCK_SIZE)),
                *("--prefill-tokens-per-s", "50000", "--decode-tokens-per-s", "500"),
            ],
        )
        gateways = [Gateway(name, processes, config) for name in ("gateway-a", "gateway-b")]
        indexers = [Indexer(name, processes, config) for name in ("indexer-a", "indexer-b")]

        async def share_all() -> bool:
            shares = await followed_by(config)
            return shares.keys() == {indexer.life for indexer in indexers} and shares.total() == REPLICAS

        for indexer in indexers:
            indexer.start()
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        await until(share_all, "the indexers share all replicas", 60)
        load = Load(gateways)
        clients = asyncio.gather(*(load.client(number) for number in range(CLIENTS)))
        await until(lambda: len(load.seen) >= 3 * CLIENTS, "the load is steady", 60)
        before = len(load.seen)
        for _ in range(2):
            for gateway in gateways:
                await gateway.restart()
                await until(lambda: gateway.answered >= CLIENTS, f"{gateway.name} has its part of the load", 60)  # noqa: B023
            for indexer in indexers:
                await indexer.restart()
                await until(share_all, f"{indexer.name} has its part of the replicas", 60)
        load.over = True
        await clients
        for gateway in gateways:
            await gateway.end()
    counted = load.seen[before:]
    inexact = [f"{one.receipt}" for one in counted if one.receipt["source"] != "exact"]
    mistaken = [f"{one.receipt}, reported {one.cached_tokens}" for one in counted if wrong(one)]
    print(
        f"{len(counted)} requests: {len(load.failed)} failed, {len(inexact)} inexact, {len(mistaken)} predicted wrong"
    )
    assert not load.failed
    assert len(inexact) <= INEXACT_SHARE * len(counted), "\n".join(inexact)
    assert len(mistaken) <= WRONG_SHARE * len(counted), "\n".join(mistaken)
