"""The instance for LiteLLM's proxy: stops a start with unusable settings, and attaches to the proxy's router early."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from litellm.router import Router

from ...service import check_settings
from ...settings import SettingsError

if TYPE_CHECKING:
    from .strategy import LiteLLMPrefixRouter

_WATCH_S = 0.05
_TURN_S = 0.002
"""LiteLLM's start gives the event loop few turns between making its router and serving: none may be missed."""
_TURNS = 4
"""What LiteLLM's scheduler starts at once, and drops where it is a second late, comes first; to accept and answer a
request takes more turns than that."""


def proxy_router() -> Router | None:
    server = sys.modules.get("litellm.proxy.proxy_server")
    router = getattr(server, "llm_router", None)
    return router if isinstance(router, Router) else None


def from_proxy_config() -> LiteLLMPrefixRouter:
    """The instance for config.yaml. In the proxy, settings that cannot be used stop it here with one line."""
    from .strategy import LiteLLMPrefixRouter

    instance = LiteLLMPrefixRouter()
    if "litellm.proxy.proxy_server" in sys.modules:
        try:
            check_settings(instance.settings)
        except SettingsError as error:
            _stop_the_proxy(error)
        warm, loop = threading.Event(), _starting_loop()
        if loop is not None:
            _hold_back(loop, warm, instance.settings.startup_wait_s)
        watch = threading.Thread(target=_attach_and_warm_up, args=(instance, loop, warm), name="prefix-router-attach")
        watch.daemon = True
        watch.start()
    return instance


def _stop_the_proxy(error: SettingsError) -> NoReturn:
    sys.stderr.write(f"\nprefix-router: {error}\n")
    sys.stderr.flush()
    # an exception here would be one of LiteLLM's start-up tracebacks
    os._exit(2)


def _starting_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of a proxy that does not serve yet; None elsewhere."""
    try:
        return asyncio.get_running_loop() if proxy_router() is None else None
    except RuntimeError:
        return None


def _attach_and_warm_up(
    instance: LiteLLMPrefixRouter, loop: asyncio.AbstractEventLoop | None, warm: threading.Event
) -> None:
    """Attach as soon as the proxy has its router, and say when decisions can be exact."""
    pause = threading.Event()
    while (router := proxy_router()) is None:
        pause.wait(_WATCH_S)
    try:
        instance.attach(router)
        while instance.service.warming:
            pause.wait(_WATCH_S)
        if loop is not None:  # begins when the loop goes on, and is over before LiteLLM has read a request
            asyncio.run_coroutine_threadsafe(instance.service.open_index(), loop)
    except SettingsError as error:
        _stop_the_proxy(error)
    finally:
        warm.set()


def _hold_back(loop: asyncio.AbstractEventLoop, warm: threading.Event, wait_s: float) -> None:
    """Have the proxy serve nobody before it is warm, or before `wait_s` is over.

    LiteLLM has no hook that could delay its readiness. An event loop that stands still does: probes and requests wait,
    and a load balancer keeps sending to the other gateways.
    """
    until = loop.time() + wait_s

    def stand_still(turns: int = _TURNS) -> None:
        if proxy_router() is None:
            if loop.time() < until:
                loop.call_later(_TURN_S, stand_still)
        elif turns:
            loop.call_soon(stand_still, turns - 1)
        else:
            warm.wait(wait_s)

    loop.call_soon(stand_still)
