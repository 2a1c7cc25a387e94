"""Chat templates: compiled once, then rendered as the engines' library does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta

from .content_format import ContentFormat, detect_content_format
from .encoded import PromptUnknown
from .sandbox import OutOfBounds, TemplateSandbox

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_TAKEN = ("conversation", "self", "model_config", "return_assistant_tokens_mask")
"""Arguments of the engine's own functions on the way to the template."""
_NAMED = frozenset({"add_generation_prompt", "continue_final_message", "documents", "tools"})


class ChatTemplate:
    """One template, compiled. Safe to use from several threads at once."""

    def __init__(self, source: str, sandbox: TemplateSandbox, *, macro_aware: bool = True) -> None:
        """Raises PromptUnknown("refused") where `source` does not compile: the engine would refuse the request."""
        self.source = source
        self._sandbox = sandbox
        try:
            self.variables = jinja2.meta.find_undeclared_variables(sandbox.parse(source))
            self._template = sandbox.compile_bounded(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            raise PromptUnknown("refused", f"chat template: {describe(error, source)}") from None
        self.content_format: ContentFormat = detect_content_format(source, sandbox, macro_aware=macro_aware)
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        *,
        time_limit_s: float = 2.0,
        size_limit: int = 64 << 20,
    ) -> str:
        """The prompt's text. `kwargs` are the request's merged template arguments.

        `time_limit_s` bounds wall time and `size_limit` characters; past either: PromptUnknown("template_error").
        What the engine would refuse: PromptUnknown("refused").
        """
        if not messages:
            raise PromptUnknown("refused", "the conversation is empty")
        generate = kwargs.get("add_generation_prompt", False)
        carry_on = kwargs.get("continue_final_message", False)
        documents = kwargs.get("documents")
        if carry_on and generate:
            raise PromptUnknown("refused", "continue_final_message and add_generation_prompt exclude each other")
        if documents is not None and not all(isinstance(document, dict) for document in documents):
            raise PromptUnknown("refused", "documents must be objects")
        extra = {name: value for name, value in kwargs.items() if name in self.variables and name not in _NAMED}
        if "messages" in extra or any(kwargs.get(name) is not None for name in _TAKEN):
            raise PromptUnknown("refused", "chat_template_kwargs may not replace what the engine passes itself")
        final = ""
        if carry_on:
            messages, final = self._tagged(messages, carry_on)
        context = {
            **special_tokens,
            **extra,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": generate,
        }
        try:
            text = self._sandbox.run(self._template, context, time_limit_s, size_limit)
        except OutOfBounds as bound:
            raise PromptUnknown("template_error", str(bound)) from None
        except (RecursionError, MemoryError) as error:
            raise PromptUnknown("template_error", type(error).__name__) from None
        except Exception as error:  # whatever a template raises, the engine answers 400 with it
            raise PromptUnknown("refused", f"chat template: {describe(error, self.source)}") from None
        return _cut_at_tag(text, final) if carry_on else text

    def _tagged(self, messages: Sequence[Mapping[str, Any]], field: Any) -> tuple[list[Mapping[str, Any]], str]:
        name = field if isinstance(field, str) else "content"
        last = dict(messages[-1])
        content = last.get(name)
        if content is None:
            raise PromptUnknown("refused", "the final message has nothing to continue")
        if name not in self.source:
            raise PromptUnknown("refused", f"the chat template has no {name!r} to continue")
        if isinstance(content, list):
            parts = list(content)
            for index in range(len(parts) - 1, -1, -1):
                if "text" in parts[index]:
                    final = parts[index]["text"]
                    parts[index] = {**parts[index], "text": final + _TAG}
                    break
            else:
                raise PromptUnknown("refused", "the final message has no text to continue")
            last[name] = parts
        else:
            final = str(content)
            last[name] = final + _TAG
        return [*messages[:-1], last], final


def _cut_at_tag(text: str, final: str) -> str:
    tag = _TAG.strip()
    if final.strip() not in text or tag not in text:
        raise PromptUnknown("refused", "the final message does not appear in the rendered chat")
    position = text.rindex(tag)
    if text.startswith(_TAG, position):
        return text[:position]
    return text[:position].rstrip()


def describe(error: BaseException, source: str) -> str:
    """An error in one short phrase: its message only where the template says it, for it may quote a prompt."""
    text = str(error)
    return text[:200] if text and text in source else type(error).__name__
