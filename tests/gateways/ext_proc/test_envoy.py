"""The recommended mode through the real Envoy: what the processor chooses is what Envoy does, for every body."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import time

import pytest

from litellm_prefix_router.sim import SimConfig, SimReplica

from .conftest import BLOCK, FAST, chat, receipt_of, until

pytestmark = pytest.mark.envoy

LONG = "The quick brown fox jumps over the lazy dog. " * 40


async def test_the_prefix_goes_where_it_is_known_to_be_and_the_match_is_exact(fleet, serve, exact, start_envoy) -> None:
    server = await serve()
    envoy = await start_envoy(fleet.endpoints, [server.address])
    await exact(server)
    first = await envoy.post(json=chat(LONG))
    assert first.status_code == 200
    home = receipt_of(first)["replica"]
    prompt = first.json()["usage"]["prompt_tokens"]
    expected = (prompt - 1) // BLOCK * BLOCK

    async def known() -> bool:
        again = receipt_of(await envoy.post(json=chat(LONG)))
        return again["match"] == f"{expected}/{prompt}"

    await until(known)
    for _ in range(8):
        answer = await envoy.post(json=chat(LONG), headers={"x-gateway-destination-endpoint": fleet.endpoints[0]})
        receipt = receipt_of(answer)
        assert (receipt["source"], receipt["reason"], receipt["replica"]) == ("exact", "ok", home)
        assert receipt["match"] == f"{expected}/{prompt}"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        assert "served" not in receipt
    lines = await envoy.access(9)
    assert all(line.split()[1] == home.removeprefix("http://") for line in lines[-8:])
    await until(lambda: not server.service.router.ledger.loads())
    tally = server.service.tally
    await until(lambda: tally.audited == tally.decisions)
    assert tally.agreed == tally.audited


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_each_data_parallel_rank_behind_an_endpoint_is_a_replica(
    mode, tokenizer, settings_of, serve, start_envoy
) -> None:
    """Two endpoints of two ranks each are four caches; a conversation stays on its rank, which a header pins."""
    config = SimConfig(block_size=BLOCK, num_blocks=4096, data_parallel_size=2, **FAST)
    async with SimReplica(config, tokenizer=tokenizer) as one, SimReplica(config, tokenizer=tokenizer) as two:
        endpoints = [f"127.0.0.1:{replica.port}" for replica in (one, two)]
        server = await serve(settings_of(pool={"endpoints": endpoints}))

        async def followed() -> bool:
            roster = await server.service._reader().roster("tiny")
            ready = str(getattr(server.service.fleet.pools["replicas"].encoder, "state", "")).startswith("ready")
            return ready and sorted(name[-2:] for name, r in roster.items() if r.knowledge == "exact") == [
                "#0", "#0", "#1", "#1"
            ]  # fmt: skip

        await until(followed)
        envoy = await start_envoy(endpoints, [server.address], processing_mode=modes(mode))
        wrong = {"x-data-parallel-rank": "1"}  # a client's own wish does not count
        prompts = [f"{i} is the number of this conversation. {LONG}" for i in range(8)]
        homes = [receipt_of(await envoy.post(json=chat(p), headers=wrong))["replica"] for p in prompts]
        assert len(set(homes)) > 1
        for prompt, home in zip(prompts, homes, strict=True):

            async def matched(prompt: str = prompt, home: str = home) -> bool:
                answer = await envoy.post(json=chat(prompt))
                receipt = receipt_of(answer)
                assert answer.status_code == 200 and receipt["replica"] == home and "served" not in receipt
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                predicted = int(receipt["match"].partition("/")[0])
                return predicted > 200 and predicted == cached

            await until(matched)


def backends(echoes) -> dict:
    return {"pool": {"endpoints": [echo.endpoint for echo in echoes]}, "top": {"redis_url": "memory://envoy-tests"}}


BODIES = {
    "10 B": b'{"a": 123}',
    "100 KB": json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 100_000}]}).encode(),
    "900 KB": b'{"messages": [{"role": "user", "content": "' + b"y" * 900_000 + b'"}]}',
    "1.1 MB": b'{"messages": [{"role": "user", "content": "' + b"z" * 1_100_000 + b'"}]}',
    "20 MB": b'{"messages": [{"role": "user", "content": "' + b"z" * 20_000_000 + b'"}]}',
    "no JSON": b"\x00\xff\xfe this is no JSON",
    "no object": b"[1, 2, 3]",
    "gzip": gzip.compress(b'{"messages": []}'),
    "empty": b"",
}


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_every_body_reaches_the_choice_unchanged(mode, echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes))
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address], processing_mode=modes(mode))
    for name, body in BODIES.items():
        for chunked in (False, True):
            headers = {"content-type": "application/json", "x-gateway-destination-endpoint": echoes[0].endpoint}
            if name == "gzip":
                headers["content-encoding"] = "gzip"
            answer = await envoy.post(content=pieces(body) if chunked else body, headers=headers)
            assert answer.status_code == 200, (name, chunked, answer.text)
            told = answer.json()
            assert told["sha256"] == hashlib.sha256(body).hexdigest(), (name, chunked)
            if mode == "BUFFERED" and not chunked:
                assert told["headers"].get("content-length", "0") == str(len(body))
            receipt = receipt_of(answer)
            assert receipt["replica"] == f"http://{told['endpoint']}", (name, chunked)
    get = await envoy.client.get(f"{envoy.url}/v1/models")
    assert get.status_code == 200 and receipt_of(get)["source"] == "least-load"
    await until(lambda: not server.service.router.ledger.loads())


async def pieces(body: bytes):
    for i in range(0, len(body), 300_000):
        yield body[i : i + 300_000]


def modes(body_mode: str, response: str | None = None) -> dict[str, str]:
    if body_mode == "BUFFERED":
        return {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SEND",
            "response_body_mode": response or "STREAMED",
        }
    return {
        "request_header_mode": "SEND",
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_header_mode": "SEND",
        "response_body_mode": response or "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    }


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_a_stream_arrives_whole_and_its_usage_is_read(mode, echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes))
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address], processing_mode=modes(mode))
    outcomes = []
    server.service.tally.finished = lambda receipt, cached: outcomes.append(cached)
    answer = await envoy.client.post(f"{envoy.url}/stream?n=500&gap_ms=1", json=chat("stream", stream=True))
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [json.loads(e)["n"] for e in events[:-2]] == list(range(500))
    assert events[-1] == "[DONE]"
    await until(lambda: outcomes == [48])
    assert not server.service.router.ledger.loads()


async def test_a_client_that_leaves_takes_its_load_along(echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes))
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address])
    ledger = server.service.router.ledger
    url = f"{envoy.url}/stream?n=100000&gap_ms=5"
    async with envoy.client.stream("POST", url, json=chat("leave", stream=True)) as answer:
        assert answer.status_code == 200
        await until(lambda: sum(load.requests for load in ledger.loads().values()) == 1)
    await until(lambda: not ledger.loads())


async def test_the_list_is_tried_in_order_and_the_load_moves_along(echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes), health_interval_s=60, health_timeout_s=60)
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address])
    ids = {f"http://{e.endpoint}": e for e in echoes}
    body = chat("a conversation that stays where it was " * 30)
    first = receipt_of(await envoy.post(json=body))["replica"]
    await ids[first].die()  # no probe will tell: the retry has to
    answer = await envoy.post(json=body)
    receipt = receipt_of(answer)
    assert answer.status_code == 200
    assert receipt["replica"] == first and receipt["served"] == f"http://{answer.json()['endpoint']}"
    assert (await envoy.access(2))[1].split()[2] == "2"  # one retry, no more
    for _ in range(5):
        answer = await envoy.post(json=body)
        assert receipt_of(answer)["replica"] == f"http://{answer.json()['endpoint']}" != first
    await until(lambda: not server.service.router.ledger.loads())


async def test_a_replica_that_sheds_is_retried_elsewhere(echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes), eject_failures=1000)
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address])
    body = chat("sticky " * 200)
    first = receipt_of(await envoy.post(json=body))["replica"]
    next(e for e in echoes if first.endswith(e.endpoint)).status = 503
    for _ in range(20):
        answer = await envoy.post(json=body)
        assert answer.status_code == 200 and not first.endswith(answer.json()["endpoint"])


@pytest.mark.parametrize("how", ["dies", "unhealthy", "drains"])
async def test_a_replica_that_is_gone_is_not_chosen(how, echoes, serve, start_envoy) -> None:
    options = backends(echoes)
    if how == "drains":
        options["pool"]["endpoints"][0] = {"endpoint": echoes[0].endpoint, "drain": True}
    server = await serve(**options)
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address])
    gone = f"http://{echoes[0].endpoint}"
    if how == "dies":
        await echoes[0].die()
    if how == "unhealthy":
        echoes[0].healthy = False
    if how != "drains":
        await until(lambda: not server.health.is_up(gone))
    before = echoes[0].requests
    for i in range(40):
        answer = await envoy.post(json=chat(f"{i} something else each time"))
        receipt = receipt_of(answer)
        assert answer.status_code == 200 and receipt["replica"] != gone and "served" not in receipt
    assert echoes[0].requests == before
    if how == "dies":
        await echoes[0].start()
        await until(lambda: server.health.is_up(gone))


async def test_a_replica_that_died_a_second_ago_is_not_chosen_without_a_probe(echoes, serve, start_envoy) -> None:
    """Under load the failed requests themselves tell it, long before the next health check."""
    options = backends(echoes)
    server = await serve(**options, health_interval_s=30.0)
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address])
    gone = f"http://{echoes[0].endpoint}"
    died_at = float("inf")
    late: list[str] = []

    async def load(worker: int) -> None:
        number = 0
        while len(late) < 100:
            number += 1
            asked_at = time.monotonic()
            answer = await envoy.post(json=chat(f"{worker} {number} something else each time"))
            assert answer.status_code == 200  # retried down the list
            if asked_at > died_at:
                late.append(receipt_of(answer)["replica"])

    workers = asyncio.gather(*(load(worker) for worker in range(4)))
    await until(lambda: echoes[0].requests > 10)
    await echoes[0].die()
    await until(lambda: not server.health.is_up(gone), 10)  # the failed requests have told it
    died_at = time.monotonic()
    await workers
    assert gone not in late


async def test_without_an_audit_the_stream_is_released_at_once(echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes), audit_response=False)
    request_only = {**modes("BUFFERED"), "response_header_mode": "SKIP", "response_body_mode": "NONE"}
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address], processing_mode=request_only)
    url = f"{envoy.url}/stream?n=100000&gap_ms=5"
    async with envoy.client.stream("POST", url, json=chat("release", stream=True)) as answer:
        assert answer.status_code == 200
        await until(lambda: server.meters.streams._value.get() == 0)
        await until(lambda: not server.service.router.ledger.loads())
    line = (await envoy.access(1))[0]
    assert line.split()[1] in {e.endpoint for e in echoes}


async def test_load_is_known_without_reading_the_response(echoes, serve, start_envoy) -> None:
    server = await serve(**backends(echoes))
    request_only = {**modes("BUFFERED"), "response_header_mode": "SKIP", "response_body_mode": "NONE"}
    envoy = await start_envoy([e.endpoint for e in echoes], [server.address], processing_mode=request_only)
    ledger = server.service.router.ledger
    url = f"{envoy.url}/stream?n=300&gap_ms=2"
    async with envoy.client.stream("POST", url, json=chat("hold", stream=True)) as answer:
        assert "x-prefix-router" not in answer.headers
        assert sum(load.requests for load in ledger.loads().values()) == 1
        assert [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"
    await until(lambda: not ledger.loads())


async def test_a_tenants_salt_and_the_engines_model_name_are_sent(echoes, serve, start_envoy) -> None:
    pool = {"endpoints": [e.endpoint for e in echoes], "rewrite_model": {"public": "tiny"}}
    server = await serve(
        pool=pool, top={"redis_url": "memory://envoy-tests"}, tenant_header="x-tenant", salt_secret="s" * 32
    )
    for mode in ("BUFFERED", "FULL_DUPLEX_STREAMED"):
        envoy = await start_envoy([e.endpoint for e in echoes], [server.address], processing_mode=modes(mode))
        salts = []
        for tenant in ("one", "two"):
            body = b'{"model" : "public", "cache_salt": "stolen", "n": 1.00, "messages": []}'
            told = (await envoy.post(content=body, headers={"x-tenant": tenant})).json()
            sent = json.loads(told["body"])
            assert sent["model"] == "tiny" and sent["cache_salt"] != "stolen"
            assert '"n": 1.00' in told["body"]  # the rest as it came
            if mode == "BUFFERED":
                assert told["headers"]["content-length"] == str(told["length"])
            salts.append(sent["cache_salt"])
        assert len(set(salts)) == 2
