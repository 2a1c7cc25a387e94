"""A completions body as its first prompt: text or token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .chat import ServerOptions, flag, output_tokens, truncation
from .encoded import PromptUnknown
from .request_forms import TokenizeRules, refuse

_DEFAULT_OUTPUT_TOKENS = 16


def completion_prompt(
    body: Mapping[str, Any], options: ServerOptions, *, prefix_tokens: bool
) -> tuple[str | list[int], TokenizeRules]:
    """The first prompt of the body and how it is tokenized. `prefix_tokens`: the tokenizer adds special tokens itself,
    so that an empty text is still a prompt.

    Raises PromptUnknown: "refused" where the engine would answer 400 (for any prompt of a list), "unsupported" for
    prompt embeddings, which have no token ids.
    """
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if embeds:
        raise PromptUnknown("unsupported", "prompt embeddings")
    if body.get("suffix") is not None:
        refuse("suffix is only for models that fill in the middle")
    if prompt is None or prompt == "":
        refuse("the prompt is empty")
    only_echo = body.get("echo") and body.get("max_tokens") == 0
    rules = TokenizeRules(
        add_special_tokens=flag(body, "add_special_tokens", True),
        **truncation(body),
        max_output_tokens=0 if only_echo else output_tokens(body, "max_tokens") or _DEFAULT_OUTPUT_TOKENS,
    )
    if isinstance(prompt, str):
        return prompt, rules
    if not isinstance(prompt, list) or not prompt:
        refuse("the prompt must be a string, ids or a list of either")
    if _are_ids(prompt):
        return _ids(prompt, options), rules
    if all(isinstance(value, str) for value in prompt):
        if "" in prompt and not (prefix_tokens and rules.add_special_tokens):
            refuse("a prompt is empty")
        return prompt[0], rules
    if not all(isinstance(value, list) and value and _are_ids(value) for value in prompt):
        refuse("the prompt must be a string, ids or a list of either")
    checked = [_ids(value, options) for value in prompt]
    return checked[0], rules


def _are_ids(values: list[Any]) -> bool:
    if all(type(value) is int for value in values):
        return True
    # the engine's schema takes true and 1.0 for numbers
    return all(isinstance(value, int) or (isinstance(value, float) and value.is_integer()) for value in values)


def _ids(values: list[Any], options: ServerOptions) -> list[int]:
    ids = values if all(type(value) is int for value in values) else [int(value) for value in values]
    if min(ids) < 0 or (options.vocab_size is not None and max(ids) >= options.vocab_size):
        refuse("a token id is out of vocabulary")
    return ids
