"""LiteLLM's hooks and strategy methods on top of the core router.

The strategy is installed with the official `set_custom_routing_strategy`, again whenever LiteLLM replaces its router.
Nothing here decides: it turns a call into a RoutingRequest, a Decision into a deployment, and the ends of requests
into releases of load.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.router import Router
from litellm.types.router import CustomRoutingStrategyBase

from ...decision import RECEIPT_HEADER, Decision
from ...fleet.pool import RANK_HEADER
from ...request import RoutingRequest
from ...service import RouterService
from ...settings import Settings, SettingsError, load_settings
from ..report_mode import take_out_report_mode
from . import call_site
from .call_site import find_call_site
from .deployments import DeploymentMap, deployment_replica, read_deployments, signature_of
from .router_view import choose_async, choose_sync
from .sent_body import sent_request
from .startup import proxy_router
from .tickets import Tickets, note_of
from .usage import cached_tokens_of

logger = logging.getLogger("litellm_prefix_router")

_REREAD_S = 1.0
_instances = itertools.count(1)


class _Bound(CustomRoutingStrategyBase):  # type: ignore[misc]
    """The strategy of one router: LiteLLM does not tell a strategy which router asks."""

    def __init__(self, owner: LiteLLMPrefixRouter, router: Router) -> None:
        self._owner = owner
        self._router = weakref.ref(router)

    async def async_get_available_deployment(self, model: str, *args: Any, **kwargs: Any) -> Any:
        call = _arguments(model, args, kwargs)
        path = find_call_site(call["request_kwargs"], Router).path
        return await self._owner._choose_async(self._router(), path, call)

    def get_available_deployment(self, model: str, *args: Any, **kwargs: Any) -> Any:
        call = _arguments(model, args, kwargs)
        path = find_call_site(call["request_kwargs"], Router).path
        return self._owner._choose_sync(self._router(), path, call)


class LiteLLMPrefixRouter(CustomLogger, CustomRoutingStrategyBase):  # type: ignore[misc]
    """Prefix routing for LiteLLM's proxy (as a callback) and for its Router SDK.

    SDK: ``LiteLLMPrefixRouter(load_settings({...})).attach(router)``, or
    ``router.set_custom_routing_strategy(LiteLLMPrefixRouter(...))``.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        # LiteLLM takes callbacks of one class for the same unless some public attribute tells them apart
        self.instance_id = f"prefix-router-{next(_instances)}"
        self._given = settings
        self._lock = threading.RLock()
        self._service: RouterService | None = None
        self._tickets: Tickets | None = None
        self._maps: weakref.WeakKeyDictionary[Router, tuple[DeploymentMap, Any, float]] = weakref.WeakKeyDictionary()

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        if self._given is None:
            self._given = load_settings(_callback_settings(), where="callback_settings.prefix_router")
        return self._given

    @property
    def service(self) -> RouterService:
        """The running core; started on first use."""
        with self._lock:
            if self._service is None:
                self._service = RouterService(self.settings)
                self._tickets = Tickets(self._service.router, self.settings.reservation_ttl_s)
                self._service.every_tick.append(self._tickets.expire)
                self._service.start()
            return self._service

    @property
    def tickets(self) -> Tickets:
        """Requests in flight."""
        _ = self.service
        assert self._tickets is not None
        return self._tickets

    def attach(self, router: Router) -> None:
        """Become the router's strategy, if it is not ours yet. Cheap enough for every request."""
        installed = router.__dict__.get("async_get_available_deployment")
        if getattr(installed, "__self__", None).__class__ is _Bound:
            return
        with self._lock:
            router.set_custom_routing_strategy(_Bound(self, router))
            if self not in litellm.callbacks:
                litellm.logging_callback_manager.add_litellm_callback(self)
        self._deployments(router)

    def close(self) -> None:
        """Stop background work. The router falls back to load alone if it is still used."""
        with self._lock:
            litellm.logging_callback_manager.remove_callback_from_all_lists(self)
            if self._service is not None:
                self._service.stop()

    def _deployments(self, router: Router) -> DeploymentMap:
        """The router's pools, read again when its model list changed. An edit in place is seen within a second: to
        look at each deployment for each request would cost a large fleet more than the decision."""
        model_list = router.model_list
        shape = (id(model_list), len(model_list))
        now = time.monotonic()
        known, seen_shape, seen_at = self._maps.get(router, (None, None, 0.0))
        if known is not None and shape == seen_shape and now - seen_at < _REREAD_S:
            return known
        if known is None or known.signature != signature_of(model_list):
            with self._lock:
                known = read_deployments(model_list, self.settings)
                self._maps[router] = (known, shape, now)
                pools = {name: pool for entry in self._maps.values() for name, pool in entry[0].pools.items()}
                self.service.set_pools(pools)
        self._maps[router] = (known, shape, now)
        return known

    # --- strategy -------------------------------------------------------------------------------------------------

    async def async_get_available_deployment(self, model: str, *args: Any, **kwargs: Any) -> Any:
        """For routers that were given this object itself: find the router that asks, and bind to it."""
        call = _arguments(model, args, kwargs)
        site = find_call_site(call["request_kwargs"], Router)
        self._bind(site.router)
        return await self._choose_async(site.router, site.path, call)

    def get_available_deployment(self, model: str, *args: Any, **kwargs: Any) -> Any:
        """The synchronous twin."""
        call = _arguments(model, args, kwargs)
        site = find_call_site(call["request_kwargs"], Router)
        self._bind(site.router)
        return self._choose_sync(site.router, site.path, call)

    def _bind(self, router: Router | None) -> None:
        if router is None:
            raise RuntimeError("prefix router: no LiteLLM Router asks; use LiteLLMPrefixRouter.attach(router)")
        self.attach(router)

    async def _choose_async(self, router: Any, path: str, call: dict[str, Any]) -> Any:
        async def choose(group: str, deployments: Sequence[Any], request_kwargs: dict[str, Any]) -> Any:
            prepared = self._prepare(router, group, path, deployments, request_kwargs, call)
            if prepared is None:
                return None
            request, by_replica = prepared
            decision = await self.service.router.route(request)
            return self._settle(decision, request, by_replica, request_kwargs)

        return await choose_async(router, choose, **call)

    def _choose_sync(self, router: Any, path: str, call: dict[str, Any]) -> Any:
        def choose(group: str, deployments: Sequence[Any], request_kwargs: dict[str, Any]) -> Any:
            prepared = self._prepare(router, group, path, deployments, request_kwargs, call)
            if prepared is None:
                return None
            request, by_replica = prepared
            decision = self.service.route_sync(request)
            return self._settle(decision, request, by_replica, request_kwargs)

        return choose_sync(router, choose, **call)

    def _prepare(
        self,
        router: Router,
        group: str,
        path: str,
        deployments: Sequence[Any],
        request_kwargs: dict[str, Any],
        call: Mapping[str, Any],
    ) -> tuple[RoutingRequest, dict[str, Any]] | None:
        """The request in the core's terms and deployment by replica id; None: leave it to the stock strategy."""
        try:
            known = self._deployments(router)
            # aliases and teams' models are asked for by other names than their deployments have
            name = group if group in known.pools else str(deployments[0].get("model_name"))
            failed = self.tickets.retire_previous(request_kwargs)
            pool = known.pools.get(name)
            if pool is None:
                return None
            by_replica: dict[str, Any] = {}
            for deployment in deployments:
                address = deployment_replica(deployment, known)
                for replica in pool.at(address) if address is not None else ():
                    by_replica.setdefault(replica, deployment)
            if not by_replica:
                return None
            first = next(iter(by_replica.values()))
            params = first.get("litellm_params") or {}
            note = None
            try:
                sent_path, body = sent_request(
                    path,
                    params.get("model", ""),
                    messages=call.get("messages"),
                    input=call.get("input"),
                    request_kwargs=request_kwargs,
                    deployment_params=params,
                )
            except Exception as error:
                sent_path, body, note = call_site.OTHER, {}, f"body not understood ({type(error).__name__})"
            request = RoutingRequest(
                pool=name,
                path=sent_path,
                body=body,
                candidates=tuple(by_replica),
                request_id=str(request_kwargs.get("litellm_call_id") or ""),
                avoid=failed,
                note=note,
            )
            return request, by_replica
        except SettingsError as error:
            logger.error("prefix routing is off for this call: %s", error)
            return None

    def _settle(
        self, decision: Decision, request: RoutingRequest, by_replica: dict[str, Any], request_kwargs: dict[str, Any]
    ) -> Any:
        ticket = self.tickets.open(request_kwargs, decision, request.avoid)
        logging_object = request_kwargs.get("litellm_logging_obj")
        if logging_object is not None:
            # the last net: a request that ends without any hook takes its logging object along
            weakref.finalize(logging_object, self.tickets.close_number, ticket.number).atexit = False
        return _for_rank(by_replica[decision.replica_id], decision.replica_id)

    # --- hooks ----------------------------------------------------------------------------------------------------

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> Any:
        router = proxy_router()
        if router is not None:
            self.attach(router)
        take_out_report_mode(data)
        return data

    async def async_post_call_response_headers_hook(
        self,
        data: dict[str, Any],
        user_api_key_dict: Any,
        response: Any,
        request_headers: dict[str, str] | None = None,
        litellm_call_info: dict[str, Any] | None = None,
    ) -> dict[str, str] | None:
        note = note_of(data)
        ticket = self.tickets.find(data)
        if ticket is not None and hasattr(response, "__aiter__"):
            # the router has read a stream's first chunk by now; a whole response would measure its decoding too
            self.service.router.first_token(ticket.decision)
        receipt = note.get("receipt")
        return {RECEIPT_HEADER: str(receipt)} if receipt and self.settings.receipt_header else None

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        ticket = self.tickets.find(request_data)
        if ticket is None:
            async for chunk in response:
                yield chunk
            return
        first = True
        ended = False
        try:
            async for chunk in response:
                if first:
                    self.service.router.first_token(ticket.decision)
                    first = False
                yield chunk
            ended = True
        finally:
            self.tickets.released(ticket)
            if not ended:  # the client went away, or the replica did: nothing more will be reported
                self.tickets.close(ticket)

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        if getattr(response, "usage", None) is None or hasattr(response, "completion_stream"):
            return  # a stream, of which only the headers are here
        # LiteLLM's logging, which comes later, does not load the replica
        self.tickets.released(self.tickets.find(request_data))

    async def async_post_call_failure_deployment_hook(
        self, request_data: Mapping[str, object], exception: Exception, call_type: Any, **more: Any
    ) -> None:
        self.tickets.released(self.tickets.find(request_data))

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Exception, user_api_key_dict: Any, *args: Any, **kw: Any
    ) -> None:
        self.tickets.close(self.tickets.find(request_data))

    async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._succeeded(kwargs, response_obj)

    def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._succeeded(kwargs, response_obj)

    async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.tickets.released(self.tickets.find(kwargs))

    def log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self.tickets.released(self.tickets.find(kwargs))

    def _succeeded(self, kwargs: Mapping[str, Any], response: Any) -> None:
        # LiteLLM's own response cache answers with the usage of the first time: it says nothing about a replica
        reported = None if kwargs.get("cache_hit") else cached_tokens_of(response)
        self.tickets.close(self.tickets.find(kwargs), reported)


def _for_rank(deployment: Any, replica_id: str) -> Any:
    """The deployment, with the header that pins a data-parallel rank where the replica is one of several."""
    _, several, rank = replica_id.partition("#")
    if not several:
        return deployment
    params = deployment["litellm_params"]
    headers = {**(params.get("extra_headers") or {}), RANK_HEADER: rank}
    return {**deployment, "litellm_params": {**params, "extra_headers": headers}}


def _arguments(model: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A strategy call's arguments by name; LiteLLM passes most of them by keyword."""
    call = dict(zip(("messages", "input", "specific_deployment", "request_kwargs"), args, strict=False), **kwargs)
    call["model"] = model
    if call.get("request_kwargs") is None:
        call["request_kwargs"] = {}
    return call


def _callback_settings() -> Mapping[str, Any]:
    section = (getattr(litellm, "callback_settings", None) or {}).get("prefix_router")
    return section if section is not None else {}
