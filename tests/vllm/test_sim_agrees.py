"""The simulated replica against the real engine: same tokens, same hits, same events, same refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from litellm_prefix_router.sim import SimConfig, SimReplica
from litellm_prefix_router.sim.words import prose

from .conftest import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, VllmReplica

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "description": "Weather <tag> & 'quote' für 城市",
        "name": "weather",
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Zürich", "n": 1.50}'}}


class Answers:
    """What the real engine said, by prompt: the simulated one repeats it."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], list[int]] = {}

    def put(self, prompt: Sequence[int], answer: list[int]) -> None:
        self._by_prompt[tuple(prompt)] = answer

    def __call__(self, prompt: Sequence[int], max_tokens: int) -> Sequence[int]:
        return self._by_prompt.get(tuple(prompt), [0])


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def sim(answers: Answers) -> AsyncIterator[SimReplica]:
    config = SimConfig(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        prefill_tokens_per_s=1e6,
        decode_tokens_per_s=1e4,
        script=answers,
    )
    async with SimReplica(config) as replica:
        yield replica


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def varied(seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """About 60 calls: (path, body). A message's `answer_of` is the call whose answer becomes its content."""
    rng = Random(seed)
    systems = [{"role": "system", "content": prose(rng, words)} for words in (120, 300, 500)]
    texts = [prose(rng, words) for words in (5, 20, 60, 150)]
    ids = [rng.randrange(6000) for _ in range(700)]
    calls: list[tuple[str, dict[str, Any]]] = []
    for system in systems:
        messages = [system]
        for _ in range(4):
            messages = [*messages, user(rng.choice(texts))]
            calls.append((CHAT, {"messages": messages, "max_tokens": rng.choice((1, 8, 40, 70)), "ignore_eos": True}))
            messages = [*messages, {"role": "assistant", "answer_of": len(calls) - 1}]
    for length in (31, 32, 33, 64, 64, 65, 96, 97, 640, 640, 641, 32):
        calls.append((COMPLETIONS, {"prompt": ids[:length], "max_tokens": rng.choice((1, 2, 33))}))
    for salt in (None, "a", "b", "a"):
        salted = {"cache_salt": salt} if salt else {}
        calls.append((CHAT, {"messages": [systems[0], user(texts[1])], "max_tokens": 4, **salted}))
    question = user("How is the weather in Zürich? 你好 🙂 na\u0308ive <|im_start|>system")
    history = [question, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": '{"temp": 4}'}, user("And tomorrow?")]
    parts = [{"type": "text", "text": "Part one."}, {"type": "text", "text": texts[2]}]
    thinking = {"role": "assistant", "content": "Sunny.", "reasoning": "The user asks about the weather."}
    for messages, options in (
        ([question], {"tools": [WEATHER]}),
        ([question], {"tools": [WEATHER], "tool_choice": "none"}),
        (history, {"tools": [WEATHER]}),
        (history, {}),
        ([systems[0], *history], {"tools": [WEATHER, {**WEATHER, "x-extra": 1}]}),
        ([user("x"), {"role": "user", "content": parts}], {}),
        ([{"role": "developer", "content": texts[2]}, question], {}),
        ([question, thinking], {}),
        ([question, thinking, user("Why?")], {}),
        ([question], {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            [question, {"role": "assistant", "content": "Well, "}],
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ([question], {"add_generation_prompt": False}),
        ([systems[1], question], {"truncate_prompt_tokens": 50}),
        ([systems[1], question], {"add_special_tokens": True}),
        ([systems[1], {"role": "user", "content": ""}], {}),
        ([systems[1], question], {"session_id": "s1"}),
    ):
        calls.append((CHAT, {"messages": messages, "max_tokens": 6, **options}))
    for text in (texts[3], texts[3] + " More.", "<|im_start|>user\nHi<|im_end|>\n", " \n\n  ü 1234 don't"):
        for special in (True, False):
            calls.append((COMPLETIONS, {"prompt": text, "max_tokens": 3, "add_special_tokens": special}))
    for _ in range(6):  # more than fits: evictions
        start = rng.randrange(100)
        calls.append((COMPLETIONS, {"prompt": [start, *ids[start:], *ids[: rng.randrange(700)]], "max_tokens": 5}))
    calls.append((COMPLETIONS, {"prompt": ids[:641], "max_tokens": 5}))
    return calls


async def replayed(endpoint: str) -> list[Any]:
    """All events that an engine still has, in order."""
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", bytes(8)])
        events: list[Any] = []
        while True:
            parts = await dealer.recv_multipart()
            if parts[2] == b"\xff" * 8:
                return events
            events += msgspec.msgpack.decode(parts[3])[1]
    finally:
        context.destroy(linger=0)


def filled(message: dict[str, Any], said: Sequence[str]) -> dict[str, Any]:
    if "answer_of" not in message:
        return message
    return {"role": message["role"], "content": said[message["answer_of"]]}


def outcome(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    usage = answer["usage"]
    return {
        "prompt": answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        "answer": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "created_cache_tokens": usage["prompt_tokens_details"].get("created_cache_tokens"),
    }


async def test_the_same_requests_give_the_same_tokens_hits_and_events(
    vllm_replicas: list[VllmReplica], sim: SimReplica, answers: Answers
) -> None:
    real = vllm_replicas[0]
    calls = varied()
    hits = 0
    said: list[str] = []
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(f"{real.base_url}/reset_prefix_cache")
        before = len(await replayed(real.replay_endpoint))
        for number, (path, body) in enumerate(calls):
            body = {"model": "tiny", "temperature": 0, "return_token_ids": True, **body}
            if path == CHAT:
                body["messages"] = [filled(message, said) for message in body["messages"]]
            response = await client.post(real.base_url + path, json=body)
            assert response.status_code == 200, (number, response.text)
            choice = response.json()["choices"][0]
            said.append(choice["message"]["content"] or "" if path == CHAT else choice["text"])
            expected = outcome(response.json())
            answers.put(expected["prompt"], expected["answer"])
            simulated = await client.post(sim.base_url + path, json=body)
            assert simulated.status_code == 200, (number, simulated.text)
            assert outcome(simulated.json()) == expected, (number, path, json.dumps(body)[:300])
            hits += expected["cached_tokens"] > 0
    events = (await replayed(real.replay_endpoint))[before:]
    mine = await replayed(sim.replay_endpoints[0])
    if events and events[0]["type"] == "AllBlocksCleared":  # the reset above, told with the first step
        events = events[1:]
    assert mine == events
    assert len(calls) >= 50 and hits >= 25
    assert sum(event["type"] == "BlockRemoved" for event in events) > 20


BAD: dict[str, tuple[str, Any]] = {
    "unknown model": (CHAT, {"model": "nope", "messages": [user("x")]}),
    "no messages": (CHAT, {"model": "tiny"}),
    "empty messages": (CHAT, {"messages": []}),
    "message without role": (CHAT, {"messages": [{"content": "x"}]}),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    ),
    "empty tools": (CHAT, {"messages": [user("x")], "tools": []}),
    "empty salt": (CHAT, {"messages": [user("x")], "cache_salt": ""}),
    "no prompt": (COMPLETIONS, {"model": "tiny"}),
    "empty prompt": (COMPLETIONS, {"prompt": ""}),
    "empty ids": (COMPLETIONS, {"prompt": []}),
    "out of vocabulary": (COMPLETIONS, {"prompt": [10**6]}),
    "too long": (COMPLETIONS, {"prompt": [7] * 2100}),
    "no room": (COMPLETIONS, {"prompt": "x", "max_tokens": 10**6}),
    "zero tokens": (COMPLETIONS, {"prompt": "x", "max_tokens": 0}),
    "usage without stream": (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "stream_options": {"include_usage": True}}),
    "rank out of range": (COMPLETIONS, {"prompt": "x", "max_tokens": 1, "rank": "1"}),
    "both ends": (CHAT, {"messages": [user("x")], "continue_final_message": True, "add_generation_prompt": True}),
    "list": (COMPLETIONS, []),
    "not json": (COMPLETIONS, b"{"),
}


@pytest.mark.parametrize("case", BAD)
async def test_the_same_bodies_are_refused(vllm_replicas: list[VllmReplica], sim: SimReplica, case: str) -> None:
    path, body = BAD[case]
    headers = {"content-type": "application/json"}
    if isinstance(body, dict):
        body = dict(body)
        if "rank" in body:
            headers["X-data-parallel-rank"] = body.pop("rank")
        body.setdefault("model", "tiny")
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    statuses = []
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        for base_url in (vllm_replicas[0].base_url, sim.base_url):
            response = await client.post(base_url + path, content=content)
            statuses.append(response.status_code)
    assert statuses[1] == statuses[0] >= 400


async def test_metrics_and_discovery_have_the_same_names(vllm_replicas: list[VllmReplica], sim: SimReplica) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        urls = (vllm_replicas[0].base_url, sim.base_url)
        real, mine = [(await client.get(f"{url}/metrics")).text for url in urls]
        names = {line.split()[2] for line in mine.splitlines() if line.startswith("# TYPE")}
        assert names <= {line.split()[2] for line in real.splitlines() if line.startswith("# TYPE")}
        for path in ("/kv_event_sources", "/v1/models", "/version"):
            bodies = [(await client.get(url + path)).json() for url in urls]
            assert shape(bodies[1]) == shape(bodies[0]), path


def shape(value: Any) -> Any:
    """Keys all the way down; lists by their first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key != "permission"}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "..."
