"""Each fault switch does what it says, and taking it back heals."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from litellm_prefix_router.sim import Faults, SimReplica

from .conftest import until

BODY = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8}


async def test_the_next_requests_fail_with_the_status(client: httpx.AsyncClient) -> None:
    await client.post("/sim/fault", json={"fail_requests": 2, "fail_status": 503})
    seen = [(await client.post("/v1/chat/completions", json=BODY)).status_code for _ in range(3)]
    assert seen == [503, 503, 200]


async def collect(client: httpx.AsyncClient, lines: list[str]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        async for line in response.aiter_lines():
            lines.append(line)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dropped_connection(client: httpx.AsyncClient, replica: SimReplica, stream: bool) -> None:
    replica.faults.update({"drop_requests": 1, "drop_after_tokens": 3})
    if stream:
        lines: list[str] = []
        with pytest.raises(httpx.TransportError):
            await collect(client, lines)
        assert sum(line.startswith("data: ") for line in lines) == 4  # the opening chunk and three tokens
    else:
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert answer.status_code == 500
    await until(lambda: replica.ranks[0].engine.idle)
    assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_a_frozen_replica_answers_nothing_until_it_is_thawed(
    client: httpx.AsyncClient, replica: SimReplica
) -> None:
    replica.faults.update({"frozen": True})
    tasks = [asyncio.create_task(client.get("/health")), asyncio.create_task(client.post("/v1/chat/completions", json=BODY))]  # fmt: skip  # noqa: E501
    done, _ = await asyncio.wait(tasks, timeout=0.1)
    assert not done
    await client.post("/sim/fault", json={"frozen": False})
    assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200]


async def test_slow_and_unhealthy(client: httpx.AsyncClient, replica: SimReplica) -> None:
    loop = asyncio.get_running_loop()
    await client.post("/sim/fault", json={"slow_factor": 100, "unhealthy": True})
    assert (await client.get("/health")).status_code == 503
    start = loop.time()
    await client.post("/v1/chat/completions", json=BODY)
    assert loop.time() - start > 7 * 100 / replica.config.decode_tokens_per_s


async def test_a_restart_ends_running_requests(client: httpx.AsyncClient, replica: SimReplica) -> None:
    replica.faults.update({"slow_factor": 1000})
    task = asyncio.create_task(client.post("/v1/chat/completions", json=BODY))
    await until(lambda: bool(replica.ranks[0].engine.running))
    replica.restart()
    assert (await task).status_code == 500
    assert replica.ranks[0].engine.idle


@pytest.mark.parametrize("values", [{"nope": 1}, {"frozen": 1}, {"fail_requests": True}, {"slow_factor": "x"}])
def test_unknown_faults_and_values_are_refused(values: dict[str, object]) -> None:
    faults = Faults()
    with pytest.raises(ValueError):
        faults.update({"fail_requests": 3, **values})
    assert faults.fail_requests == 0 or "fail_requests" in values


async def test_a_bad_fault_is_a_bad_request(client: httpx.AsyncClient) -> None:
    response = await client.post("/sim/fault", json={"nope": 1})
    assert response.status_code == 400 and "known:" in response.json()["error"]["message"]
