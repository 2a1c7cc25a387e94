"""GPT-OSS, which has no use for its chat template: messages become Harmony's, ids come from its own library.

The library fetches its vocabulary from the network. It is the model's own, so it is written out from tokenizer.json for
the library to find.
"""

from __future__ import annotations

import base64
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from .anthropic import anthropic_form
from .blocks import as_token_ids
from .chat import ServerOptions, check_tool_choice, flag, tool_dicts, transferred_ids
from .conversation import check_messages
from .dialect import Dialect
from .encoded import CacheIdentity, EncodedPrompt, PromptUnknown
from .request_forms import refuse
from .sandbox import Clock
from .tokenizer_files import TokenizerFiles

_EFFORTS = {"high": "HIGH", "medium": "MEDIUM", "low": "LOW"}
_VOCABULARY = "o200k_base.tiktoken"
_BASE = "TIKTOKEN_ENCODINGS_BASE"
_BUILT_IN = ("web_search_preview", "code_interpreter", "container")
_loading = threading.Lock()


class HarmonyRenderer:
    """Chat, responses and messages bodies to ids; completions are ordinary text and not handled here."""

    source = "harmony"

    def __init__(self, files: TokenizerFiles, options: ServerOptions, dialect: Dialect, clock: Clock = datetime.now):
        """Raises PromptUnknown("unsupported") without the library, "tokenizer_missing" without its vocabulary."""
        try:
            import openai_harmony
        except ImportError:
            raise PromptUnknown("unsupported", "openai-harmony is not installed (extra: harmony)") from None
        self._library = openai_harmony
        self._options = options
        self._dialect = dialect
        self._clock = clock
        self._encoding = _load(openai_harmony, files)

    def encode(self, endpoint: str, body: Mapping[str, Any], identity: CacheIdentity) -> EncodedPrompt | None:
        """None for an endpoint that is not a conversation's. Raises PromptUnknown."""
        try:
            if endpoint.endswith("/chat/completions"):
                messages = self._chat(body)
            elif endpoint.endswith("/responses"):
                messages = self._responses(body)
            elif endpoint.endswith(("/messages", "/messages/count_tokens")):
                messages = self._anthropic(body)
            else:
                return None
            if isinstance(messages, tuple):
                return EncodedPrompt(as_token_ids(messages[0]), identity, "ids")
            ids = self._render(messages)
        except PromptUnknown:
            raise
        except Exception as error:  # the library checks what it is given with exceptions of several kinds
            raise PromptUnknown("refused", f"harmony: {type(error).__name__}") from None
        limit = self._options.max_model_len
        if limit is not None and len(ids) >= limit:
            refuse("the prompt leaves no room in the model's context")
        return EncodedPrompt(as_token_ids(ids), identity, self.source)

    def _render(self, messages: list[Any]) -> list[int]:
        library = self._library
        finals = [i for i, m in enumerate(messages) if m.author.role == library.Role.ASSISTANT and m.channel == "final"]
        last = finals[-1] if finals else -1
        kept = [m for i, m in enumerate(messages) if i >= last or m.channel != "analysis"]
        conversation = library.Conversation.from_messages(kept)
        config = library.RenderConversationConfig(auto_drop_analysis=False)
        ids: list[int] = self._encoding.render_conversation_for_completion(
            conversation, library.Role.ASSISTANT, config=config
        )
        return ids

    def _chat(self, body: Mapping[str, Any]) -> list[Any] | tuple[list[int]]:
        given = body.get("messages")
        check_messages(_shape_only(given))
        check_tool_choice(body)
        if body.get("n", 1) not in (None, 1) and body.get("temperature") == 0:
            refuse("n must be 1 for greedy sampling")
        generate = flag(body, "add_generation_prompt", True)
        if flag(body, "continue_final_message", False) and generate and "add_generation_prompt" in body:
            refuse("continue_final_message and add_generation_prompt exclude each other")
        effort = body.get("reasoning_effort")
        tools = tool_dicts(body.get("tools"), self._dialect)
        ids = transferred_ids(body, given, self._options, self._dialect)
        if ids is not None:
            return (ids,)
        return self._conversation(given, tools, effort, self._excluded(body.get("tool_choice")))

    def _anthropic(self, body: Mapping[str, Any]) -> list[Any] | tuple[list[int]]:
        form = anthropic_form(body, self._options, self._dialect, merge_inline_system=True, disabled_effort="low")
        if form.prompt_token_ids is not None:
            return (form.prompt_token_ids,)
        effort = form.template_kwargs.get("reasoning_effort")
        choice = (body.get("tool_choice") or {}).get("type")
        return self._conversation(form.messages, form.tools, effort, self._excluded(choice))

    def _excluded(self, choice: Any) -> bool:
        return self._options.exclude_tools_when_tool_choice_none and choice == "none"

    def _conversation(
        self, messages: Any, tools: list[dict[str, Any]] | None, effort: str | None, exclude_tools: bool
    ) -> list[Any]:
        instructions, rest = _leading_instructions(messages)
        functions = [tool["function"] for tool in tools or []] if not exclude_tools else []
        result = self._preamble(instructions, functions, effort)
        names = {
            call.get("id"): (call.get("function") or {}).get("name")
            for message in rest
            for call in message.get("tool_calls") or []
        }
        for message in rest:
            result += self._message(message, names)
        return result

    def _preamble(self, instructions: str | None, functions: Sequence[Mapping[str, Any]], effort: Any) -> list[Any]:
        library = self._library
        system = library.SystemContent.new()
        if effort is not None:
            if effort not in _EFFORTS:
                refuse("harmony knows high, medium and low reasoning_effort")
            system = system.with_reasoning_effort(library.ReasoningEffort[_EFFORTS[effort]])
        system = system.with_conversation_start_date(self._clock().strftime("%Y-%m-%d"))
        messages = [library.Message.from_role_and_content(library.Role.SYSTEM, system)]
        if instructions or functions:
            messages.append(self._developer(instructions, functions))
        return messages

    def _developer(self, instructions: str | None, functions: Sequence[Mapping[str, Any]] = ()) -> Any:
        library = self._library
        content = library.DeveloperContent.new()
        if instructions is not None:
            content = content.with_instructions(instructions)
        if functions:
            described = [
                library.ToolDescription.new(
                    name=function["name"],
                    description=function.get("description") or "",
                    parameters=function.get("parameters"),
                )
                for function in functions
            ]
            content = content.with_function_tools(described)
        return library.Message.from_role_and_content(library.Role.DEVELOPER, content)

    def _message(self, message: Mapping[str, Any], names: Mapping[Any, Any]) -> list[Any]:
        role = message["role"]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        thought = [self._assistant(reasoning, "analysis")] if role == "assistant" and reasoning else []
        calls = message.get("tool_calls")
        if role == "assistant" and calls:
            said = _flat(message.get("content"))
            result = [self._assistant(said, "commentary")] if said else []
            return result + thought + [self._call(call.get("function") or {}) for call in calls]
        if role == "tool":
            return [self._tool(names.get(message.get("tool_call_id", ""), ""), _flat(message.get("content")) or "")]
        if role in ("system", "developer"):
            text = _flat(message.get("content"))
            return [] if text is None else [self._developer(text)]
        contents = self._texts(message.get("content") or "")
        if role == "assistant":
            spoken = contents and contents[0].text
            made = self._library.Message.from_role_and_contents(role, contents) if spoken else None
            return thought + ([made.with_channel("final")] if made is not None else [])
        return [self._library.Message.from_role_and_contents(role, contents)]

    def _texts(self, content: Any) -> list[Any]:
        make = self._library.TextContent
        if isinstance(content, str):
            return [make(text=content)]
        return [make(text=part.get("text", "")) for part in content]

    def _assistant(self, text: str, channel: str) -> Any:
        library = self._library
        return library.Message.from_role_and_content(library.Role.ASSISTANT, text).with_channel(channel)

    def _call(self, function: Mapping[str, Any]) -> Any:
        made = self._assistant(function.get("arguments") or "", "commentary")
        return made.with_recipient(f"functions.{function.get('name', '')}").with_content_type("json")

    def _tool(self, name: Any, content: Any) -> Any:
        library = self._library
        author = library.Author.new(library.Role.TOOL, f"functions.{name}")
        made = library.Message.from_author_and_content(author, content)
        # the engine's release of the library puts the recipient behind the channel here, the public one before it
        return made.with_channel("commentary to=assistant")

    def _responses(self, body: Mapping[str, Any]) -> list[Any] | tuple[list[int]]:
        given = body.get("input")
        if not isinstance(given, (str, list)):
            refuse("input must be a string or a list of items")
        if body.get("previous_response_id"):
            raise PromptUnknown("unsupported", "previous_response_id is unknown here")
        functions = []
        for tool in body.get("tools") or []:
            if tool.get("type") == "function":
                functions.append(tool)
            elif tool.get("type") not in _BUILT_IN:
                refuse("unknown type of tool")
        instructions = body.get("instructions")
        items: Any = given
        if instructions is None and isinstance(given, list):
            instructions, items = _leading_instructions(given)
        reasoning = body.get("reasoning")
        effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
        result = self._preamble(instructions, functions, effort)
        if isinstance(items, str):
            made = self._library.Message.from_role_and_content(self._library.Role.USER, items)
            return [*result, made]
        names: dict[Any, Any] = {}
        for item in items:
            result += self._item(item, names)
        return result

    def _item(self, item: Mapping[str, Any], names: dict[Any, Any]) -> list[Any]:
        library = self._library
        kind = item.get("type", "message")
        if kind == "function_call_output":
            if item.get("call_id") not in names:
                refuse("a function's output without its call")
            return [self._tool(names[item["call_id"]], item.get("output"))]
        if kind == "reasoning":
            content = item.get("content")
            if not content:
                return []
            return [self._assistant("\n".join(part["text"] for part in content), "analysis")]
        if kind == "function_call":
            names[item.get("call_id")] = item.get("name")
            return [self._call(item)]
        if kind != "message":
            refuse("unsupported input item")
        role, content = item["role"], item["content"]
        if role == "assistant" and isinstance(content, list) and "type" not in item:
            refuse("an assistant item with parts must be a message item")
        if role in ("system", "developer"):
            text = _flat(content)
            return [self._developer(text)] if text else []
        made = library.Message.from_role_and_contents(role, self._texts(content))
        return [made.with_channel("final") if role == "assistant" else made]


def _leading_instructions(messages: Sequence[Any]) -> tuple[str | None, list[Any]]:
    if messages and messages[0].get("role") in ("system", "developer"):
        return _flat(messages[0].get("content")), list(messages[1:])
    return None, list(messages)


def _flat(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    known = [text for text in texts if text is not None]
    return "".join(known) if known else None


def _shape_only(messages: Any) -> Any:
    """What the engine checks before it hands messages over: not a tool's content, nor calls of custom tools."""
    if not isinstance(messages, list):
        return messages
    seen = []
    for message in messages:
        if isinstance(message, dict):
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                kept = [c for c in calls if not (isinstance(c, dict) and isinstance(c.get("custom"), dict))]
                message = {**message, "tool_calls": kept}
            if isinstance(message.get("content"), dict):
                message = {**message, "content": ""}
        seen.append(message)
    return seen


def _load(library: Any, files: TokenizerFiles) -> Any:
    """The library's encoding, its vocabulary taken from the model's files where they have it."""
    name = library.HarmonyEncodingName.HARMONY_GPT_OSS
    model = (files.read_tokenizer() or {}).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        if not isinstance(vocabulary, dict):
            return library.load_harmony_encoding(name)
        with _loading, tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _VOCABULARY).write_bytes(_ranks(vocabulary))
            before = os.environ.get(_BASE)
            os.environ[_BASE] = folder  # the library has no other way to be told
            try:
                return library.load_harmony_encoding(name)
            finally:
                if before is None:
                    del os.environ[_BASE]
                else:
                    os.environ[_BASE] = before
    except Exception as error:
        raise PromptUnknown("tokenizer_missing", f"harmony vocabulary: {type(error).__name__}") from None


def _ranks(vocabulary: Mapping[str, int]) -> bytes:
    """The vocabulary as lines of base64 bytes and rank; byte-level tokenizers write bytes as printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    lines = []
    for token, rank in sorted(vocabulary.items(), key=lambda item: item[1]):
        raw = bytes(byte_of[character] for character in token)
        lines.append(base64.b64encode(raw) + b" " + str(rank).encode())
    return b"\n".join(lines) + b"\n"
