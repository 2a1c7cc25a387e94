"""A chat-completions body as a ChatForm: the engine's defaults, merges and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .conversation import check_messages
from .dialect import Dialect
from .media import MEDIA_KINDS
from .request_forms import ChatForm, TokenizeRules, merged, refuse

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TRUE = ("true", "1", "yes", "on", "t", "y")
_FALSE = ("false", "0", "no", "off", "f", "n")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the engine was started with, as far as it changes prompts."""

    trust_request_chat_template: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    max_model_len: int | None = None
    vocab_size: int | None = None
    """Ids at or above are refused."""


def chat_form(body: Mapping[str, Any], options: ServerOptions, dialect: Dialect) -> ChatForm:
    """Raises PromptUnknown("refused") where the engine would answer 400."""
    messages = body.get("messages")
    check_messages(messages)
    check_tool_choice(body)
    generate = flag(body, "add_generation_prompt", True)
    carry_on = flag(body, "continue_final_message", False)
    if body.get("continue_final_message") and body.get("add_generation_prompt"):  # as they came: "false" counts
        refuse("continue_final_message and add_generation_prompt exclude each other")
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        refuse("unknown reasoning_effort")
    template = body.get("chat_template")
    if template is not None and not isinstance(template, str):
        refuse("chat_template must be a string")
    documents = body.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(map(_is_document, documents))):
        refuse("documents must be a list of objects with texts")
    kwargs = template_kwargs(body, options)
    if template is not None and not options.trust_request_chat_template:
        refuse("the engine does not trust templates of requests")
    if body.get("n", 1) not in (None, 1) and body.get("temperature") == 0:
        refuse("n must be 1 for greedy sampling")
    tools = tool_dicts(body.get("tools"), dialect)
    if options.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none":
        tools = None
    extra: dict[str, Any] = {
        "add_generation_prompt": generate,
        "continue_final_message": carry_on,
        "documents": documents,
        "reasoning_effort": effort,
    }
    if dialect.effort_sets_thinking and effort is not None and "enable_thinking" not in kwargs:
        extra["enable_thinking"] = effort != "none"
    base = merged(options.default_chat_template_kwargs, {"tools": tools})
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return ChatForm(
        messages=messages,  # type: ignore[arg-type] # checked above
        tools=tools,
        template_kwargs=merged(base, merged(kwargs, extra)),
        rules=TokenizeRules(
            add_special_tokens=flag(body, "add_special_tokens", False),
            **truncation(body),
            max_output_tokens=output_tokens(body, limit),
        ),
        chat_template=template or None,
        prompt_token_ids=transferred_ids(body, messages, options, dialect),
    )


def _is_document(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def template_kwargs(body: Mapping[str, Any], options: ServerOptions) -> dict[str, Any]:
    """The body's chat_template_kwargs, refused where they bring a template that the engine does not trust."""
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        refuse("chat_template_kwargs must be an object")
    if kwargs.get("chat_template") is not None and not options.trust_request_chat_template:
        refuse("the engine does not trust templates of requests")
    return kwargs


def check_tool_choice(body: Mapping[str, Any]) -> None:
    tools = body.get("tools")
    if isinstance(tools, list) and not tools:
        refuse("tools must not be empty")
    choice = body.get("tool_choice")
    if choice is None or choice == "none":
        return
    if tools is None:
        refuse("tool_choice needs tools")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            refuse("tool_choice names no function")
        names = [
            tool["function"].get("name")
            for tool in tools
            if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        ]
        if name not in names:
            refuse("tool_choice names an unknown tool")
    elif choice not in ("auto", "required"):
        refuse("unknown tool_choice")


def tool_dicts(tools: Any, dialect: Dialect) -> list[dict[str, Any]] | None:
    """Tools as the template sees them: the known keys in the engine's order, null where absent."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        refuse("tools must be a list")
    return [_tool(tool, dialect) for tool in tools]


def _tool(tool: Any, dialect: Dialect) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        refuse("a tool needs a function")
    defer = boolean(tool.get("defer_loading"), "defer_loading")
    shaped = function_dict(function, dialect, defer)
    result: dict[str, Any] = {"type": "function", "function": shaped}
    if defer is not None:
        result["defer_loading"] = defer
    if dialect.keep_extra_tool_keys:
        result |= {key: value for key, value in tool.items() if key not in result}
    return result


def function_dict(function: Mapping[str, Any], dialect: Dialect, defer_loading: Any = None) -> dict[str, Any]:
    """One function's description as the template sees it. Refused where the engine's schema does not take it."""
    name = function.get("name")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(name, str):
        refuse("a function needs a name")
    if description is not None and not isinstance(description, str):
        refuse("a function's description must be a string")
    if parameters is not None and not isinstance(parameters, dict):
        refuse("a function's parameters must be an object")
    result: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    strict = boolean(function.get("strict"), "strict")
    if strict is not None or not dialect.null_strict_dropped:
        result["strict"] = strict
    own_defer = boolean(function.get("defer_loading"), "defer_loading")
    defer = own_defer if own_defer is not None else defer_loading
    if defer is not None:
        result["defer_loading"] = defer
    if dialect.keep_extra_tool_keys:
        result |= {key: value for key, value in function.items() if key not in result}
    return result


def transferred_ids(
    body: Mapping[str, Any], messages: Any, options: ServerOptions, dialect: Dialect
) -> list[int] | None:
    """Ids in kv_transfer_params, which the engine prefills instead of the messages."""
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, dict):
        refuse("kv_transfer_params must be an object")
    ids = transfer.get("prompt_token_ids") if dialect.kv_transfer_ids and isinstance(transfer, dict) else None
    if ids is None or body.get("echo") or _has_media(messages):
        return None
    if not isinstance(ids, list) or not ids or any(type(value) is not int or value < 0 for value in ids):
        refuse("kv_transfer_params.prompt_token_ids must be a list of ids")
    if options.vocab_size is not None and max(ids) >= options.vocab_size:
        refuse("kv_transfer_params.prompt_token_ids has an id out of vocabulary")
    return ids


def _has_media(messages: Any) -> bool:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") in MEDIA_KINDS for part in content):
            return True
    return False


def truncation(body: Mapping[str, Any]) -> dict[str, Any]:
    """truncate_to and truncation_side of TokenizeRules, from a body that may ask for truncation."""
    keep = body.get("truncate_prompt_tokens")
    if keep is not None:
        keep = integer(keep, "truncate_prompt_tokens")
        if keep < -1:
            refuse("truncate_prompt_tokens must be -1 or more")
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        refuse("unknown truncation_side")
    return {"truncate_to": keep, "truncation_side": side}


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean of the body as the engine's schema reads it; null does not count as absent."""
    if name not in body:
        return default
    value = boolean(body[name], name)
    if value is None:
        refuse(f"{name} must be a boolean")
    return value


def boolean(value: Any, name: str) -> bool | None:
    """A boolean or null as the engine's schema reads it: words and 0/1 count."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    word = value.lower() if isinstance(value, str) else None
    if word not in _TRUE and word not in _FALSE:
        refuse(f"{name} must be a boolean")
    return word in _TRUE


def integer(value: Any, name: str) -> int:
    """A whole number as the engine's schema reads it: numbers in text and true count."""
    try:
        if isinstance(value, (int, str)) or (isinstance(value, float) and value.is_integer()):
            return int(value)
    except ValueError:
        pass
    return refuse(f"{name} must be an integer")


def output_tokens(body: Mapping[str, Any], name: str) -> int:
    """The number of tokens asked for under `name`; 0 where the body leaves it to the engine."""
    value = body.get(name)
    if value is None:
        return 0
    count = integer(value, name)
    if count < 1:
        refuse(f"{name} must be at least 1")
    return count
