"""The LiteLLM gateway: a routing strategy that config.yaml switches on.

`prefix_router` is the instance for `litellm_settings.callbacks: litellm_prefix_router.prefix_router`; its settings come
from `callback_settings.prefix_router`. It is made when it is first asked for, since LiteLLM has read them by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import LiteLLMPrefixRouter

    prefix_router: LiteLLMPrefixRouter

__all__ = ["LiteLLMPrefixRouter", "prefix_router"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import startup, strategy

    globals()["LiteLLMPrefixRouter"] = strategy.LiteLLMPrefixRouter
    if name == "prefix_router":
        globals()[name] = startup.from_proxy_config()
    return globals()[name]
