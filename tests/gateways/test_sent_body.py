"""What we take LiteLLM to send is what the installed LiteLLM really sends, for each API and provider."""

import asyncio
import contextlib
import json

import pytest

pytest.importorskip("litellm")
uvicorn = pytest.importorskip("uvicorn")

from litellm import Router
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from litellm_prefix_router.gateways.litellm.call_site import find_call_site
from litellm_prefix_router.gateways.litellm.router_view import choose_async
from litellm_prefix_router.gateways.litellm.sent_body import sent_request

USAGE = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
CHAT_ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": USAGE,
}
TEXT_ANSWER = {
    "id": "x",
    "object": "text_completion",
    "created": 1,
    "model": "tiny",
    "choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}],
    "usage": USAGE,
}
RESPONSE_ANSWER = {
    "id": "resp_x",
    "object": "response",
    "created_at": 1,
    "model": "tiny",
    "status": "completed",
    "output": [],
    "usage": {"input_tokens": 5, "output_tokens": 1, "total_tokens": 6},
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "auto",
    "temperature": 1,
    "top_p": 1,
}
SHAPING = (
    "messages",
    "prompt",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "cache_salt",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.50}'}}


class Recorder:
    """A server that keeps every body, and the router that sends to it with our strategy looking on."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict]] = []
        self.expected: list[tuple[str, dict]] = []
        self.port = 0

    async def answer(self, request: Request) -> JSONResponse:
        path = request.url.path
        self.sent.append((path, await request.json()))
        if path.endswith("/chat/completions"):
            return JSONResponse(CHAT_ANSWER)
        return JSONResponse(TEXT_ANSWER if path.endswith("/completions") else RESPONSE_ANSWER)

    def router(self, provider: str, **params) -> Router:
        base = f"http://127.0.0.1:{self.port}/v1"
        router = Router(
            model_list=[
                {
                    "model_name": "g",
                    "litellm_params": {"model": f"{provider}/tiny", "api_base": base, "api_key": "none", **params},
                }
            ],
            num_retries=0,
        )
        recorder = self

        class Strategy:
            async def async_get_available_deployment(self, model, request_kwargs, **call):
                path = find_call_site(request_kwargs, Router).path

                async def choose(group, deployments, kwargs):
                    given = json.dumps([call, kwargs.get("tools")])
                    recorder.expected.append(
                        sent_request(
                            path,
                            f"{provider}/tiny",
                            messages=call.get("messages"),
                            input=call.get("input"),
                            request_kwargs=kwargs,
                            deployment_params=deployments[0]["litellm_params"],
                        )
                    )
                    assert json.dumps([call, kwargs.get("tools")]) == given, "what is passed on must not change"
                    return deployments[0]

                return await choose_async(router, choose, model=model, request_kwargs=request_kwargs, **call)

            get_available_deployment = None

        router.set_custom_routing_strategy(Strategy())
        return router


@pytest.fixture
async def recorder():
    recorder = Recorder()
    app = Starlette(routes=[Route("/{path:path}", recorder.answer, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    recorder.port = server.servers[0].sockets[0].getsockname()[1]
    yield recorder
    server.should_exit = True
    await task


def chat(**more):
    return "acompletion", {"messages": [{"role": "user", "content": "hello"}], **more}


def talk(*messages, **more):
    return "acompletion", {"messages": list(messages), **more}


CALLS = {
    "plain": chat(),
    "developer": talk({"role": "developer", "content": "d"}, {"role": "user", "content": "q"}),
    "parts": talk({"role": "user", "content": PARTS, "name": "bob"}),
    "assistant parts": talk(
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": PARTS, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "z"},
    ),
    "assistant without content": talk(
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "z"}]},
    ),
    "system parts": talk({"role": "system", "content": PARTS}, {"role": "user", "content": "q"}),
    "cache control on a message": talk(
        {"role": "system", "content": "s", "cache_control": {"type": "ephemeral"}}, {"role": "user", "content": "q"}
    ),
    "tools": chat(tools=[TOOL], tool_choice="auto"),
    "template options": chat(
        cache_salt="s",
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=True,
        documents=[{"text": "t"}],
    ),
    "extra body": chat(extra_body={"cache_salt": "s", "continue_final_message": False}),
    "reasoning effort": chat(reasoning_effort="low"),
    "completion": ("atext_completion", {"prompt": "hello"}),
    "completion with salt": ("atext_completion", {"prompt": "hello", "cache_salt": "s"}),
    "completion list": ("atext_completion", {"prompt": ["a", "b"]}),
    "responses": ("aresponses", {"input": "hi", "instructions": "be brief"}),
    "responses items": (
        "aresponses",
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
    ),
    "anthropic": (
        "aanthropic_messages",
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "sys", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "text", "text": "a"},
                        {"type": "tool_use", "id": "tu", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "tu", "content": "res"},
                        {"type": "text", "text": "go"},
                    ],
                },
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {}}}],
        },
    ),
    "anthropic plain": (
        "aanthropic_messages",
        {"max_tokens": 5, "system": "s", "messages": [{"role": "user", "content": "q"}]},
    ),
}


def shaping(request: tuple[str, dict]) -> tuple[str, dict]:
    path, body = request
    return path, {name: body[name] for name in SHAPING if name in body}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
async def test_the_sent_body_is_foreseen(recorder, provider, name):
    method, call = CALLS[name]
    if provider == "openai" and name in ("anthropic", "anthropic plain"):
        pytest.skip("LiteLLM turns these into responses for openai/: routed by load")
    await getattr(recorder.router(provider), method)(model="g", **call)
    assert [shaping(r) for r in recorder.expected] == [shaping(r) for r in recorder.sent]


async def test_options_of_the_deployment_are_sent_too(recorder):
    router = recorder.router("hosted_vllm", extra_body={"cache_salt": "fixed"})
    await router.acompletion(model="g", messages=[{"role": "user", "content": "q"}])
    assert [shaping(r) for r in recorder.expected] == [shaping(r) for r in recorder.sent]
    assert recorder.sent[0][1]["cache_salt"] == "fixed"
