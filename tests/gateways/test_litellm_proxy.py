"""The real LiteLLM proxy with the strategy switched on in config.yaml, four replicas and a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from litellm_prefix_router.decision import RECEIPT_HEADER
from litellm_prefix_router.demo.traffic import ask, read_receipt
from litellm_prefix_router.index import open_reader
from litellm_prefix_router.observe.status import read_status
from litellm_prefix_router.settings import load_settings_file

from .conftest import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon"


def talk(tenant: int, *turns: str) -> list[dict]:
    """A conversation below one tenant's long system prompt; turns alternate user and assistant."""
    system = f"tenant {tenant}: " + " ".join(f"{word}{tenant}" for word in WORDS.split()) * 6
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}] + [
        {"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)
    ]


@pytest.fixture(scope="module")
async def client():
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        yield client


async def status_of(stack):
    reader = open_reader(load_settings_file(Path(stack.config)), "test")
    try:
        return await read_status(reader, "test")
    finally:
        await reader.close()


async def loads_are_zero(stack) -> bool:
    found = await status_of(stack)
    return bool(found.gateways) and all(not g["loads"] for g in found.gateways)


@pytest.fixture(scope="module")
async def ready(stack, client):
    """The stack once every replica is followed."""

    async def followed() -> bool:
        found = await status_of(stack)
        return found.healthy and len(found.replicas) == 4

    await until(followed, "four replicas followed", 60)
    return stack


async def fault(client, url: str, **fields) -> None:
    (await client.post(f"{url}/sim/fault", json=fields)).raise_for_status()


async def test_every_turn_is_placed_by_exact_knowledge_and_predicted_to_the_token(ready, client):
    seen = []
    for turn in range(4):
        for tenant in range(6):
            turns = [text for i in range(turn) for text in (f"question {i} of {tenant}", f"answer {i}")]
            one = await ask(client, ready, talk(tenant, *turns, f"question {turn} of {tenant}"), 4)
            seen.append((tenant, turn, one))
    for tenant, turn, one in seen:
        predicted, _, total = one.receipt["match"].partition("/")
        assert one.receipt["source"] == "exact", one.receipt
        assert int(total) == one.prompt_tokens
        assert int(predicted) == one.cached_tokens, (tenant, turn)
        if turn:
            assert one.cached_tokens > 100
    homes = {tenant: {one.receipt["replica"] for t, turn, one in seen if t == tenant and turn} for tenant in range(6)}
    assert all(len(replicas) == 1 for replicas in homes.values()), homes
    assert len(set.union(*homes.values())) > 1, "all tenants on one replica"
    await until(lambda: loads_are_zero(ready), "no load left")


async def post(client, stack, path: str, body: dict) -> httpx.Response:
    return await client.post(f"{stack.url}{path}", json=body, headers=stack.headers())


@pytest.mark.parametrize(
    ("path", "body", "cached"),
    [
        (
            "/v1/completions",
            {"prompt": "one two three four five six seven eight nine ten " * 8, "max_tokens": 2},
            lambda usage: usage["prompt_tokens_details"]["cached_tokens"],
        ),
        (
            "/v1/responses",
            {"input": "tell me of the sea " * 20, "instructions": "be brief", "max_output_tokens": 2},
            lambda usage: usage["input_tokens_details"]["cached_tokens"],
        ),
        (
            "/v1/messages",
            {
                "system": "you are a sailor " * 20,
                "messages": [{"role": "user", "content": "tell me of the sea"}],
                "max_tokens": 2,
            },
            lambda usage: usage["cache_read_input_tokens"],
        ),
    ],
)
async def test_other_apis_are_exact_too(ready, client, path, body, cached):
    body = {"model": "chat", **body}
    first = await post(client, ready, path, body)
    assert first.status_code == 200, first.text
    receipt = read_receipt(first.headers.get(RECEIPT_HEADER))
    assert receipt["source"] == "exact", receipt

    async def again() -> dict | None:
        answer = await post(client, ready, path, body)
        receipt = read_receipt(answer.headers[RECEIPT_HEADER])
        predicted = int(receipt["match"].partition("/")[0])
        assert receipt["source"] == "exact"
        return predicted > 64 and (predicted, cached(answer.json()["usage"]))

    predicted, reported = await until(again, f"a match on {path}")
    assert predicted == reported


@pytest.mark.parametrize(
    "body",
    [
        {"model": "chat"},
        {"model": "chat", "messages": []},
        {"model": "chat", "messages": "hello"},
        {"model": "chat", "messages": [{"role": "user", "content": 7}], "max_tokens": 1},
        {"model": "chat", "messages": [{"role": "user", "content": ""}], "max_tokens": 1},
        {"model": "chat", "messages": [{"role": "user", "content": "x " * 100_000}], "max_tokens": 1},
        {"model": "nobody serves this", "messages": [{"role": "user", "content": "hi"}]},
    ],
)
async def test_odd_bodies_get_an_answer_of_the_engine_or_of_litellm(ready, client, body):
    answer = await post(client, ready, "/v1/chat/completions", body)
    assert answer.status_code in (200, 400, 404, 422, 429, 500), answer.text
    assert "prefix_router" not in answer.text and "prefix-router" not in answer.text
    after = await ask(client, ready, talk(99, "still there?"), 1)
    assert after.ok
    await until(lambda: loads_are_zero(ready), "no load left")


async def test_a_failing_replica_costs_no_request(ready, client):
    warm = await ask(client, ready, talk(31, "hello"), 2)
    home = warm.receipt["replica"]
    await fault(client, home, fail_requests=2, fail_status=500)
    seen = [await ask(client, ready, talk(31, f"hello {i}"), 2) for i in range(4)]
    assert all(one.ok for one in seen)
    assert any(one.receipt["replica"] != home for one in seen)
    await fault(client, home, fail_requests=0)
    await until(lambda: loads_are_zero(ready), "no load left")


async def test_after_a_storm_of_failures_and_departures_no_load_is_left(ready, client):
    """Streams read to the end, streams that clients leave, streams that replicas drop, and plain failures, at once."""

    async def leave_early(tenant: int) -> None:
        body = {"model": "chat", "messages": talk(tenant, "go on"), "max_tokens": 200, "stream": True}
        url = f"{ready.url}/v1/chat/completions"
        async with client.stream("POST", url, json=body, headers=ready.headers()) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    return

    async def quietly(work) -> None:
        try:
            await work
        except (httpx.HTTPError, RuntimeError, Exception):
            pass

    for i, url in enumerate(ready.replicas):
        await fault(client, url, fail_requests=2, fail_status=500 if i % 2 else 429, drop_requests=2)
    storm = [leave_early(i) for i in range(10)] + [ask(client, ready, talk(i, "stay"), 20) for i in range(20)]
    await asyncio.gather(*(quietly(work) for work in storm))
    for url in ready.replicas:
        await fault(client, url, fail_requests=0, drop_requests=0)
    await until(lambda: loads_are_zero(ready), "no load left after the storm", 40)


async def test_a_frozen_redis_fails_nothing_and_heals_by_itself(ready, client, redis_server):
    async def exact_again() -> bool:
        one = await ask(client, ready, talk(41, "hello"), 1)
        return one.receipt["source"] == "exact"

    await until(exact_again, "exact before", 30)
    process = redis_server._process if hasattr(redis_server, "_process") else redis_server.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        frozen = [await ask(client, ready, talk(41, f"while frozen {i}"), 1) for i in range(6)]
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert all(one.ok for one in frozen)
    assert {one.receipt["source"] for one in frozen} <= {"approximate", "hash"}
    assert all(one.receipt["reason"] in ("index_unavailable", "lookup_timeout") for one in frozen)
    await until(exact_again, "exact after", 30)


async def test_a_bad_setting_stops_the_proxy_with_one_line(ready, tmp_path):
    import yaml

    from litellm_prefix_router.demo.processes import free_ports
    from litellm_prefix_router.demo.stack import _command, proxy_config

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(proxy_config(ready.replicas, {"deadline": 20})))
    (port,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *_command("litellm"),
        *("--config", str(config), "--port", str(port), "--telemetry", "False"),
        env={**os.environ, "LITELLM_MASTER_KEY": ready.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 90)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 2
    assert b"prefix-router: callback_settings.prefix_router: unknown setting 'deadline'; did you mean" in out
    assert b"Traceback" not in out
