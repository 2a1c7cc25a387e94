"""The body that LiteLLM will send to the replica, as far as it shapes the prompt.

What must be hashed is what is sent, not what came: LiteLLM renames roles, joins content parts, strips fields and turns
Anthropic messages into chat completions. The rules here were taken from recorded requests, and a test compares them
with what the installed LiteLLM really sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from .call_site import CHAT, COMPLETIONS, MESSAGES, RESPONSES

_PROMPT_OPTIONS = (
    "tools",
    "tool_choice",
    "functions",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "documents",
    "reasoning_effort",
    "response_format",
    "structured_outputs",
    "mm_processor_kwargs",
    "kv_transfer_params",
    "prompt_embeds",
    "instructions",
    "previous_response_id",
    "reasoning",
    "text",
)
"""Keyword arguments of LiteLLM that can reach the engine's prompt."""


def sent_request(
    path: str,
    model: str,
    *,
    messages: Sequence[Any] | None,
    input: Any,
    request_kwargs: Mapping[str, Any],
    deployment_params: Mapping[str, Any],
) -> tuple[str, dict[str, Any]]:
    """(API path at the replica, body) for a `provider/model` deployment. Never changes its arguments."""
    provider, _, engine_model = model.partition("/")
    body: dict[str, Any] = {"model": engine_model or model}
    for source in (deployment_params, request_kwargs):
        for name in _PROMPT_OPTIONS:
            if source.get(name) is not None:
                body[name] = source[name]
        extra = source.get("extra_body")
        if isinstance(extra, Mapping):
            body.update(extra)
    if path == COMPLETIONS:
        # the strategy is shown a chat made up from the prompt
        body["prompt"] = messages[0].get("content") if messages else None
        return COMPLETIONS, body
    if path == RESPONSES:
        body["input"] = input
        return RESPONSES, body
    if path == MESSAGES:
        return CHAT, _from_anthropic(body, messages or (), request_kwargs, provider)
    if path == CHAT:
        if provider == "hosted_vllm":
            _finish_vllm_chat(body, messages or (), request_kwargs)
        else:
            body["messages"] = [_as_system(message) for message in messages or ()]
            if body.get("tools"):
                body["tools"] = _without(body["tools"], frozenset({"additionalProperties"}))
        return CHAT, body
    return path, body


def _finish_vllm_chat(body: dict[str, Any], messages: Sequence[Any], request_kwargs: Mapping[str, Any]) -> None:
    body["messages"] = [_vllm_message(message) for message in messages]
    if isinstance(body.get("tools"), list):
        body["tools"] = [_as_function_tool(tool, i) for i, tool in enumerate(_without(body["tools"], _DROPPED))]
    thinking = request_kwargs.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") == "enabled" and "reasoning_effort" not in body:
        from litellm.litellm_core_utils.reasoning_effort_utils import reasoning_effort_from_thinking_budget

        body["reasoning_effort"] = reasoning_effort_from_thinking_budget(thinking.get("budget_tokens", 0))


_DROPPED = frozenset({"additionalProperties", "strict"})


def _as_system(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    if "content" in message and message["content"] is None:
        return {key: value for key, value in message.items() if key != "content"}
    return message


def _vllm_message(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    role, content = message.get("role"), message.get("content")
    if isinstance(content, str) and role in ("user", "system", "tool") and "cache_control" not in message:
        return message
    sent = {key: value for key, value in message.items() if key not in ("cache_control", "thinking_blocks")}
    sent["role"] = "system" if role == "developer" else role
    if content is None:
        sent.pop("content", None)
    if isinstance(content, list):
        sent["content"] = [_without_cache_control(part) for part in content]
    if role == "assistant":
        if "thinking_blocks" in message or "reasoning_content" in message:
            reasoning = message.get("reasoning_content")
            if not isinstance(reasoning, str):
                sent.pop("reasoning_content", None)
        if isinstance(content, list):
            _join_assistant_parts(sent)
    return sent


def _join_assistant_parts(sent: dict[str, Any]) -> None:
    texts: list[str] = []
    kept: list[Any] = []
    calls: list[dict[str, Any]] = []
    structured = False
    for part in sent["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            texts.append(part.get("text", ""))
            kept.append(part)
        elif kind == "tool_use":
            given = part.get("input", {})
            arguments = given if isinstance(given, str) else json.dumps(given)
            calls.append(
                {
                    "id": part.get("id"),
                    "type": "function",
                    "function": {"name": part.get("name"), "arguments": arguments},
                }
            )
        else:
            kept.append(part)
            structured = True
    if calls:
        own = sent.get("tool_calls")
        if isinstance(own, list):
            seen = {call.get("id") for call in own if isinstance(call, Mapping)}
            calls = [*own, *(call for call in calls if call["id"] not in seen)]
        sent["tool_calls"] = calls
    sent["content"] = kept if structured else "\n".join(texts)


def _without_cache_control(part: Any) -> Any:
    if isinstance(part, Mapping) and "cache_control" in part:
        return {key: value for key, value in part.items() if key != "cache_control"}
    return part


def _as_function_tool(tool: Any, index: int) -> Any:
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") != "custom":
        return {key: value for key, value in tool.items() if key != "cache_control"}
    given = tool.get("custom")
    custom = given if isinstance(given, dict) else {}
    parameters = custom.get("input_schema") or tool.get("input_schema")
    if not isinstance(parameters, dict):
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", "description": "Raw tool input payload."}},
            "required": ["input"],
        }
    name = custom.get("name") or tool.get("name") or f"custom_tool_{index}"
    function: dict[str, Any] = {"name": str(name), "parameters": parameters}
    description = custom.get("description") or tool.get("description")
    if isinstance(description, str):
        function["description"] = description
    return {"type": "function", "function": function}


def _without(value: Any, names: frozenset[str]) -> Any:
    """A copy of a JSON value without the keys of that name, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    if isinstance(value, list):
        return [_without(item, names) for item in value]
    return value


def _from_anthropic(
    body: dict[str, Any], messages: Sequence[Any], request_kwargs: Mapping[str, Any], provider: str
) -> dict[str, Any]:
    """Chat completion that LiteLLM makes of an Anthropic request; by LiteLLM's own adapter, whose rules are many."""
    import copy

    request: dict[str, Any] = {"model": body["model"], "messages": list(messages), "max_tokens": 1}
    for name in ("system", "tools", "tool_choice", "thinking"):
        if request_kwargs.get(name) is not None:
            request[name] = request_kwargs[name]
    translated = _anthropic_adapter().translate_anthropic_to_openai(copy.deepcopy(request))
    chat = translated[0] if isinstance(translated, tuple) else translated
    sent = {**{key: body[key] for key in body if key not in ("tools", "tool_choice")}, "model": body["model"]}
    for name in ("tools", "tool_choice", "reasoning_effort"):
        if chat.get(name) is not None:
            sent[name] = chat[name]
    chat_messages = [dict(message) for message in chat["messages"]]
    if provider == "hosted_vllm":
        _finish_vllm_chat(sent, chat_messages, {})
    else:
        sent["messages"] = chat_messages
    return sent


@lru_cache(maxsize=1)
def _anthropic_adapter() -> Any:
    """LiteLLM's own converter; its module has moved between versions."""
    for package in ("pass_through", "experimental_pass_through"):
        try:
            module = import_module(f"litellm.llms.anthropic.{package}.adapters.transformation")
        except ImportError:
            continue
        return module.LiteLLMAnthropicMessagesAdapter()
    raise LookupError("this LiteLLM has no adapter from Anthropic messages")
