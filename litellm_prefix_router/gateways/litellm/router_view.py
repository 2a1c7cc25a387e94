"""A view of a LiteLLM router in which one step, the choice among healthy deployments, is ours.

The stock routing method does much more than choose: pre-routing hooks, aliases, cooldowns, tags, budgets, order,
routing groups, phase spans. It runs unchanged, but with this view as its `self`: methods that the view overrides are
ours, all else is the router's own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

Deployments = Any
"""What LiteLLM calls healthy deployments: a list of dicts, or one dict where only that one may be used."""

STRATEGY_NAME = "prefix-router"


class RouterView:
    """Delegates to `router`, binding the router's class functions to itself so that they meet the overrides."""

    def __init__(self, router: Any, overrides: dict[str, Callable[..., Any]]) -> None:
        object.__setattr__(self, "_router", router)
        object.__setattr__(self, "_overrides", overrides)

    def __getattr__(self, name: str) -> Any:
        override = self._overrides.get(name)
        if override is not None:
            return override
        function = _method(self._router.__class__, name)
        return getattr(self._router, name) if function is None else types.MethodType(function, self)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._router, name, value)


@lru_cache(maxsize=4096)
def _method(router_class: type, name: str) -> types.FunctionType | None:
    """The class's plain method of that name; None for static and class methods, properties and data."""
    found = inspect.getattr_static(router_class, name, None)
    return found if isinstance(found, types.FunctionType) else None


async def choose_async(
    router: Any, choose: Callable[[str, Sequence[Any], dict[str, Any]], Awaitable[Any]], **call: Any
) -> Any:
    """The stock asynchronous method with our choice. `choose(model, deployments, request_kwargs)` gets the healthy
    deployments after every filter and answers one of them, or None to leave the choice to the stock strategy."""

    async def healthy(**kwargs: Any) -> Deployments:
        found = await router_class.async_get_healthy_deployments(view, **kwargs)
        if not isinstance(found, list) or not found:
            return found
        chosen = await choose(kwargs["model"], found, kwargs.get("request_kwargs") or {})
        return found if chosen is None else [chosen]

    router_class = type(router)
    view = RouterView(router, {"async_get_healthy_deployments": healthy})
    return await router_class.async_get_available_deployment(view, **call)


def choose_sync(router: Any, choose: Callable[[str, Sequence[Any], dict[str, Any]], Any], **call: Any) -> Any:
    """The same for the synchronous method, which filters by itself and asks its selector last."""
    router_class = type(router)
    if not hasattr(router_class, "_get_routing_context") or not hasattr(router_class, "_select_deployment_sync"):
        return router_class.get_available_deployment(router, **call)
    stock: list[tuple[Any, Any]] = []

    def context(model: str, request_kwargs: Any = None) -> tuple[str, None]:
        stock.append(router._get_routing_context(model, request_kwargs))
        return STRATEGY_NAME, None

    def select(*, model: str, healthy_deployments: Any, request_kwargs: Any = None, **rest: Any) -> Any:
        chosen = choose(model, healthy_deployments, request_kwargs or {})
        if chosen is not None:
            return chosen
        return router._select_deployment_sync(
            **{**rest, "strategy": stock[-1][0], "selector": stock[-1][1]},
            model=model,
            healthy_deployments=healthy_deployments,
            request_kwargs=request_kwargs,
        )

    overrides: dict[str, Callable[..., Any]] = {"_get_routing_context": context, "_select_deployment_sync": select}
    return router_class.get_available_deployment(RouterView(router, overrides), **call)
