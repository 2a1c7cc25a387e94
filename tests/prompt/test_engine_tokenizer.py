"""Ids from a replica: which question is asked, what is kept, what happens when nobody answers in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from litellm_prefix_router.prompt.cache import PromptCache
from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.engine_tokenizer import EngineTokenizer

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}


def asker(answer: Callable[[httpx.Request], httpx.Response], **more: Any) -> EngineTokenizer:
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return EngineTokenizer(lambda: ["http://a/v1", "http://b"], cache=PromptCache(1 << 20), client=client, **more)


async def test_asks_render_and_keeps_the_answer() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200, json={"token_ids": [1, 2, 3]})

    tokenizer = asker(answer, lora_modules=frozenset({"m"}), deadline_ms=2000)
    first = await tokenizer.encode(CHAT, BODY)
    second = await tokenizer.encode(CHAT, {**BODY, "temperature": 1, "cache_salt": "s"})
    assert first.token_ids.tolist() == second.token_ids.tolist() == [1, 2, 3]
    assert first.source == "engine" and first.identity.lora == "m" and second.identity.cache_salt == "s"
    assert seen == ["http://a/v1/chat/completions/render"]


async def test_falls_back_to_tokenize_where_render_is_off() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/render"):
            return httpx.Response(403)
        asked.append(json.loads(request.content))
        return httpx.Response(200, json={"count": 2, "tokens": [7, 8]})

    tokenizer = asker(answer, deadline_ms=2000)
    assert (await tokenizer.encode(CHAT, BODY)).token_ids.tolist() == [7, 8]
    assert asked == [{"model": "m", "messages": BODY["messages"]}]
    with pytest.raises(PromptUnknown) as info:
        await tokenizer.encode("/v1/responses", {"input": "x"})
    assert info.value.reason == "unsupported"
    with pytest.raises(PromptUnknown):
        await tokenizer.encode(CHAT, {**BODY, "truncate_prompt_tokens": 4})


@pytest.mark.parametrize(("status", "reason"), [(400, "refused"), (422, "refused"), (500, "tokenizer_missing")])
async def test_errors_are_reasons(status: int, reason: str) -> None:
    tokenizer = asker(lambda request: httpx.Response(status), deadline_ms=2000)
    with pytest.raises(PromptUnknown) as info:
        await tokenizer.encode(CHAT, BODY)
    assert info.value.reason == reason


async def test_a_slow_replica_is_not_waited_for_and_its_answer_kept() -> None:
    gate = asyncio.Event()
    calls = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        await gate.wait()
        return httpx.Response(200, json={"token_ids": [5]})

    client = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    tokenizer = EngineTokenizer(
        lambda: ["http://a"], cache=PromptCache(1 << 20), client=client, deadline_ms=5, max_in_flight=1
    )
    for _ in range(2):
        with pytest.raises(PromptUnknown) as info:
            await tokenizer.encode(CHAT, BODY)
        assert info.value.reason == "tokenizer_missing"
    with pytest.raises(PromptUnknown):
        await tokenizer.encode(CHAT, {**BODY, "messages": []})  # one question at a time
    gate.set()
    while tokenizer._open:
        await asyncio.sleep(0)
    assert (await tokenizer.encode(CHAT, BODY)).token_ids.tolist() == [5]
    assert calls == 1
    await tokenizer.close()


async def test_a_replica_that_failed_is_asked_last() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "a":
            raise httpx.ConnectError("gone")
        return httpx.Response(200, json={"token_ids": [5]})

    tokenizer = asker(handle, deadline_ms=2000)
    for number in range(2):
        await tokenizer.encode(CHAT, {"messages": [{"role": "user", "content": str(number)}]})
    assert asked == ["a", "b", "b"]


async def test_bounds() -> None:
    tokenizer = asker(lambda request: httpx.Response(200, json={"token_ids": [1]}), max_body_bytes=100)
    with pytest.raises(PromptUnknown) as info:
        await tokenizer.encode(CHAT, {"messages": ["x" * 200]})
    assert info.value.reason == "too_large"
    with pytest.raises(PromptUnknown):
        await tokenizer.encode("/v1/embeddings", {"input": "x"})
    nobody = EngineTokenizer(list, cache=PromptCache(0), deadline_ms=2000)
    with pytest.raises(PromptUnknown):
        await nobody.encode(CHAT, BODY)
    await nobody.close()
