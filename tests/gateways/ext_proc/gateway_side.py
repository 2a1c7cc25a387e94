"""Envoy's side of one stream: builders for what it sends, readers for what it is told."""

from __future__ import annotations

import json
import time
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from litellm_prefix_router.decision import Decision, Receipt, Source
from litellm_prefix_router.gateways.ext_proc.actions import Place, Reply
from litellm_prefix_router.gateways.ext_proc.directory import Directory
from litellm_prefix_router.gateways.ext_proc.health import HealthBook
from litellm_prefix_router.gateways.ext_proc.stream import Stream
from litellm_prefix_router.settings import Settings

ENDPOINTS = [f"10.0.0.{i}:8000" for i in range(1, 5)]
IDS = [f"http://{endpoint}" for endpoint in ENDPOINTS]
KEY = "x-gateway-destination-endpoint"


class Wire:
    """One stream, its health book, and builders for what Envoy sends."""

    def __init__(self, duplex: bool = False, response: str | None = None, pools: Any = None, **envoy: Any) -> None:
        pools = pools or {"chat": {"model": "tiny", "endpoints": ENDPOINTS, **envoy.pop("pool", {})}}
        top = envoy.pop("top", {})
        settings = Settings(redis_url="memory://", envoy={"pools": pools, **envoy}, **top)
        self.health = HealthBook(time.monotonic)
        self.stream = Stream(settings, Directory(settings), self.health)
        self.duplex = duplex
        self.response = response or ("FULL_DUPLEX_STREAMED" if duplex else "STREAMED")
        self.first = True

    def send(self, message: pb.ProcessingRequest) -> list[Any]:
        if self.first:
            mode = "FULL_DUPLEX_STREAMED" if self.duplex else "BUFFERED"
            message.protocol_config.request_body_mode = ProcessingMode.BodySendMode.Value(mode)
            message.protocol_config.response_body_mode = ProcessingMode.BodySendMode.Value(self.response)
            self.first = False
        return self.stream.receive(message)

    def headers(self, end: bool = False, metadata: dict[str, Any] | None = None, **more: str) -> list[Any]:
        message = pb.ProcessingRequest()
        values = {":method": "POST", ":path": "/v1/chat/completions?x=1", "x-request-id": "r1", **more}
        for key, value in values.items():
            header = HeaderValue(key=key.replace("_", "-"), raw_value=value.encode())
            message.request_headers.headers.headers.append(header)
        message.request_headers.end_of_stream = end
        for namespace, fields in (metadata or {}).items():
            message.metadata_context.filter_metadata[namespace].update(fields)
        return self.send(message)

    def body(self, content: Any, end: bool = True) -> list[Any]:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.send(pb.ProcessingRequest(request_body=pb.HttpBody(body=raw, end_of_stream=end)))

    def answer(self, status: int = 200, end: bool = False, kind: str = "text/event-stream", **served: str) -> list[Any]:
        message = pb.ProcessingRequest()
        for key, value in {":status": str(status), "content-type": kind}.items():
            message.response_headers.headers.headers.append(HeaderValue(key=key, raw_value=value.encode()))
        message.response_headers.end_of_stream = end
        if "attribute" in served:
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served["attribute"]})
        if "metadata" in served:
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{KEY}-served": served["metadata"]})
        return self.send(message)

    def answer_body(self, raw: bytes, end: bool = False) -> list[Any]:
        return self.send(pb.ProcessingRequest(response_body=pb.HttpBody(body=raw, end_of_stream=end)))

    def place(self, content: Any = None, **headers: Any) -> Place:
        """All of a request; returns what the router is asked."""
        self.headers(**headers)
        (place,) = self.body({"model": "tiny", "messages": []} if content is None else content)
        assert isinstance(place, Place)
        return place


def decide(place: Place, *order: str) -> Decision:
    ranking = order or tuple(place.request.candidates)
    receipt = Receipt("r1", place.request.pool, "least-cost", Source.EXACT, "ok", ranking[0], 100, 6, 96)
    return Decision(ranking[0], ranking, receipt, reservation=1)


def named(reply: Reply) -> str:
    return reply.message.dynamic_metadata["envoy.lb"][KEY]


def header_set(mutation: Any, name: str) -> str | None:
    found = [h.header.raw_value.decode() for h in mutation.set_headers if h.header.key == name]
    return found[0] if found else None
