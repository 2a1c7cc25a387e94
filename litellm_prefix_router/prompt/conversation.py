"""From a request's messages to what the chat template receives.

The rules are the engine's: which keys survive and in which order, how content parts become a string or a list, what
becomes of null, of tool calls' arguments, of earlier reasoning. Nothing is copied that need not be: the strings of a
long conversation are the caller's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .content_format import ContentFormat
from .dialect import Dialect
from .media import MEDIA_KINDS, media_part
from .request_forms import MediaPart, refuse

BILLING_HEADER = "x-anthropic-billing-header"
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_KNOWN_PART_KEYS = frozenset(
    {"type", "text", "refusal", "thinking", "closed", "image_url", "image_pil", "image_embeds", "audio_embeds"}
    | {
        "video_embeds",
        "data",
        "audio_url",
        "video_url",
        "input_audio",
        "file",
        "uuid",
        "name",
        "prompt_cache_breakpoint",
    }
)
MEDIA_PLACEHOLDER = "\ue0f0\ue0f1media\ue0f2"
"""Stands in the rendered text where the first image or other medium begins; private-use characters that no chat has."""


def normalize_messages(
    messages: Sequence[Any], content_format: ContentFormat, dialect: Dialect, media: list[MediaPart]
) -> list[dict[str, Any]]:
    """The messages as the template sees them; media found on the way are appended to `media`, in order."""
    as_list = content_format == "openai"
    return [_message(message, as_list, dialect, media) for message in messages]


def _message(message: Mapping[str, Any], as_list: bool, dialect: Dialect, media: list[MediaPart]) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    if isinstance(content, str):
        if role == "system" and dialect.strip_billing_header and content.startswith(BILLING_HEADER):
            content = content.partition("\n")[2]
            parts: Any = [{"type": "text", "text": content}] if content else []
            result = {"role": role, "content": parts if as_list else content}
        elif as_list and not (role == "tool" and dialect.join_tool_parts):
            result = {"role": role, "content": [{"type": "text", "text": content}]}
        else:
            result = {"role": role, "content": content}
    else:
        result = {"role": role, "content": _parts(role, content or [], as_list, dialect, media)}
    if role == "assistant":
        _assistant_fields(message, result, dialect)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if role == "developer":
        result["tools"] = _developer_tools(message.get("tools"))
    return result


def _parts(role: str, parts: Sequence[Any], as_list: bool, dialect: Dialect, media: list[MediaPart]) -> Any:
    items: list[Any] = []
    media_before = len(media)
    for part in parts:
        kind = part["type"]
        field = _TEXT_FIELDS.get(kind)
        if field is not None:
            text = part.get(field)
            if text is None:
                continue
            if role == "system" and kind == "text" and dialect.strip_billing_header and text.startswith(BILLING_HEADER):
                text = text.partition("\n")[2]
                if not text:
                    continue
            if as_list:
                extra = {key: value for key, value in part.items() if key not in _KNOWN_PART_KEYS}
                items.append({"type": "text", "text": text, **extra})
            elif text:
                items.append(text)
        elif kind == "tool_reference":
            name = part.get("name")
            items.append({"type": "tool_reference", "name": name} if as_list else name or "")
        else:
            found = media_part(part)
            media.append(found)
            if as_list:
                items.append({"type": found.kind})
    if not as_list:
        # the engine puts missing placeholders in front of a message's text, so nothing of it is known from there on
        marker = [MEDIA_PLACEHOLDER] if len(media) > media_before else []
        return "\n".join([*marker, *(item for item in items if item)])
    if role == "tool" and dialect.join_tool_parts and all(item.get("type") == "text" for item in items):
        return "\n".join(item["text"] for item in items)
    return items


def _assistant_fields(message: Mapping[str, Any], result: dict[str, Any], dialect: Dialect) -> None:
    calls = message.get("tool_calls")
    if calls is not None and (calls or not dialect.drop_empty_tool_calls):
        result["tool_calls"] = [_tool_call(call, dialect) for call in calls]
    reasoning = message.get("reasoning") if dialect.reasoning_accepted else None
    if reasoning is None and dialect.reasoning_content_as_reasoning:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _developer_tools(tools: Any) -> Any:
    """A developer message's own tools: as they came, but known keys in the order of the engine's schema."""
    if not isinstance(tools, list):
        return tools
    ordered = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return tools
        known = {name: function[name] for name in ("name", "description", "parameters", "strict") if name in function}
        if any(value is None for value in known.values()):
            return tools
        ordered.append({"function": known | function, "type": "function"} | {**tool, "function": known | function})
    return ordered


def _tool_call(call: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    function = call["function"]
    arguments = parsed_arguments(function.get("arguments"), dialect)
    if call.get("_order") == "responses":
        ordered = {"name": function["name"], "arguments": arguments}
    else:
        ordered = {"arguments": arguments, "name": function["name"]}
        ordered |= {key: value for key, value in function.items() if key not in ordered}
    known = {"id": call.get("id"), "function": ordered, "type": call.get("type", "function")}
    return known | {key: value for key, value in call.items() if key not in known and key != "_order"}


def parsed_arguments(text: Any, dialect: Dialect) -> Any:
    """A tool call's arguments, JSON text in a request, as the object that templates get."""
    if not text:
        return {}
    if isinstance(text, dict):
        return text
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        if dialect.bad_arguments_to_empty:
            return {}
        refuse("a tool call's arguments are not JSON")
    if isinstance(parsed, dict) or not dialect.bad_arguments_to_empty:
        return parsed
    return {}


def developer_to_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system messages, and all of these as one in front if any is then not alone there."""
    changed = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
            message.pop("tools", None)
        changed.append(message)
    positions = [index for index, message in enumerate(changed) if message["role"] == "system"]
    if positions == [0]:
        return changed
    texts = [_as_text(changed[index]["content"]) for index in positions]
    front = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [front, *(message for message in changed if message["role"] != "system")]


def _as_text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if isinstance(part, dict) and "text" in part)
    return str(content or "")


def trailing_assistant_to_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """SGLang: the model is not asked to follow its own words; unless continued, they are passed as the user's."""
    if messages and messages[-1]["role"] == "assistant" and isinstance(messages[-1].get("content"), str):
        return [*messages[:-1], {"role": "user", "content": messages[-1]["content"]}]
    return messages


def check_messages(messages: Any) -> None:
    """Raise PromptUnknown("refused") where the engine's schema does not take these chat messages."""
    if not isinstance(messages, list):
        refuse("messages must be a list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            refuse("a message needs a role")
        if "name" in message and not isinstance(message["name"], str):
            refuse("a message's name must be a string")
        role = message["role"]
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                check_part(part, role)
        elif isinstance(content, dict) or (content is not None and not isinstance(content, str)):
            refuse("content must be a string or a list of parts")
        elif content is None and "content" in message and role not in ("assistant", "function"):
            refuse(f"content of a {role} message must not be null" if role in _ROLES else "content must not be null")
        if role == "assistant":
            _check_calls(message.get("tool_calls"))


_ROLES = ("user", "tool", "system", "developer")


def check_part(part: Any, role: str) -> None:
    """Raise PromptUnknown("refused") for a content part that the engine does not take in a message of `role`."""
    if not isinstance(part, dict):
        refuse("a content part must be an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        refuse("a content part needs a type")
    if kind in _TEXT_FIELDS:
        if kind == "output_text" and role == "assistant":
            refuse("output_text parts belong to the responses API")
        text = part.get(_TEXT_FIELDS[kind])
        if text is not None and not isinstance(text, str):
            refuse("a part's text must be a string")
        if part.get("uuid") is not None:
            refuse("a text part has no uuid")
    elif kind != "tool_reference" and kind not in MEDIA_KINDS:
        refuse("unknown type of content part")


def _check_calls(calls: Any) -> None:
    if calls is None or calls == {}:
        return
    if not isinstance(calls, list):
        refuse("tool_calls must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or call.get("type") != "function"
            or not isinstance(call.get("id"), str)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments"), str)
        ):
            refuse("a tool call needs id, type and a function with name and arguments")
