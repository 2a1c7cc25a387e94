"""The forms that a request takes on its way to token ids, whichever API it came in by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from .encoded import PromptUnknown


def refuse(detail: str) -> NoReturn:
    """The engine would answer 400: there is no prompt to place by."""
    raise PromptUnknown("refused", detail)


@dataclass(frozen=True, slots=True)
class TokenizeRules:
    """How the prompt's text becomes ids for this endpoint and body."""

    add_special_tokens: bool
    truncate_to: int | None = None
    """Tokens to keep; -1: as many as the model takes beside one of output."""
    truncation_side: str | None = None
    max_output_tokens: int = 0


@dataclass(slots=True)
class ChatForm:
    """A request as a chat completion, before its messages are normalised."""

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    """What the template is called with, defaults merged in; `tools` among them where the request's kwargs name it."""
    rules: TokenizeRules
    chat_template: str | None = None
    """The template that the request brings along, if it does."""
    prompt_token_ids: list[int] | None = None
    """Ids that replace the prompt (kv_transfer_params)."""
    media: list[MediaPart] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One image, audio, video or embedding in the messages, by what tells it apart from others."""

    kind: str
    digest: bytes


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, except where it says null or "auto"."""
    result = dict(base)
    for name, value in over.items():
        if value is not None and not (isinstance(value, str) and value == "auto"):
            result[name] = value
    return result
