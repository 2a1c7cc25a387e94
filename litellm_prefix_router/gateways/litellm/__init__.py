"""The LiteLLM gateway: a routing strategy that config.yaml switches on.

`prefix_router` is the instance for `litellm_settings.callbacks: litellm_prefix_router.prefix_router`; its settings come
from `callback_settings.prefix_router`.
"""

from .strategy import LiteLLMPrefixRouter, from_proxy_config

prefix_router = from_proxy_config()

__all__ = ["LiteLLMPrefixRouter", "prefix_router"]
