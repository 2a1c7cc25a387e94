"""A completions body as its first prompt: text or token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .chat import ServerOptions, flag, integer, truncation
from .encoded import PromptUnknown
from .request_forms import TokenizeRules, refuse


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
    rules = TokenizeRules(
        add_special_tokens=flag(body, "add_special_tokens", True),
        **truncation(body),
        max_output_tokens=integer(body.get("max_tokens"), "max_tokens"),
    )
    if isinstance(prompt, str):
        return prompt, rules
    if not isinstance(prompt, list) or not prompt:
        refuse("the prompt must be a string, ids or a list of either")
    if all(type(value) is int for value in prompt):
        return _ids(prompt, options), rules
    if all(isinstance(value, str) for value in prompt):
        if "" in prompt and not (prefix_tokens and rules.add_special_tokens):
            refuse("a prompt is empty")
        return prompt[0], rules
    if not all(isinstance(value, list) and value and all(type(item) is int for item in value) for value in prompt):
        refuse("the prompt must be a string, ids or a list of either")
    checked = [_ids(value, options) for value in prompt]
    return checked[0], rules


def _ids(ids: list[int], options: ServerOptions) -> list[int]:
    if min(ids) < 0 or (options.vocab_size is not None and max(ids) >= options.vocab_size):
        refuse("a token id is out of vocabulary")
    return ids
