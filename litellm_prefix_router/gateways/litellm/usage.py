"""What an engine reported about its cache, from LiteLLM's response objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cached_tokens_of(response: Any) -> int | None:
    """What the engine reported, from a LiteLLM response of any API; None if it did not."""
    usage = getattr(response, "usage", None)
    if usage is None and isinstance(response, Mapping):
        usage = response.get("usage")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = _get(usage, name)
        cached = _get(details, "cached_tokens")
        if isinstance(cached, int):
            return cached
    return None


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
