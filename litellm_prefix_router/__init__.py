"""litellm-prefix-router: places each LLM request on the replica where serving it costs least.

`prefix_router` is the instance that LiteLLM's config.yaml names under `litellm_settings.callbacks`. It and
everything heavy are imported on first use, so that `import litellm_prefix_router` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .decision import Decision, Receipt, Source
    from .gateways.litellm import LiteLLMPrefixRouter, prefix_router
    from .request import RoutingRequest
    from .router import PrefixRouter
    from .settings import Settings

__all__ = [
    "Decision",
    "LiteLLMPrefixRouter",
    "PrefixRouter",
    "Receipt",
    "RoutingRequest",
    "Settings",
    "Source",
    "prefix_router",
]

_WHERE = {
    "Decision": "decision",
    "Receipt": "decision",
    "Source": "decision",
    "LiteLLMPrefixRouter": "gateways.litellm",
    "prefix_router": "gateways.litellm",
    "RoutingRequest": "request",
    "PrefixRouter": "router",
    "Settings": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value
