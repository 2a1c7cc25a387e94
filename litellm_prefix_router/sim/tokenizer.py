"""From request body to prompt tokens and from tokens to text, as the engine's front end does it.

Written apart from the project's `prompt/` package on purpose: it is the other side, and must not share its mistakes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


class BadPrompt(Exception):
    """The engine would answer 400; the text says why."""


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


class SimTokenizer:
    """Tokenizer and chat template of a model folder. Loads in its constructor (tens of ms for the tiny model)."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template_file = folder / "chat_template.jinja"
        text = template_file.read_text(encoding="utf-8") if template_file.exists() else config.get("chat_template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(text) if text else None
        self._special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        eos = self._special["eos_token"]
        self.eos_id: int | None = self._tokenizer.token_to_id(eos) if eos else None
        self.vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.size = max(self.vocabulary.values()) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, number: int) -> str | None:
        """A token as the vocabulary spells it."""
        text: str | None = self._tokenizer.id_to_token(number)
        return text

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat body (messages, tools and the options that change the prompt). Raises BadPrompt."""
        add_special = body.get("add_special_tokens", False)
        return self.encode(self.render(body), add_special_tokens=bool(add_special))

    def render(self, body: Mapping[str, Any]) -> str:
        """Prompt text of a chat body. Raises BadPrompt."""
        if self._template is None:
            raise BadPrompt("this model has no chat template")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadPrompt("messages must be a non-empty list")
        conversation = [_message(message) for message in messages]
        continued = bool(body.get("continue_final_message", False))
        generation = bool(body.get("add_generation_prompt", True))
        if continued and generation and "add_generation_prompt" in body:
            raise BadPrompt("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, Mapping):
            raise BadPrompt("chat_template_kwargs must be an object")
        try:
            text = self._template.render(
                **{name: value for name, value in self._special.items() if value is not None},
                messages=conversation,
                tools=_tools(body["tools"]) if body.get("tools") is not None else None,
                documents=body.get("documents"),
                add_generation_prompt=generation and not continued,
                **options,
            )
        except (TemplateError, TypeError, AttributeError) as error:
            raise BadPrompt(f"the chat template refused the messages: {error}") from None
        if continued:
            text = _cut_behind(text, conversation[-1]["content"])
        return text


def _cut_behind(text: str, last: str) -> str:
    """The prompt up to the end of its last message, so that the model goes on with it.

    Spaces at the message's end stay where the template kept them.
    """
    bare = last.strip()
    start = text.rfind(bare)
    if start < 0:
        raise BadPrompt("the chat template does not show the last message, so it cannot be continued")
    kept = text.startswith(last, start)
    return text[: start + len(last if kept else bare)]


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token


def _message(message: Any) -> dict[str, Any]:
    """A message as templates see it: text content, the engine's names of roles, arguments as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadPrompt("each message must be an object with a role")
    role = message["role"]
    out: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    thoughts = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thoughts, str):
        out["reasoning"] = out["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return out


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadPrompt("content must be text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in TEXT_PARTS:
            texts.append(str(part.get("text", part.get(part["type"], ""))))
        else:
            raise BadPrompt("this model takes text only")
    return "\n".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadPrompt("each tool call must have a function")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments) if arguments else {}
        except ValueError:
            raise BadPrompt("the arguments of a tool call must be JSON") from None
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "function": function}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not tools:
        raise BadPrompt("tools must be a non-empty list")
    out = []
    for tool in tools:
        if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
            raise BadPrompt("each tool must have a function")
        function = tool["function"]
        known = {name: function.get(name) for name in ("name", "description", "parameters")}
        extra = {name: value for name, value in function.items() if name not in known}
        out.append({"type": tool.get("type", "function"), "function": {**known, **extra}})
    return out
