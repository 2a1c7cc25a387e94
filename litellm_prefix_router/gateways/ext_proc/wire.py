"""Names and messages of the ext_proc protocol, as Envoy and the endpoint-picker protocol 1.0 define them.

Builders for everything that the processor answers, and readers for what it is told. No state, no decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.struct_pb2 import Struct

Request: TypeAlias = Any
"""envoy.service.ext_proc.v3.ProcessingRequest"""
Response: TypeAlias = Any
"""envoy.service.ext_proc.v3.ProcessingResponse"""

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = f"/{SERVICE}/Process"
FILTER = "envoy.filters.http.ext_proc"

LB_NAMESPACE = "envoy.lb"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"

POOL_METADATA = "x-prefix-router-pool"
"""gRPC initial metadata by which a route's configuration names the pool."""

NONE = ProcessingMode.NONE
STREAMED = ProcessingMode.STREAMED
BUFFERED = ProcessingMode.BUFFERED
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED

CHUNK_BYTES = 62_000
"""Of a body that is sent back: below 64 KiB, which gateways take as the limit of one message."""


def header_map(headers: Any, wanted: Collection[str]) -> dict[str, str]:
    """Values of the `wanted` names (lower case) in an HttpHeaders message; of a repeated one the first."""
    found: dict[str, str] = {}
    for item in headers.headers.headers:
        key = item.key
        if key in wanted and key not in found:
            raw = item.raw_value
            found[key] = raw.decode("utf-8", "replace") if raw else item.value
    return found


def metadata_at(message: Request, path: Iterable[str]) -> Any:
    """A value of the request's forwarded filter metadata: namespace, then keys. None where there is nothing."""
    namespace, *keys = path
    if namespace not in message.metadata_context.filter_metadata:
        return None
    value: Any = message.metadata_context.filter_metadata[namespace]
    for key in keys:
        if not isinstance(value, Struct) or key not in value.fields:
            return None
        inner = value.fields[key]
        kind = inner.WhichOneof("kind")
        value = getattr(inner, kind) if kind else None
    return value


def attribute(message: Request, name: str) -> str | None:
    """An attribute that Envoy was told to send (`request_attributes`, `response_attributes`), as text."""
    if FILTER not in message.attributes:
        return None
    fields = message.attributes[FILTER].fields
    return (fields[name].string_value or None) if name in fields else None


def endpoint_list(value: Any) -> tuple[str, ...]:
    """ip:port strings of a metadata value: a list, or text with commas."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    values = getattr(value, "values", ())
    return tuple(item.string_value for item in values if item.string_value)


# --- answers ------------------------------------------------------------------------------------------------------


def go_on(kind: str) -> Response:
    """Continue without a change, for a message of that kind ("request_headers", "response_body", ...)."""
    response = pb.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response


def destination(response: Response, endpoints: str) -> None:
    """Name the endpoints in the response's dynamic metadata, which only Envoy's own configuration can read."""
    # by hand: Struct.update takes several times as long
    response.dynamic_metadata.fields[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = endpoints


def set_headers(common: Any, values: Mapping[str, str]) -> None:
    """Overwrite or add headers in a CommonResponse."""
    for name, value in values.items():
        common.header_mutation.set_headers.append(
            HeaderValueOption(
                header=HeaderValue(key=name, raw_value=value.encode("utf-8", "replace")),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
        )


def body_chunks(kind: str, body: bytes, end_of_stream: bool) -> list[Response]:
    """A body sent back in full duplex ("request_body" or "response_body"); the last chunk may end the stream."""
    pieces = [body[i : i + CHUNK_BYTES] for i in range(0, len(body), CHUNK_BYTES)]
    if end_of_stream and not pieces:
        pieces = [b""]
    answers = []
    for position, piece in enumerate(pieces, 1):
        response = pb.ProcessingResponse()
        streamed = getattr(response, kind).response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = end_of_stream and position == len(pieces)
        answers.append(response)
    return answers


def immediate(status: int, message: str) -> Response:
    """End the request here with an OpenAI-shaped error."""
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = status
    kind = "rate_limit_error" if status == 429 else "service_unavailable"
    body = f'{{"error":{{"message":"{message}","type":"{kind}","code":{status}}}}}'
    response.immediate_response.body = body.encode()
    set_headers_option = HeaderValueOption(
        header=HeaderValue(key="content-type", raw_value=b"application/json"),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    response.immediate_response.headers.set_headers.append(set_headers_option)
    return response
