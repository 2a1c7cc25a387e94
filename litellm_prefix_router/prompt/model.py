"""One model as its engine serves it: body in, token ids out. All of it synchronous and without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..settings import ModelSettings
from .anthropic import anthropic_form
from .blocks import TokenIds, as_token_ids
from .chat import ServerOptions, chat_form
from .completions import completion_prompt
from .content_format import ContentFormat
from .conversation import (
    MEDIA_PLACEHOLDER,
    developer_to_system,
    normalize_messages,
    trailing_assistant_to_user,
)
from .dialect import Dialect
from .encoded import CacheIdentity, EncodedPrompt, PromptUnknown
from .harmony import HarmonyRenderer
from .media import digest
from .mistral import MistralRenderer
from .probes import disabled_thinking_effort, system_must_be_first
from .request_forms import ChatForm, MediaPart, TokenizeRules, refuse
from .responses import responses_form
from .sandbox import Clock, TemplateSandbox
from .template import ChatTemplate
from .tokenizer import ModelTokenizer, TokenizerStore
from .tokenizer_files import TokenizerFiles

_MAX_REQUEST_TEMPLATES = 32
_FORMATS: dict[str, ContentFormat] = {"string": "string", "openai": "openai"}


class EngineModel:
    """Renders and tokenizes requests of one model the way its engine does."""

    def __init__(
        self,
        files: TokenizerFiles,
        settings: ModelSettings,
        dialect: Dialect,
        tokenizers: TokenizerStore,
        *,
        clock: Clock = datetime.now,
        max_model_len: int | None = None,
        lora_modules: frozenset[str] = frozenset(),
    ) -> None:
        """`max_model_len`: context length in tokens where the engine's differs from what its files say.

        Raises PromptUnknown("tokenizer_missing").
        """
        self.dialect = dialect
        self.lora_modules = lora_modules | frozenset(settings.lora_modules)
        self._files = files
        self._settings = settings
        self._clock = clock
        self._tokenizer: ModelTokenizer | None = None
        self._options = ServerOptions(
            trust_request_chat_template=settings.trust_request_chat_template,
            default_chat_template_kwargs=settings.default_chat_template_kwargs,
            exclude_tools_when_tool_choice_none=settings.exclude_tools_when_tool_choice_none,
            max_model_len=settings.max_model_len or max_model_len or files.max_model_len,
            vocab_size=files.vocab_size,
        )
        mode = settings.tokenizer_mode
        self._mistral: MistralRenderer | None = None
        self._harmony: HarmonyRenderer | None = None
        if mode == "mistral" or (mode == "auto" and not files.tokenizer_bytes and files.has_tekken):
            self._mistral = MistralRenderer(files.folder, self._options, dialect)
            self.source = self._mistral.source
        else:
            self._tokenizer = tokenizers.get(files)
            self._options = replace(self._options, vocab_size=self._tokenizer.vocab_size)
            self.source = self._tokenizer.source
        if mode == "harmony" or (mode == "auto" and files.model_type == "gpt_oss" and dialect.engine == "vllm"):
            self._harmony = HarmonyRenderer(files, self._options, dialect, clock)
            self.source = self._harmony.source
        self._sandbox = TemplateSandbox(clock)
        self._templates: dict[str, ChatTemplate] = {}
        self._server_template = _template_text(settings.chat_template)
        self._merge_inline_system: bool | None = None
        self._disabled_effort: str | None = None

    @property
    def tokenizer(self) -> ModelTokenizer:
        """Text to ids; not there where another library makes ids from messages."""
        if self._tokenizer is None:
            raise PromptUnknown("unsupported", "this model's tokenizer takes messages, not text")
        return self._tokenizer

    def encode(self, path: str, body: Mapping[str, Any]) -> EncodedPrompt:
        """Raises PromptUnknown."""
        salt = body.get("cache_salt")
        if salt is not None and not _is_text(salt):
            refuse("cache_salt must be a text that is not empty")
        name = body.get("model")
        identity = CacheIdentity(lora=name if name in self.lora_modules else None, cache_salt=salt)
        endpoint = path.split("?", 1)[0].rstrip("/")
        if endpoint.endswith("/render"):
            endpoint = endpoint.removesuffix("/render")
        if self._mistral is not None:
            return self._mistral.encode(endpoint, body, identity)
        if self._harmony is not None:
            found = self._harmony.encode(endpoint, body, identity)
            if found is not None:
                return found
        if endpoint.endswith("/chat/completions"):
            return self._chat(chat_form(body, self._options, self.dialect), identity)
        if endpoint.endswith("/completions"):
            return self._completion(body, identity)
        if endpoint.endswith("/responses"):
            return self._responses(body, identity)
        if endpoint.endswith(("/messages", "/messages/count_tokens")):
            return self._chat(self._anthropic_form(body), identity)
        raise PromptUnknown("not_a_prompt", endpoint)

    def _anthropic_form(self, body: Mapping[str, Any]) -> ChatForm:
        if self._merge_inline_system is None:
            choices: tuple[list[Any] | None, ...] = (None, [])
            sources = {self._resolve(None, {}, tools) for tools in choices}
            self._merge_inline_system = any(source is None or system_must_be_first(source) for source in sources)
        if self._disabled_effort is None:
            self._disabled_effort = disabled_thinking_effort(lambda probe: self.encode("/v1/chat/completions", probe))
        return anthropic_form(
            body,
            self._options,
            self.dialect,
            merge_inline_system=self._merge_inline_system,
            disabled_effort=self._disabled_effort,
        )

    def _responses(self, body: Mapping[str, Any], identity: CacheIdentity) -> EncodedPrompt:
        if body.get("previous_response_id"):
            # the earlier turns stand between this request's instructions and its input, and only the engine has them
            unknown = {**body, "input": MEDIA_PLACEHOLDER}
            form = responses_form(unknown, self._options, self.dialect)
            tail = (digest("previous_response_id", body["previous_response_id"]),)
            text, _ = self._render(form)
            return self._up_to(
                text, text.find(MEDIA_PLACEHOLDER), form.rules, identity, tail, "previous_response_id is unknown here"
            )
        return self._chat(responses_form(body, self._options, self.dialect), identity)

    def _completion(self, body: Mapping[str, Any], identity: CacheIdentity) -> EncodedPrompt:
        embeds = body.get("prompt_embeds")
        if embeds:
            first = embeds[0] if isinstance(embeds, list) else embeds
            return EncodedPrompt(
                as_token_ids([]),
                identity,
                "none",
                complete=False,
                note="prompt embeddings",
                opaque_tail=(digest("prompt_embeds", first),),
            )
        prompt, rules = completion_prompt(body, self._options, prefix_tokens=self.tokenizer.adds_special_tokens)
        if isinstance(prompt, str):
            return self._from_text(prompt, rules, identity)
        ids = self._fitted(as_token_ids(prompt), replace(rules, add_special_tokens=False))
        return EncodedPrompt(ids, identity, "ids")

    def _chat(self, form: ChatForm, identity: CacheIdentity) -> EncodedPrompt:
        if form.prompt_token_ids is not None:
            return EncodedPrompt(as_token_ids(form.prompt_token_ids), identity, "ids")
        text, position = self._render(form)
        if not form.media:
            return self._from_text(text, form.rules, identity)
        rest = text[position:].replace(MEDIA_PLACEHOLDER, "")
        tail = (*(medium.digest for medium in form.media), digest("text", rest))
        return self._up_to(text, position, form.rules, identity, tail, f"{form.media[0].kind} in the prompt")

    def _render(self, form: ChatForm) -> tuple[str, int]:
        """The prompt's text, and where the first medium stands in it (its length without any)."""
        kwargs = dict(form.template_kwargs)
        tools = kwargs.pop("tools", None)
        template = self._template(form.chat_template, kwargs, tools)
        content_format = self._format(form.chat_template, kwargs, tools)
        media: list[MediaPart] = []
        messages = normalize_messages(form.messages, content_format, self.dialect, media)
        form.media = media
        if media and not self._files.takes_media:
            refuse("the model takes text only")
        has_developer = any(message["role"] == "developer" for message in messages)
        if has_developer and self.dialect.developer_to_system and not template.knows_developer:
            messages = developer_to_system(messages)
        if self.dialect.trailing_assistant_to_user and not kwargs.get("continue_final_message"):
            messages = trailing_assistant_to_user(messages)
        text = self._run(template, messages, tools, kwargs)
        if not media:
            return text, len(text)
        if content_format == "string":
            return text, max(text.find(MEDIA_PLACEHOLDER), 0)
        marked = _with_first_medium_as_text(messages)
        return text, _common_length(text, self._run(template, marked, tools, kwargs))

    def _run(self, template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, kwargs: dict[str, Any]) -> str:
        special = self.tokenizer.special_tokens
        try:
            return template.render(messages, tools, kwargs, special)
        except PromptUnknown:
            if not (self.dialect.bare_tools_on_error and tools):
                raise
            return template.render(messages, [tool.get("function", tool) for tool in tools], kwargs, special)

    def _resolve(self, requested: str | None, kwargs: Mapping[str, Any], tools: Any) -> str | None:
        """The template's text: the request's, the server's, the kwargs', the processor's, the tokenizer's."""
        named = self._files.templates
        given = requested or self._server_template or kwargs.get("chat_template")
        if given is not None:
            by_name = len(named) > 1  # the only template has no name
            return (named.get(given, given) if by_name else given) if isinstance(given, str) else None
        if tools is None and self._files.processor_template is not None:
            return self._files.processor_template
        if tools is not None and "tool_use" in named:
            return named["tool_use"]
        return named.get("default")

    def _template(self, requested: str | None, kwargs: Mapping[str, Any], tools: Any) -> ChatTemplate:
        source = self._resolve(requested, kwargs, tools)
        if source is None:
            refuse("the model has no chat template")
        found = self._templates.get(source)
        if found is None:
            found = ChatTemplate(source, self._sandbox, macro_aware=self.dialect.macro_aware_format)
            if len(self._templates) >= _MAX_REQUEST_TEMPLATES:
                self._templates.clear()
            self._templates[source] = found
        return found

    def _format(self, requested: str | None, kwargs: Mapping[str, Any], tools: Any) -> ContentFormat:
        chosen = _FORMATS.get(self._settings.chat_template_content_format)
        if chosen is not None:
            return chosen
        # a template that comes in the kwargs is rendered, yet the format is that of the one it replaces
        without = {name: value for name, value in kwargs.items() if name != "chat_template"}
        if self._resolve(requested, without, tools) is None:
            return "string"
        return self._template(requested, without, tools).content_format

    def _from_text(self, text: str, rules: TokenizeRules, identity: CacheIdentity) -> EncodedPrompt:
        ids = self.tokenizer.encode(text, add_special_tokens=rules.add_special_tokens)
        if not len(ids):
            refuse("the prompt is empty")
        return EncodedPrompt(self._fitted(ids, rules), identity, self.tokenizer.source)

    def _up_to(
        self,
        text: str,
        position: int,
        rules: TokenizeRules,
        identity: CacheIdentity,
        tail: tuple[bytes, ...],
        note: str,
    ) -> EncodedPrompt:
        ids = self.tokenizer.encode(text[: max(position, 0)], add_special_tokens=rules.add_special_tokens)
        known = self.tokenizer.until_last_added_token(ids)
        return EncodedPrompt(known, identity, self.tokenizer.source, complete=False, note=note, opaque_tail=tail)

    def _fitted(self, ids: TokenIds, rules: TokenizeRules) -> TokenIds:
        limit = self._options.max_model_len
        if limit is not None and rules.max_output_tokens > limit:
            refuse("more output tokens than the model's context")
        keep = rules.truncate_to
        if keep is not None and keep > 0 and limit is not None and keep > limit:
            refuse("truncate_prompt_tokens is more than the model's context")
        if keep == -1:
            keep = None if limit is None else max(0, limit - 1 if rules.max_output_tokens else limit)
        if keep is not None and keep < len(ids):
            if keep == 0:
                refuse("the prompt is empty")
            if rules.truncation_side == "right":
                ids = ids[:keep]
            elif rules.truncation_side == "left":
                ids = ids[len(ids) - keep :]
            else:
                ids = self.tokenizer.truncate(ids, keep, add_special_tokens=rules.add_special_tokens)
        if limit is not None and len(ids) >= limit:
            refuse("the prompt leaves no room in the model's context")
        return ids


def _is_text(value: Any) -> bool:
    """Is it a string that is not empty, without lone surrogates?"""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _template_text(value: str | None) -> str | None:
    """A template given as text, or as a file that has it."""
    if not value:
        return None
    if not any(mark in value for mark in "{}\n"):
        path = Path(value).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except OSError:
            pass  # perhaps the name of one of the model's own templates
    return value


def _with_first_medium_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for index, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, list):
            continue
        for place, part in enumerate(content):
            if part.get("type") not in ("text", "tool_reference"):
                marked = [*content[:place], {"type": "text", "text": MEDIA_PLACEHOLDER}, *content[place + 1 :]]
                return [*messages[:index], {**message, "content": marked}, *messages[index + 1 :]]
    return messages


def _common_length(left: str, right: str) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
