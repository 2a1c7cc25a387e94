"""An Anthropic messages body as a ChatForm, the way vLLM's own /v1/messages turns it into a chat completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .chat import ServerOptions, function_dict, output_tokens, template_kwargs, transferred_ids
from .conversation import BILLING_HEADER, check_messages
from .dialect import Dialect
from .request_forms import ChatForm, TokenizeRules, merged, refuse

_BLOCKS = frozenset(
    {"text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}
    | {"tool_addition", "tool_removal"}
)
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def anthropic_form(
    body: Mapping[str, Any],
    options: ServerOptions,
    dialect: Dialect,
    *,
    merge_inline_system: bool,
    disabled_effort: str,
) -> ChatForm:
    """`merge_inline_system`: system messages further down go to the front (the template takes them only there).
    `disabled_effort`: the reasoning_effort that `thinking: disabled` means for this template ("none" or "low").

    Raises PromptUnknown("refused") where the engine would answer 400.
    """
    given = body.get("messages")
    if not isinstance(given, list):
        refuse("messages must be a list")
    for message in given:
        _check(message)
    if body.get("max_tokens", 1) is None:
        refuse("max_tokens must be an integer")
    limit = output_tokens(body, "max_tokens")
    _check_tool_choice(body)
    effort = _effort(body, disabled_effort)
    kwargs = template_kwargs(body, options)
    messages = _messages(given, body.get("system"), merge_inline_system)
    check_messages(messages)
    tools = _tools(body, given, dialect)
    if options.exclude_tools_when_tool_choice_none and (body.get("tool_choice") or {}).get("type") == "none":
        tools = None
    extra: dict[str, Any] = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "reasoning_effort": effort,
    }
    if dialect.effort_sets_thinking and effort is not None and "enable_thinking" not in kwargs:
        extra["enable_thinking"] = effort != "none"
    base = merged(options.default_chat_template_kwargs, {"tools": tools})
    return ChatForm(
        messages=messages,
        tools=tools,
        template_kwargs=merged(base, merged(kwargs, extra)),
        rules=TokenizeRules(add_special_tokens=False, max_output_tokens=limit),
        prompt_token_ids=transferred_ids(body, messages, options, dialect),
    )


def _check(message: Any) -> None:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        refuse("a message needs the role user, assistant or system")
    content = message.get("content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        refuse("content must be a string or a list of blocks")
    for block in content:
        _check_block(block)


def _check_block(block: Any) -> None:
    if not isinstance(block, dict) or block.get("type") not in _BLOCKS:
        refuse("unknown type of content block")
    for name in ("text", "thinking", "id", "name", "tool_use_id"):
        if block.get(name) is not None and not isinstance(block[name], str):
            refuse(f"a block's {name} must be a string")
    if block.get("input") is not None and not isinstance(block["input"], dict):
        refuse("a block's input must be an object")
    inner = block.get("content")
    are_blocks = isinstance(inner, list) and all(isinstance(item, dict) for item in inner)
    if inner is not None and not isinstance(inner, str) and not are_blocks:
        refuse("a block's content must be a string or a list of blocks")


def _check_tool_choice(body: Mapping[str, Any]) -> None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice is None:
        return
    if not isinstance(choice, dict) or choice.get("type") not in ("auto", "any", "tool", "none"):
        refuse("unknown tool_choice")
    if choice["type"] == "tool" and choice.get("name") not in [
        tool.get("name") for tool in tools or () if isinstance(tool, dict)
    ]:
        refuse("tool_choice names an unknown tool")


def _effort(body: Mapping[str, Any], disabled_effort: str) -> str | None:
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    if effort is not None and effort not in _EFFORTS:
        refuse("unknown effort")
    thinking = body.get("thinking")
    if thinking is None:
        return effort
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind == "disabled":
        return disabled_effort
    if kind == "enabled":
        budget, limit = thinking.get("budget_tokens"), body.get("max_tokens")
        if not isinstance(budget, int) or budget < 1024 or (isinstance(limit, int) and budget >= limit):
            refuse("budget_tokens must be at least 1024 and less than max_tokens")
    elif kind != "adaptive":
        refuse("unknown kind of thinking")
    return effort


def _messages(given: list[Any], system: Any, merge_inline_system: bool) -> list[dict[str, Any]]:
    # a system string keeps its billing header here: the rules for chat messages take its first line off
    front = [system if isinstance(system, str) else _system_text(system)] if system else []
    if merge_inline_system:
        front += [_system_text(message["content"]) for message in given if message["role"] == "system"]
    leading = "".join(text for text in front if text)
    messages: list[dict[str, Any]] = [{"role": "system", "content": leading}] if leading else []
    for message in given:
        role, content = message["role"], message["content"]
        if role == "system":
            text = "" if merge_inline_system else _system_text(content)
            if text:
                messages.append({"role": "system", "content": text})
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            _blocks(role, content, messages)
    return messages


def _system_text(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    if not isinstance(content, list):
        refuse("system must be a string or a list of blocks")
    for block in content:
        _check_block(block)
    texts = [block.get("text") for block in content if block["type"] == "text"]
    return "".join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def _blocks(role: str, blocks: list[Any], messages: list[dict[str, Any]]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            parts.append({"type": "image_url", "image_url": {"url": _image_url(block["source"])}})
        elif kind == "thinking" and block.get("thinking") is not None:
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id") or "call", "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            _tool_result(block, messages)
        elif kind == "tool_result":
            text = str(block["content"]) if block.get("content") else ""
            parts.append({"type": "text", "text": f"Tool result: {text}"})
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        message["content"] = parts[0]["text"]
    elif parts:
        message["content"] = parts
    if role != "user" or "content" in message:
        messages.append(message)


def _tool_result(block: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    content = block.get("content")
    items = [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []
    text = content if isinstance(content, str) else ""
    if items:
        text = "\n".join(str(item.get("text", "")) for item in items if item.get("type") == "text")
    call_id = block.get("tool_use_id") or ""
    messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    images = [_image_url(item.get("source") or {}) for item in items if item.get("type") == "image"]
    if images:
        messages.append(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in images if url]}
        )
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    if any(names):
        references = [{"type": "tool_reference", "name": name} for name in names if name]
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _tools(body: Mapping[str, Any], messages: list[Any], dialect: Dialect) -> list[dict[str, Any]] | None:
    given = body.get("tools")
    if given is not None and not isinstance(given, list):
        refuse("tools must be a list")
    for tool in given or []:
        _check_tool(tool)
    chosen = given
    changes = [
        block
        for message in messages
        if message["role"] == "system" and isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] in ("tool_addition", "tool_removal")
    ]
    if changes:
        chosen = _changed_tools(given or [], changes)
    if chosen is None:
        return None
    return [{"type": "function", "function": _function(tool, dialect)} for tool in chosen]


def _check_tool(tool: Any) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        refuse("a tool needs a name")
    if not isinstance(tool.get("input_schema"), dict):
        refuse("a tool needs an input_schema")


def _function(tool: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    schema = tool["input_schema"]
    if "type" not in schema:
        schema = {**schema, "type": "object"}
    named = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return function_dict({**named, "parameters": schema}, dialect)


def _changed_tools(given: list[Any], changes: list[Any]) -> list[Any]:
    """The tools in effect at the end of the conversation."""
    tools = {tool["name"]: tool for tool in given}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            refuse("a change of tools names no tool")
        definition = change.get("definition")
        if isinstance(definition, dict):
            _check_tool(definition)
            name = definition["name"]
            tools[name] = definition
        else:
            name = change.get("name")
            if name not in tools:
                refuse("a change of tools names an unknown tool")
            if block["type"] == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]
