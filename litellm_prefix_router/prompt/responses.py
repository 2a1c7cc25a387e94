"""A responses-API body as a ChatForm: items folded into messages, flat tools into functions.

The text of a `previous_response_id` is known to the engine alone; what the body holds is still in order behind it, so
nothing of such a prompt's beginning is known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .chat import EFFORTS, ServerOptions, function_dict, output_tokens, template_kwargs, transferred_ids
from .conversation import check_messages
from .dialect import Dialect
from .request_forms import ChatForm, TokenizeRules, merged, refuse

_NAMESPACE_SEPARATOR = "__"
_INPUT_PARTS = ("input_text", "input_image", "input_file")
_ROLES = ("user", "assistant", "system", "developer")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""What the engine says of a custom tool, which takes text, to templates that know functions only."""


def responses_form(body: Mapping[str, Any], options: ServerOptions, dialect: Dialect) -> ChatForm:
    """Raises PromptUnknown("refused") where the engine would answer 400."""
    given = body.get("input")
    if not isinstance(given, (str, list)):
        refuse("input must be a string or a list of items")
    if body.get("prompt") is not None:
        refuse("prompt templates are not supported")
    kwargs = template_kwargs(body, options)
    messages: list[dict[str, Any]] = []
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        refuse("instructions must be a string")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _fold(given, messages)
    check_messages(messages)
    _check_tool_choice(body)
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    if effort is not None and effort not in EFFORTS:
        refuse("unknown reasoning effort")
    carry_on = isinstance(given, list) and _is_unfinished(given)
    extra: dict[str, Any] = {
        "add_generation_prompt": not carry_on,
        "continue_final_message": carry_on,
        "reasoning_effort": effort,
    }
    if dialect.effort_sets_thinking and effort is not None and "enable_thinking" not in kwargs:
        extra["enable_thinking"] = effort != "none"
    tools = _tools(body.get("tools"), dialect)
    if options.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none":
        tools = None
    request = merged(kwargs, extra)
    base = merged(merged(options.default_chat_template_kwargs, request), {"tools": tools})
    return ChatForm(
        messages=messages,
        tools=tools,
        template_kwargs=merged(base, request),
        rules=TokenizeRules(
            add_special_tokens=dialect.responses_add_special_tokens,
            truncate_to=None if body.get("truncation", "disabled") == "disabled" else -1,
            max_output_tokens=output_tokens(body, "max_output_tokens"),
        ),
        prompt_token_ids=transferred_ids(body, messages, options, dialect),
    )


def _is_unfinished(items: list[Any]) -> bool:
    last = items[-1] if items else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def _fold(items: list[Any], messages: list[dict[str, Any]]) -> None:
    """Reasoning, text and calls that follow one another are one assistant message while their slot in it is free."""
    start = len(messages)
    for item in items:
        if not isinstance(item, dict):
            refuse("an input item must be an object")
        last = messages[-1] if len(messages) > start else None
        open_message = last if last is not None and last.get("role") == "assistant" else None
        kind = item.get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            call = _call(item)
            if open_message is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                open_message.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            _fill(messages, open_message, "reasoning", _reasoning_text(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "message" and item.get("role") not in _ROLES:
            refuse("a message item needs the role user, assistant, system or developer")
        elif item.get("role") == "assistant":
            text = _assistant_text(item)
            if text is None:
                messages.append(dict(item))
            else:
                _fill(messages, open_message, "content", text)
        elif "role" in item:
            _check_input_parts(item.get("content"))
            messages.append(item)
        else:
            refuse("unsupported input item")


def _fill(messages: list[dict[str, Any]], open_message: dict[str, Any] | None, slot: str, text: str) -> None:
    if open_message is not None and open_message.get(slot) is None:
        open_message[slot] = text
    else:
        messages.append({"role": "assistant", slot: text})


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name, call_id = item.get("name"), item.get("call_id")
    if item["type"] == "custom_tool_call":
        arguments: Any = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments")
        if item.get("namespace"):
            name = f"{item['namespace']}{_NAMESPACE_SEPARATOR}{name}"
    # the key order of a call differs from the chat API's; the normaliser is told by a mark
    return {
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
        "type": "function",
        "_order": "responses",
    }


def _reasoning_text(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        refuse("encrypted reasoning is not supported")
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            text = parts[0].get("text") if isinstance(parts[0], dict) else None
            if not isinstance(text, str):
                refuse("a reasoning item's text must be a string")
            return text
    return ""


def _assistant_text(item: Mapping[str, Any]) -> str | None:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content == [] and "type" not in item:
        return None
    if not isinstance(content, list):
        refuse("content must be a string or a list of parts")
    if item.get("type") != "message":
        _check_input_parts(content)
    text = content[0].get("text") if content and isinstance(content[0], dict) else None
    if not isinstance(text, str):
        refuse("an assistant item begins with a text")
    return text


def _check_input_parts(content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") not in _INPUT_PARTS:
            refuse("parts of an input message are input_text, input_image or input_file")
        if part["type"] == "input_text" and not isinstance(part.get("text"), str):
            refuse("a part's text must be a string")


def _check_tool_choice(body: Mapping[str, Any]) -> None:
    choice, tools = body.get("tool_choice", "auto"), body.get("tools", [])
    if tools is None:
        refuse("tools must be a list")
    if isinstance(choice, dict):
        if choice.get("type") in ("function", "custom") and choice.get("name") not in _tool_names(tools):
            refuse("tool_choice names an unknown tool")
    elif choice not in ("none", "auto", "required"):
        refuse("unknown tool_choice")
    elif choice == "required" and not _tool_names(tools):
        refuse("tool_choice needs tools")


def _tool_names(tools: Any) -> set[str]:
    """Names by which the model's own tools can be chosen: those in a namespace with and without it."""
    names: set[str] = set()
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        if tool.get("type") in ("function", "custom"):
            names.add(str(tool.get("name")))
        elif tool.get("type") == "namespace":
            inner = {str(one.get("name")) for one in tool.get("tools") or () if isinstance(one, dict)}
            names |= inner | {f"{tool.get('name')}{_NAMESPACE_SEPARATOR}{name}" for name in inner}
    return names


def _tools(tools: Any, dialect: Dialect) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        refuse("tools must be a list")
    shown: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, dict):
            refuse("a tool must be an object")
        if tool.get("type") == "function":
            shown.append({"type": "function", "function": function_dict(tool, dialect)})
        elif tool.get("type") == "custom":
            if (tool.get("format") or {}).get("type") == "grammar":
                refuse("custom tools with a grammar are not supported")
            shim = {"name": tool.get("name"), "description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
            shown.append({"type": "function", "function": function_dict(shim, dialect)})
        elif tool.get("type") == "namespace":
            for inner in tool.get("tools") or []:
                if isinstance(inner, dict) and inner.get("type") == "function":
                    name = f"{tool.get('name')}{_NAMESPACE_SEPARATOR}{inner.get('name')}"
                    shown.append({"type": "function", "function": function_dict({**inner, "name": name}, dialect)})
    return shown
