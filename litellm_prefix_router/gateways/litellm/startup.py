"""The instance for LiteLLM's proxy: stops a start with unusable settings, and attaches to the proxy's router early."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from litellm.router import Router

from ...service import check_settings
from ...settings import SettingsError

if TYPE_CHECKING:
    from .strategy import LiteLLMPrefixRouter

_WATCH_S = 0.2


def proxy_router() -> Router | None:
    server = sys.modules.get("litellm.proxy.proxy_server")
    router = getattr(server, "llm_router", None)
    return router if isinstance(router, Router) else None


def from_proxy_config() -> LiteLLMPrefixRouter:
    """The instance for config.yaml. In the proxy, settings that cannot be used stop it here with one line."""
    from .strategy import LiteLLMPrefixRouter

    instance = LiteLLMPrefixRouter()
    if "litellm.proxy.proxy_server" in sys.modules:
        _stop_if_unusable(instance)
        threading.Thread(target=_attach_when_ready, args=(instance,), name="prefix-router-attach", daemon=True).start()
    return instance


def _stop_if_unusable(instance: LiteLLMPrefixRouter) -> None:
    try:
        check_settings(instance.settings)
    except SettingsError as error:
        sys.stderr.write(f"\nprefix-router: {error}\n")
        sys.stderr.flush()
        # an exception here would be one of LiteLLM's start-up tracebacks
        os._exit(2)


def _attach_when_ready(instance: LiteLLMPrefixRouter) -> None:
    """Attach as soon as the proxy has its router, so that tokenizers load before the first request."""
    waiting = threading.Event()
    while not waiting.wait(_WATCH_S):
        router = proxy_router()
        if router is None:
            continue
        try:
            instance.attach(router)
        except SettingsError as error:
            sys.stderr.write(f"\nprefix-router: {error}\n")
            sys.stderr.flush()
            os._exit(2)
        return
