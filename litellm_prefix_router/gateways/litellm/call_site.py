"""Which API a routing call serves, and which router asks: LiteLLM tells its strategies neither.

The proxy keeps the client's URL; for the SDK the names of the router's calling methods tell.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
OTHER = "/"

_MAX_FRAMES = 12
_URL_ENDS = (
    ("/chat/completions", CHAT),
    ("/completions", COMPLETIONS),
    ("/responses", RESPONSES),
    ("/messages", MESSAGES),
    ("/embeddings", EMBEDDINGS),
)
_CALLERS = {
    "_acompletion": CHAT,
    "_completion": CHAT,
    "_atext_completion": COMPLETIONS,
    "_text_completion": COMPLETIONS,
    "_ageneric_api_call_with_fallbacks_responses_attempt": RESPONSES,
    "_ageneric_api_call_with_fallbacks_anthropic_messages_attempt": MESSAGES,
    "_aembedding": EMBEDDINGS,
    "_embedding": EMBEDDINGS,
}


@dataclass(frozen=True, slots=True)
class CallSite:
    """The API path of the call and, if it was found among the callers, the router."""

    path: str
    router: Any = None


def path_of_url(request_kwargs: Mapping[str, Any] | None) -> str | None:
    """API path by the client's URL, None outside the proxy."""
    original = (request_kwargs or {}).get("proxy_server_request")
    url = original.get("url") if isinstance(original, Mapping) else None
    if not isinstance(url, str):
        return None
    path = url.partition("?")[0].rstrip("/")
    return next((api for end, api in _URL_ENDS if path.endswith(end)), OTHER)


def find_call_site(request_kwargs: Mapping[str, Any] | None, router_class: type) -> CallSite:
    """Looks at the calling frames, nearest first; call it from a strategy's method itself."""
    path, router = path_of_url(request_kwargs), None
    frame = sys._getframe(2)
    for _ in range(_MAX_FRAMES):
        if path is not None and router is not None:
            break
        if path is None:
            path = _CALLERS.get(frame.f_code.co_name)
        if router is None:
            caller = frame.f_locals.get("self")
            router = caller if isinstance(caller, router_class) else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return CallSite(path or OTHER, router)
