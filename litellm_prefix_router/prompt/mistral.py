"""Mistral's own tokenizers (tekken.json, --tokenizer-mode mistral), by the library that the engine uses for them.

The library makes ids from messages without any text in between, so nothing is cached by segment here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .anthropic import anthropic_form
from .blocks import TokenIds, as_token_ids
from .chat import ServerOptions, chat_form
from .completions import completion_prompt
from .conversation import parsed_arguments
from .dialect import Dialect
from .encoded import CacheIdentity, EncodedPrompt, PromptUnknown
from .media import MEDIA_KINDS
from .request_forms import ChatForm, TokenizeRules, refuse
from .responses import responses_form

_FILE = "tekken.json"
_ID_LENGTH = 9


class MistralRenderer:
    """Every endpoint's bodies to ids."""

    source = "mistral"

    def __init__(self, folder: Path, options: ServerOptions, dialect: Dialect) -> None:
        """Raises PromptUnknown("unsupported") without the library, "tokenizer_missing" without tekken.json."""
        try:
            from mistral_common.protocol.instruct.request import ChatCompletionRequest
            from mistral_common.protocol.instruct.validator import ValidationMode
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError:
            raise PromptUnknown("unsupported", "mistral-common is not installed (extra: mistral)") from None
        self._request = ChatCompletionRequest
        self._dialect = dialect
        try:
            self._tokenizer = _from_folder(MistralTokenizer, folder, ValidationMode.test)
        except PromptUnknown:
            raise
        except Exception as error:
            raise PromptUnknown("tokenizer_missing", f"{_FILE}: {type(error).__name__}") from None
        self._text = self._tokenizer.instruct_tokenizer.tokenizer
        self._options = ServerOptions(
            trust_request_chat_template=False,
            default_chat_template_kwargs={},
            exclude_tools_when_tool_choice_none=options.exclude_tools_when_tool_choice_none,
            max_model_len=options.max_model_len,
            vocab_size=int(self._text.n_words),
        )

    def encode(self, endpoint: str, body: Mapping[str, Any], identity: CacheIdentity) -> EncodedPrompt:
        """Raises PromptUnknown."""
        if endpoint.endswith("/chat/completions"):
            form = chat_form(body, self._options, self._dialect)
        elif endpoint.endswith("/completions"):
            return self._completion(body, identity)
        elif endpoint.endswith("/responses"):
            if body.get("previous_response_id"):
                raise PromptUnknown("unsupported", "previous_response_id is unknown here")
            form = responses_form(body, self._options, self._dialect)
        elif endpoint.endswith(("/messages", "/messages/count_tokens")):
            form = anthropic_form(body, self._options, self._dialect, merge_inline_system=True, disabled_effort="low")
        else:
            raise PromptUnknown("not_a_prompt", endpoint)
        if form.prompt_token_ids is not None:
            return EncodedPrompt(as_token_ids(form.prompt_token_ids), identity, "ids")
        if not endpoint.endswith("/responses"):
            if body.get("chat_template") is not None or body.get("chat_template_kwargs") is not None:
                refuse("this tokenizer takes no chat template")
            _shorten_ids(form)
        plain = replace(form.rules, add_special_tokens=False)  # messages bring their own
        return EncodedPrompt(self._fitted(as_token_ids(self._conversation(form)), plain), identity, self.source)

    def _conversation(self, form: ChatForm) -> list[int]:
        messages = [_renamed(message, self._dialect) for message in form.messages]
        if not messages:
            refuse("the conversation is empty")
        if any(_has_media(message) for message in messages):
            raise PromptUnknown("unsupported", "images and audio with this tokenizer")
        kwargs = form.template_kwargs
        carry_on = bool(kwargs.get("continue_final_message"))
        is_assistant = messages[-1].get("role") == "assistant"
        if carry_on and not is_assistant:
            refuse("only an assistant message can be continued")
        if kwargs.get("add_generation_prompt") and is_assistant:
            refuse("the last message is the assistant's")
        more: dict[str, Any] = {}
        if int(str(self._text.version.value).removeprefix("v").split("m")[0]) >= 15:
            more["reasoning_effort"] = kwargs.get("reasoning_effort")
        try:
            request = self._request.from_openai(
                messages=messages, tools=form.tools, continue_final_message=carry_on, **more
            )
            return list(self._tokenizer.encode_chat_completion(request).tokens)
        except Exception as error:  # the library answers what it does not take with exceptions of many kinds
            raise PromptUnknown("refused", f"mistral-common: {type(error).__name__}") from None

    def _completion(self, body: Mapping[str, Any], identity: CacheIdentity) -> EncodedPrompt:
        prompt, rules = completion_prompt(body, self._options, prefix_tokens=True)
        if not isinstance(prompt, str):
            plain = replace(rules, add_special_tokens=False)
            return EncodedPrompt(self._fitted(as_token_ids(prompt), plain), identity, "ids")
        try:
            ids = self._text.encode(prompt, bos=rules.add_special_tokens, eos=False)
        except UnicodeEncodeError:
            refuse("the text has lone surrogates")
        return EncodedPrompt(self._fitted(as_token_ids(ids), rules), identity, self.source)

    def _fitted(self, ids: TokenIds, rules: TokenizeRules) -> TokenIds:
        limit = self._options.max_model_len
        if limit is not None and rules.max_output_tokens > limit:
            refuse("more output tokens than the model's context")
        keep = rules.truncate_to
        if keep == -1:
            keep = None if limit is None else max(0, limit - 1 if rules.max_output_tokens else limit)
        if keep is not None and keep < len(ids):
            if keep == 0:
                refuse("the prompt is empty")
            if rules.truncation_side == "right":
                ids = ids[:keep]
            elif rules.truncation_side is None and rules.add_special_tokens:
                ids = np.concatenate([ids[:1], ids[len(ids) - keep + 1 :]])  # the first stays
            else:
                ids = ids[len(ids) - keep :]
        if limit is not None and len(ids) >= limit:
            refuse("the prompt leaves no room in the model's context")
        if not len(ids):
            refuse("the prompt is empty")
        return np.ascontiguousarray(ids)


def _from_folder(library: Any, folder: Path, mode: Any) -> Any:
    if (folder / _FILE).is_file():
        return library.from_file(str(folder / _FILE), mode=mode)
    packed = folder / f"{_FILE}.gz"
    if not packed.is_file():
        raise PromptUnknown("tokenizer_missing", f"no {_FILE} in {folder.name}")
    import gzip

    with tempfile.TemporaryDirectory() as scratch:
        unpacked = Path(scratch) / _FILE
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
        return library.from_file(str(unpacked), mode=mode)


def _renamed(message: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """As the engine hands a message on: without the older name of `reasoning`, calls as a list, arguments parsed."""
    result = dict(message)
    older = result.pop("reasoning_content", None)
    if older is not None and result.get("reasoning") is None:
        result["reasoning"] = older
    if result.get("role") == "assistant":
        result["tool_calls"] = [_call(call, dialect) for call in result.get("tool_calls") or []]
    return result


def _call(call: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    function = call["function"]
    parsed = {**function, "arguments": parsed_arguments(function.get("arguments"), dialect)}
    return {key: value for key, value in call.items() if key != "_order"} | {"function": parsed}


def _shorten_ids(form: ChatForm) -> None:
    """Call ids count with their last nine characters."""
    shortened = []
    for message in form.messages:
        if message.get("tool_calls"):
            calls = [{**call, "id": call["id"][-_ID_LENGTH:]} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if isinstance(message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": message["tool_call_id"][-_ID_LENGTH:]}
        shortened.append(message)
    form.messages = shortened


def _has_media(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type") in MEDIA_KINDS for part in content)
