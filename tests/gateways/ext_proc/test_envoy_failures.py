"""The processor killed, frozen, slow, restarted, under load: no request fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from litellm_prefix_router.demo.processes import Processes, consecutive_ports, free_ports

from .conftest import chat, receipt_of, until

pytestmark = pytest.mark.envoy

COMMAND = [sys.executable, "-c", "from litellm_prefix_router.cli import main; main()", "ext-proc", "--config"]
TIMEOUT_S = 0.2


class Load:
    """Requests through Envoy, by several workers, until they are told to stop; every answer is looked at."""

    def __init__(self, envoy, workers: int = 8) -> None:
        self.envoy = envoy
        self.failed: list[str] = []
        self.done = 0
        self.chosen = 0
        self._stopping = False
        self._tasks = [asyncio.create_task(self._work(n)) for n in range(workers)]

    async def _work(self, n: int) -> None:
        i = 0
        while not self._stopping:
            i += 1
            try:
                answer = await self.envoy.post(json=chat(f"worker {n} request {i} " * 5))
                told = answer.json()
                if answer.status_code != 200 or told["length"] == 0:
                    self.failed.append(f"{answer.status_code} {told}")
                self.chosen += "replica" in receipt_of(answer)
            except Exception as error:
                self.failed.append(repr(error))
            self.done += 1

    async def more(self, count: int) -> None:
        """Wait for that many more requests."""
        target = self.done + count
        await until(lambda: self.done >= target, 60)

    async def chosen_again(self) -> None:
        before = self.chosen
        await until(lambda: self.chosen > before + 20, 60)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def test_a_replica_is_drained_by_a_reload_and_a_broken_file_changes_nothing(
    tmp_path, echoes, start_processor, start_envoy
) -> None:
    address = f"unix://{tmp_path}/processor.sock"
    process = await start_processor(address)
    config = tmp_path / "processor" / "settings-1.yaml"
    log = tmp_path / "processor" / "processor-1.log"
    envoy = await start_envoy([e.endpoint for e in echoes], [address])
    settings = yaml.safe_load(config.read_text())
    config.write_text("envoy: {pools: [no, mapping]}")
    process.send_signal(signal.SIGHUP)
    await until(lambda: "not reloaded" in log.read_text())
    settings["envoy"]["pools"]["replicas"]["endpoints"][0] = {"endpoint": echoes[0].endpoint, "drain": True}
    config.write_text(yaml.safe_dump(settings))
    process.send_signal(signal.SIGHUP)
    await until(lambda: "pools reloaded" in log.read_text())
    before = echoes[0].requests
    for i in range(20):
        assert "replica" in receipt_of(await envoy.post(json=chat(f"{i} is another prompt")))
    assert echoes[0].requests == before


@pytest.fixture
def start_processor(tmp_path: Path, echoes, settings_of):
    folder = tmp_path / "processor"
    folder.mkdir()
    with Processes(folder) as processes:
        count = 0

        async def start(address: str, **options):
            nonlocal count
            count += 1
            settings = settings_of(
                pool={"endpoints": [e.endpoint for e in echoes]},
                top={"redis_url": "memory://x", "embedded_indexer": False},
                listen=address,
                shutdown_grace_s=5,
                **options,
            )
            path = folder / f"settings-{count}.yaml"
            path.write_text(yaml.safe_dump(settings))
            name = f"processor-{count}"
            process = processes.start(name, [*COMMAND, str(path)])
            await until(lambda: process.poll() is None and b"listens" in processes.log(name).read_bytes(), 60)
            return process

        yield start


@pytest.fixture
def under_load(tmp_path, echoes, start_processor, start_envoy):
    """A processor of its own process behind Envoy, with requests that are placed: (its address, Envoy's admin port, the
    process, Envoy, the load)."""

    async def start():
        address = f"unix://{tmp_path}/processor.sock"
        process = await start_processor(address)
        (admin,) = free_ports(1)
        endpoints = [e.endpoint for e in echoes]
        envoy = await start_envoy(endpoints, [address], message_timeout_s=TIMEOUT_S, admin_port=admin)
        load = Load(envoy)
        await load.chosen_again()
        return address, admin, process, envoy, load

    return start


@pytest.mark.slow
async def test_the_processor_dies_freezes_and_comes_back_under_load(under_load, start_processor) -> None:
    address, admin, process, envoy, load = await under_load()
    long_answer = asyncio.create_task(envoy.client.post(f"{envoy.url}/stream?n=600&gap_ms=100", json=chat("a minute")))
    await load.more(1000)
    process.send_signal(signal.SIGKILL)
    await load.more(1000)
    process = await start_processor(address)
    await load.chosen_again()
    process.send_signal(signal.SIGSTOP)
    await load.more(100)  # each of them waits for the message timeout
    process.send_signal(signal.SIGCONT)
    await load.chosen_again()
    await load.more(1000)
    process.send_signal(signal.SIGTERM)
    await load.more(1000)
    assert await asyncio.to_thread(process.wait, 60) == 0
    process = await start_processor(address)
    await load.chosen_again()
    await load.more(1000)
    await load.stop()
    assert load.failed == []
    assert load.done >= 5000
    events = [line[6:] for line in (await long_answer).text.splitlines() if line.startswith("data: ")]
    assert [json.loads(e)["n"] for e in events[:-2]] == list(range(600)) and events[-1] == "[DONE]"
    stats = (await envoy.client.get(f"http://127.0.0.1:{admin}/stats?filter=ext_proc&format=json")).json()["stats"]
    counters = {item["name"].rpartition(".")[2]: item.get("value", 0) for item in stats if "name" in item}
    assert counters["message_timeouts"] > 0 and counters["failure_mode_allowed"] > 0


@pytest.mark.slow
async def test_a_slow_processor_costs_the_message_timeout_and_no_request(under_load) -> None:
    """It answers, but later than Envoy waits: frozen and released in turns, so that some answers are in time."""
    _, admin, process, envoy, load = await under_load()
    chosen = load.chosen
    target = load.done + 1000
    while load.done < target:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * TIMEOUT_S)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(TIMEOUT_S)
    await load.chosen_again()
    await load.stop()
    assert load.failed == []
    assert load.chosen > chosen + 20
    stats = (await envoy.client.get(f"http://127.0.0.1:{admin}/stats?filter=ext_proc&format=json")).json()["stats"]
    timeouts = next(item["value"] for item in stats if item.get("name", "").endswith("message_timeouts"))
    assert timeouts > 20
    process.send_signal(signal.SIGTERM)  # answers that came too late hold nothing up
    assert await asyncio.to_thread(process.wait, 60) == 0


@pytest.mark.slow
async def test_streams_of_minutes_arrive_whole_and_give_their_load_back(echoes, serve, start_envoy) -> None:
    pool = {"endpoints": [e.endpoint for e in echoes]}
    server = await serve(pool=pool, top={"redis_url": "memory://long", "embedded_indexer": False})
    envoy = await start_envoy(pool["endpoints"], [server.address])

    async def listen(number: int) -> None:
        url = f"{envoy.url}/stream?n=1500&gap_ms=100"
        async with envoy.client.stream("POST", url, json=chat(f"stream {number}", stream=True)) as answer:
            events = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert [json.loads(e)["n"] for e in events[:-2]] == list(range(1500)) and events[-1] == "[DONE]"

    listeners = [asyncio.create_task(listen(n)) for n in range(8)]
    await asyncio.sleep(120)
    assert sum(load.requests for load in server.service.router.ledger.loads().values()) == 8
    await asyncio.gather(*listeners)
    await until(lambda: not server.service.router.ledger.loads())


async def test_a_running_stream_outlives_the_processor(tmp_path, echoes, start_processor, start_envoy) -> None:
    address = f"unix://{tmp_path}/processor.sock"
    process = await start_processor(address)
    envoy = await start_envoy([e.endpoint for e in echoes], [address])
    seen = []
    url = f"{envoy.url}/stream?n=400&gap_ms=2"
    async with envoy.client.stream("POST", url, json=chat("stream", stream=True)) as answer:
        assert "replica" in receipt_of(answer)
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                seen.append(line[6:])
                if len(seen) == 50:
                    os.kill(process.pid, signal.SIGKILL)
    assert [json.loads(e)["n"] for e in seen[:-2]] == list(range(400)) and seen[-1] == "[DONE]"


async def test_a_client_cannot_choose_while_the_processor_is_away(tmp_path, echoes, start_envoy) -> None:
    envoy = await start_envoy([e.endpoint for e in echoes], [f"unix://{tmp_path}/nobody.sock"])
    headers = {"x-gateway-destination-endpoint": echoes[2].endpoint}
    seen = {(await envoy.post(json=chat("spoof"), headers=headers)).json()["endpoint"] for _ in range(12)}
    assert seen == {e.endpoint for e in echoes}


async def test_workers_share_the_requests_and_a_dead_one_comes_back(echoes, start_processor, start_envoy) -> None:
    first = consecutive_ports(2)
    parent = await start_processor(f"127.0.0.1:{first}", workers=2)
    addresses = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]

    async def listening() -> bool:
        for address in addresses:
            try:
                _, writer = await asyncio.open_connection(*address.split(":"))
            except OSError:
                return False
            writer.close()
        return True

    await until(listening, 60)
    (admin,) = free_ports(1)
    envoy = await start_envoy([e.endpoint for e in echoes], addresses, admin_port=admin)
    for i in range(40):
        assert "replica" in receipt_of(await envoy.post(json=chat(f"request {i}")))
    text = (await envoy.client.get(f"http://127.0.0.1:{admin}/clusters?format=json")).json()
    hosts = next(c for c in text["cluster_statuses"] if c["name"] == "prefix-router")["host_statuses"]
    totals = [int(s["value"]) for h in hosts for s in h["stats"] if s["name"] == "rq_total"]
    assert len(totals) == 2 and min(totals) > 0
    before = children_of(parent.pid)
    os.kill(min(before), signal.SIGKILL)
    await until(lambda: len(children_of(parent.pid) - before) == 1, 60)
    await until(listening, 60)
    parent.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(parent.wait, 60) == 0


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
