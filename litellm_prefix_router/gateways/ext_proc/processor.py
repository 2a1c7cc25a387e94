"""Drives the state machine of each stream: reads from Envoy, asks the router, writes the answers, reports outcomes.

A stream never fails a request by itself: what breaks in here is logged and counted, and Envoy is told to go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from ...decision import Decision
from ...fleet.pool import address_of
from ...router import PrefixRouter
from ...settings import Settings
from . import wire
from .actions import Action, Finished, FirstToken, HangUp, Place, Reply, Served, Unplaced
from .directory import Directory
from .health import HealthBook
from .meters import Meters
from .stream import Stream

logger = logging.getLogger("litellm_prefix_router")


class Processor:
    """The `Process` method of envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(
        self, settings: Settings, router: PrefixRouter, directory: Directory, health: HealthBook, meters: Meters
    ) -> None:
        self.settings = settings
        self.router = router
        self.directory = directory
        self.health = health
        self.meters = meters

    def handler(self) -> Any:
        """The method, for a gRPC server."""
        handler = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(wire.SERVICE, {"Process": handler})

    async def process(self, _: Any, context: Any) -> None:
        """One stream: one request."""
        named = next((value for key, value in context.invocation_metadata() if key == wire.POOL_METADATA), None)
        stream = Stream(self.settings, self.directory, self.health, named)
        outcome = _Outcome(self)
        self.meters.streams.inc()
        try:
            while True:
                message = await context.read()
                if message is grpc.aio.EOF:
                    return
                try:
                    actions = stream.receive(message)
                except Exception:
                    self.meters.errors.inc()
                    logger.exception("a message from Envoy was not understood; the request goes on without a choice")
                    actions = stream.failed(message)
                if not await self._perform(actions, stream, outcome, context.write):
                    return
        finally:
            self.meters.streams.dec()
            outcome.follow(stream.closed())

    async def _perform(
        self, actions: list[Action], stream: Stream, outcome: _Outcome, write: Callable[[Any], Any]
    ) -> bool:
        """Whether the stream goes on."""
        if actions and isinstance(actions[-1], Place):
            decision = await self.router.route(actions.pop().request)  # type: ignore[union-attr]
            if decision.refused:
                self.router.finished(decision)
                actions += stream.shed("every replica has too much work ahead")
            else:
                outcome.decision = decision
                actions += stream.placed(decision)
        # outcomes first: a write is where the stream may be cut, and what is known by then must not be lost
        outcome.follow(actions)
        for action in actions:
            if isinstance(action, Reply):
                await write(action.message)
            elif isinstance(action, HangUp):
                return False
        return True


class _Outcome:
    """What became of one request, told to the router and to the health book."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self.decision: Decision | None = None
        self._moved = False

    def follow(self, actions: list[Action]) -> None:
        """Report those of the actions that are outcomes."""
        for action in actions:
            self._one(action)

    def _one(self, action: Action) -> None:
        if isinstance(action, Unplaced):
            self._processor.meters.unplaced.labels(action.reason).inc()
        if self.decision is None:
            return
        if isinstance(action, Served):
            self._served(action)
        elif isinstance(action, FirstToken):
            self._processor.router.first_token(self.decision)
        elif isinstance(action, HangUp):
            self._leave()
        elif isinstance(action, Finished):
            # what another replica had cached says nothing about the prediction for the choice
            self._processor.router.finished(self.decision, None if self._moved else action.cached_tokens)
            self.decision = None

    def _served(self, served: Served) -> None:
        assert self.decision is not None
        processor, choice = self._processor, self.decision.replica_id
        if served.replica_id is not None:
            processor.health.responded(address_of(served.replica_id), served.status)
        if served.replica_id == choice:
            return
        if served.replica_id is None and served.status < 500:
            return
        processor.health.unreachable(address_of(choice))
        processor.meters.moved.labels(choice).inc()
        if served.replica_id is not None:
            self._moved = True
            self.decision = processor.router.moved(self.decision, served.replica_id)

    def _leave(self) -> None:
        """The response is not followed: the prefill is taken to last as long as it should, and the request likewise."""
        decision, self.decision = self.decision, None
        if decision is None:
            return
        router = self._processor.router
        seconds = decision.queued_tokens / router.rates.rate(decision.replica_id)
        asyncio.get_running_loop().call_later(seconds, router.finished, decision)
