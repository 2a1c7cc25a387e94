"""The HTTP API: shapes, truthful usage, refusals, aborts, ranks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from litellm_prefix_router.sim import SimConfig, SimReplica
from litellm_prefix_router.sim.tokenizer import SimTokenizer

from .conftest import FAST, until

SYSTEM = {"role": "system", "content": "You are the careful clerk of a small harbor. " * 20}


def chat(text: str = "Where is my parcel?", **options: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 4, **options}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_turns_of_a_chat_hit_all_that_came_before(client: httpx.AsyncClient, replica: SimReplica) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Where is my parcel?"}]
    known = 0
    for _ in range(3):
        body = {"messages": messages, "max_tokens": 40, "return_token_ids": True}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        assert prompt == list(replica.prompt_ids(body))
        assert cached(answer) == known // 16 * 16
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 40
        known = len(prompt) + 39  # the last token sampled has no KV
        messages = [*messages, choice["message"], {"role": "user", "content": "And then?"}]


async def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/chat/completions", json=chat(return_token_ids=True))).json()
    body = chat(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = await events_of(response)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(piece["delta"]["content"] for piece in pieces) == whole["choices"][0]["message"]["content"]
    assert [token for piece in pieces for token in piece.get("token_ids", ())] == whole["choices"][0]["token_ids"]
    assert pieces[-1]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert cached(chunks[-1]) == whole["usage"]["prompt_tokens"] // 16 * 16


async def test_completions_take_text_ids_and_lists(client: httpx.AsyncClient) -> None:
    text = "Once upon a time in a small harbor town there lived a baker. " * 4
    first = (
        await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "return_token_ids": True})
    ).json()
    ids = first["choices"][0]["prompt_token_ids"]
    second = (await client.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})).json()
    assert cached(second) == (len(ids) - 1) // 16 * 16
    both = (await client.post("/v1/completions", json={"prompt": [text, text], "n": 2, "max_tokens": 2})).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 2 * len(ids)
    assert both["usage"]["completion_tokens"] == 8


async def test_an_answer_without_a_limit_ends_by_itself(client: httpx.AsyncClient) -> None:
    body = chat()
    del body["max_tokens"]
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]


async def test_responses_and_messages_hit_the_same_blocks(client: httpx.AsyncClient) -> None:
    question = "Write the name of every harbor that you know, from the coldest to the warmest one. " * 3
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": question}]})
    answer = (await client.post("/v1/responses", json={"input": question, "max_output_tokens": 2})).json()
    hit = answer["usage"]["input_tokens_details"]["cached_tokens"]
    assert hit == (answer["usage"]["input_tokens"] - 1) // 16 * 16 > 0
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 2}
    usage = (await client.post("/v1/messages", json=body)).json()["usage"]
    assert usage["cache_read_input_tokens"] == hit
    assert usage["input_tokens"] == answer["usage"]["input_tokens"] - hit


async def test_tokenize_is_what_is_prefilled(client: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "ship", "parameters": {"type": "object"}}}]
    body = chat(tools=tools, return_token_ids=True)
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    told = (await client.post("/tokenize", json={"messages": body["messages"], "tools": tools})).json()
    assert told["tokens"] == answer["prompt_token_ids"]
    assert told["count"] == len(told["tokens"])
    text = (await client.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
    assert '{"type": "function", "function": {"name": "ship", "description": null' in text


REFUSED = {
    "unknown model": ("/v1/chat/completions", chat(model="nope"), 404),
    "no messages": ("/v1/chat/completions", {"model": "tiny"}, 400),
    "empty messages": ("/v1/chat/completions", {"messages": []}, 400),
    "message without role": ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400),
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    "empty tools": ("/v1/chat/completions", chat(tools=[]), 400),
    "bad arguments": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
    ),
    "empty salt": ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400),
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400),
    "no prompt": ("/v1/completions", {}, 400),
    "token out of vocabulary": ("/v1/completions", {"prompt": [10**6]}, 400),
    "mixed prompt": ("/v1/completions", {"prompt": [1, "x"]}, 400),
    "too long": ("/v1/completions", {"prompt": [7] * 5000}, 400),
    "no room for the answer": ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}, 400),
    "no tokens": ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    "usage without stream": ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400),
    "a list": ("/v1/completions", [], 400),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_the_engine_refuses(client: httpx.AsyncClient, case: str) -> None:
    path, body, status = REFUSED[case]
    response = await client.post(path, json=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["code"] == status and error["message"]


async def test_a_body_that_is_not_json(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", content=b"{")).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_everything(tokenizer: SimTokenizer, stream: bool) -> None:
    async with SimReplica(SimConfig(decode_tokens_per_s=20), tokenizer=tokenizer) as replica:
        engine = replica.ranks[0].engine
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            body = chat(max_tokens=5000, stream=stream)
            task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda: bool(engine.running))
            assert engine.cache.usage > 0
            task.cancel()
            await until(lambda: engine.idle)
            assert engine.cache.usage == 0
            assert engine.stats.finished["abort"] == 1


async def test_models_tell_the_tokenizer_folder_and_the_adapters(client: httpx.AsyncClient) -> None:
    base, adapter = (await client.get("/v1/models")).json()["data"]
    assert base["id"] == "tiny" and base["parent"] is None
    SimTokenizer.__init__(SimTokenizer.__new__(SimTokenizer), __import__("pathlib").Path(base["root"]))
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("adapter", "tiny", "/adapters/one")


async def test_an_adapter_has_its_own_cache(client: httpx.AsyncClient) -> None:
    await client.post("/v1/chat/completions", json=chat())
    answers = [(await client.post("/v1/chat/completions", json=chat(model="adapter"))).json() for _ in range(2)]
    assert [cached(answer) > 0 for answer in answers] == [False, True]


async def test_metrics_have_the_names_and_labels_of_the_engine(client: httpx.AsyncClient, replica: SimReplica) -> None:
    await client.post("/v1/chat/completions", json=chat())
    usage = (await client.post("/v1/chat/completions", json=chat())).json()["usage"]
    families = {item.name: item for item in text_string_to_metric_families((await client.get("/metrics")).text)}
    labels = {"engine": "0", "model_name": "tiny"}
    hits = families["vllm:prefix_cache_hits"].samples[0]
    assert hits.name == "vllm:prefix_cache_hits_total" and hits.labels == labels
    assert hits.value == usage["prompt_tokens_details"]["cached_tokens"]
    assert families["vllm:prefix_cache_queries"].samples[0].value == 2 * usage["prompt_tokens"]
    assert families["vllm:kv_cache_usage_perc"].samples[0].value == 0
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"], info["engine"]) == ("16", "256", "0")
    assert families["process_start_time_seconds"].samples[0].value == pytest.approx(replica.ranks[0].started_at, abs=5)


async def test_small_answers(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).content == b""
    assert (await client.get("/ping")).status_code == 200
    assert (await client.get("/version")).json() == {"version": "0.32.0"}
    info = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
    assert info["cache_config"]["block_size"] == 16


async def test_ranks_have_their_own_caches(tokenizer: SimTokenizer) -> None:
    async with SimReplica(SimConfig(data_parallel_size=2, **FAST), tokenizer=tokenizer) as replica:
        async with httpx.AsyncClient(base_url=replica.base_url) as client:
            hits = []
            for rank in ("0", "1", "0", "1"):
                response = await client.post(
                    "/v1/chat/completions", json=chat(), headers={"X-data-parallel-rank": rank}
                )
                hits.append(cached(response.json()) > 0)
            assert hits == [False, False, True, True]
            refused = await client.post("/v1/chat/completions", json=chat(), headers={"X-data-parallel-rank": "2"})
            assert refused.status_code == 400
            for _ in range(4):  # unpinned ones take turns while idle
                await client.post("/v1/chat/completions", json=chat())
            assert [rank.engine.stats.finished["length"] for rank in replica.ranks] == [4, 4]
            assert set((await client.get("/kv_event_sources")).json()) == {"0", "1"}
