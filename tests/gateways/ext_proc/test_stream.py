"""Envoy's side of the protocol, message by message: plain ext_proc, and the endpoint-picker protocol 1.0."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from litellm_prefix_router.decision import Decision, Receipt, Source
from litellm_prefix_router.gateways.ext_proc.directory import Directory
from litellm_prefix_router.gateways.ext_proc.health import HealthBook
from litellm_prefix_router.gateways.ext_proc.stream import (
    Finished,
    FirstToken,
    HangUp,
    Place,
    Reply,
    Served,
    Stream,
    Unplaced,
)
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


# --- the recommended mode -----------------------------------------------------------------------------------------


def test_the_answer_to_the_body_names_the_endpoints_in_metadata_alone():
    wire = Wire()
    (first,) = wire.headers()
    assert first.message.WhichOneof("response") == "request_headers" and not first.message.HasField("dynamic_metadata")
    (place,) = wire.body({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    request = place.request
    assert (request.pool, request.path, request.request_id) == ("chat", "/v1/chat/completions", "r1")
    assert tuple(request.candidates) == tuple(IDS)
    assert request.body["messages"][0]["content"] == "hi"
    (reply,) = wire.stream.placed(decide(place, IDS[2], IDS[0], IDS[1], IDS[3]))
    assert named(reply) == f"{ENDPOINTS[2]},{ENDPOINTS[0]},{ENDPOINTS[1]},{ENDPOINTS[3]}"
    common = reply.message.request_body.response
    assert not common.HasField("header_mutation") and not common.HasField("body_mutation")


def test_the_list_is_as_long_as_the_setting_says():
    wire = Wire(list_length=2)
    (reply,) = wire.stream.placed(decide(wire.place()))
    assert named(reply) == f"{ENDPOINTS[0]},{ENDPOINTS[1]}"


def test_a_request_without_a_body_is_placed_by_its_headers():
    wire = Wire()
    (place,) = wire.headers(end=True)
    assert place.request.body == {}
    (reply,) = wire.stream.placed(decide(place))
    assert reply.message.WhichOneof("response") == "request_headers" and named(reply).startswith(ENDPOINTS[0])


@pytest.mark.parametrize(
    ("content", "headers", "note"),
    [
        (b"\xff\xfe\x00", {}, "body is not a JSON object"),
        (b"[1]", {}, "body is not a JSON object"),
        (b'{"messages": []}', {"content_encoding": "gzip"}, "body is encoded"),
        (b'{"messages": "' + b"x" * 2000 + b'"}', {}, "body too large to be read"),
    ],
)
def test_what_cannot_be_read_is_placed_all_the_same(content, headers, note):
    wire = Wire(top={"max_body_bytes": 1000})
    place = wire.place(content, **headers)
    assert (place.request.body, place.request.note) == ({}, note)
    (reply,) = wire.stream.placed(decide(place))
    assert named(reply) and not reply.message.request_body.response.HasField("body_mutation")


def test_an_odd_but_valid_body_is_read_as_engines_read_it():
    wire = Wire()
    place = wire.place('{"a": NaN, "b": 1, "b": 2, "c": "\\ud800"}'.encode("utf-16"))
    assert place.request.body["b"] == 2


# --- choosing what to choose from ---------------------------------------------------------------------------------


def test_replicas_that_are_down_are_no_candidates():
    wire = Wire()
    wire.health.probed(IDS[1], False)
    assert IDS[1] not in wire.place().request.candidates


def test_when_all_are_down_envoy_still_gets_a_list():
    wire = Wire()
    for replica_id in IDS:
        wire.health.probed(replica_id, False)
    assert set(wire.place().request.candidates) == set(IDS)


def test_draining_replicas_are_the_last_resort():
    drained = [{"endpoint": e, "drain": True} for e in ENDPOINTS[:2]]
    wire = Wire(pool={"endpoints": [*drained, *ENDPOINTS[2:]]})
    assert tuple(wire.place().request.candidates) == tuple(IDS[2:])
    wire = Wire(pool={"endpoints": [*drained, *ENDPOINTS[2:]]})
    for replica_id in IDS[2:]:
        wire.health.probed(replica_id, False)
    assert tuple(wire.place().request.candidates) == tuple(IDS[:2])


def test_the_pool_is_the_models_where_there_are_several():
    pools = {
        "a": {"model": "first", "endpoints": ENDPOINTS[:2]},
        "b": {"model": "second", "endpoints": ENDPOINTS[2:], "rewrite_model": {"public": "second"}},
    }
    assert Wire(pools=pools).place({"model": "second"}).request.pool == "b"
    assert Wire(pools=pools).place({"model": "public"}).request.pool == "b"
    wire = Wire(pools=pools)
    wire.headers()
    unplaced, reply = wire.body({"model": "nobody's"})
    assert unplaced == Unplaced("unknown_pool") and not reply.message.HasField("dynamic_metadata")
    assert wire.stream.closed() == []


# --- the endpoint-picker protocol ---------------------------------------------------------------------------------


def test_nothing_is_answered_before_the_body_has_ended():
    wire = Wire(duplex=True)
    assert wire.headers() == []
    raw = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 150_000}]}).encode()
    assert wire.body(raw[:70_000], end=False) == []
    (place,) = wire.body(raw[70_000:])
    assert place.request.body["model"] == "tiny"
    first, *chunks = wire.stream.placed(decide(place, IDS[3], IDS[0]))
    assert first.message.WhichOneof("response") == "request_headers"
    mutation = first.message.request_headers.response.header_mutation
    assert header_set(mutation, KEY) == named(first) == f"{ENDPOINTS[3]},{ENDPOINTS[0]}"
    streamed = [c.message.request_body.response.body_mutation.streamed_response for c in chunks]
    assert b"".join(s.body for s in streamed) == raw
    assert [s.end_of_stream for s in streamed] == [False, False, True]
    assert max(len(s.body) for s in streamed) <= 62_000


def test_trailers_end_a_body_too():
    wire = Wire(duplex=True)
    wire.headers()
    assert wire.body({"model": "tiny"}, end=False) == []
    (place,) = wire.send(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
    first, chunk, trailers = wire.stream.placed(decide(place))
    assert first.message.WhichOneof("response") == "request_headers"
    assert not chunk.message.request_body.response.body_mutation.streamed_response.end_of_stream
    assert trailers.message.WhichOneof("response") == "request_trailers"


def test_an_empty_body_is_handed_on_as_one():
    wire = Wire(duplex=True)
    wire.headers()
    (place,) = wire.body(b"")
    _, chunk = wire.stream.placed(decide(place))
    assert chunk.message.request_body.response.body_mutation.streamed_response.end_of_stream
    wire = Wire(duplex=True)
    (place,) = wire.headers(end=True)
    assert len(wire.stream.placed(decide(place))) == 1


def test_a_body_beyond_the_limit_is_placed_unread_and_passes_through():
    wire = Wire(duplex=True, top={"max_body_bytes": 1000})
    wire.headers()
    (place,) = wire.body(b"x" * 1001, end=False)
    assert place.request.note == "body too large to be read"
    _, chunk = wire.stream.placed(decide(place))
    assert not chunk.message.request_body.response.body_mutation.streamed_response.end_of_stream
    (rest,) = wire.body(b"y" * 500)
    streamed = rest.message.request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"y" * 500, True)


@pytest.mark.parametrize("form", [list, ",".join])
def test_the_choice_is_from_the_subset(form):
    wire = Wire(duplex=True)
    hint = {"envoy.lb.subset_hint": {f"{KEY}-subset": form([ENDPOINTS[1], "10.9.9.9:1", ENDPOINTS[3]])}}
    assert tuple(wire.place(metadata=hint).request.candidates) == (IDS[1], IDS[3])


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]])
def test_a_subset_without_an_eligible_endpoint_is_503(subset):
    wire = Wire(duplex=True)
    wire.headers(metadata={"envoy.lb.subset_hint": {f"{KEY}-subset": subset}})
    unplaced, reply = wire.body({"model": "tiny"})
    assert unplaced == Unplaced("no_ready_endpoint")
    assert reply.message.immediate_response.status.code == 503


def test_no_ready_endpoint_is_503():
    wire = Wire(duplex=True)
    for replica_id in IDS:
        wire.health.probed(replica_id, False)
    wire.headers()
    _, reply = wire.body({"model": "tiny"})
    assert reply.message.immediate_response.status.code == 503
    assert json.loads(reply.message.immediate_response.body)["error"]["code"] == 503


def test_shedding_is_429():
    wire = Wire(duplex=True)
    wire.place()
    (reply,) = wire.stream.shed("busy")
    assert reply.message.immediate_response.status.code == 429
    assert wire.stream.closed() == []


# --- the response -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplex", [False, True])
def test_a_stream_is_followed_to_its_end(duplex):
    wire = Wire(duplex=duplex)
    wire.stream.placed(decide(wire.place()))
    served, reply = wire.answer(attribute=ENDPOINTS[0])
    assert served == Served(IDS[0], 200)
    receipt = header_set(reply.message.response_headers.response.header_mutation, "x-prefix-router")
    assert receipt == "replica=http://10.0.0.1:8000; source=exact; match=96/100; policy=least-cost; reason=ok; ms=0.00"
    chunks = [b'data: {"n":1}\n\n', b'data: {"usage":{"prompt_tokens_details":{"cached_tok', b'ens":96}}}\n\n']
    seen = [wire.answer_body(chunk) for chunk in chunks]
    assert seen[0][0] == FirstToken() and not any(isinstance(a, FirstToken) for acts in seen[1:] for a in acts)
    *_, end = wire.answer_body(b"data: [DONE]\n\n", end=True)
    assert end == Finished(96)
    assert wire.stream.closed() == []
    if duplex:
        echoed = [acts[-1].message.response_body.response.body_mutation.streamed_response.body for acts in seen]
        assert echoed == chunks


def test_response_trailers_end_it_too():
    wire = Wire(duplex=True)
    wire.stream.placed(decide(wire.place()))
    wire.answer()
    wire.answer_body(b"data: x\n\n")
    reply, end = wire.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert reply.message.WhichOneof("response") == "response_trailers" and end == Finished(None)


def test_a_whole_answer_tells_no_first_token():
    wire = Wire()
    wire.stream.placed(decide(wire.place()))
    wire.answer(kind="application/json")
    reply, end = wire.answer_body(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}', end=True)
    assert isinstance(reply, Reply) and end == Finished(32)


def test_a_stream_that_is_cut_ends_the_request_once():
    wire = Wire()
    wire.stream.placed(decide(wire.place()))
    wire.answer()
    assert wire.stream.closed() == [Finished(None)]
    assert wire.stream.closed() == []


def test_a_stream_that_is_cut_before_the_choice_ends_nothing():
    wire = Wire()
    wire.place()
    assert wire.stream.closed() == []


@pytest.mark.parametrize("how", ["attribute", "metadata"])
def test_another_replica_served_it(how):
    wire = Wire()
    wire.stream.placed(decide(wire.place()))
    served, reply = wire.answer(**{how: ENDPOINTS[1]})
    assert served == Served(IDS[1], 200)
    receipt = header_set(reply.message.response_headers.response.header_mutation, "x-prefix-router")
    assert receipt is not None and receipt.endswith("; served=http://10.0.0.2:8000")


def test_an_error_without_a_body_ends_it():
    wire = Wire()
    wire.stream.placed(decide(wire.place()))
    *_, end = wire.answer(status=503, end=True, attribute="")
    assert end == Finished(None)


def test_no_receipt_header_where_it_is_switched_off():
    wire = Wire(top={"receipt_header": False})
    wire.stream.placed(decide(wire.place()))
    _, reply = wire.answer()
    assert not reply.message.response_headers.response.HasField("header_mutation")


def test_without_an_audit_the_stream_ends_with_the_choice():
    wire = Wire(audit_response=False)
    reply, hang_up = wire.stream.placed(decide(wire.place()))
    assert named(reply) and hang_up == HangUp()


# --- edits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplex", [False, True])
def test_salt_and_model_reach_the_router_and_the_engine_alike(duplex):
    wire = Wire(
        duplex=duplex, pool={"rewrite_model": {"public": "tiny"}}, tenant_header="x-tenant", salt_secret="s" * 32
    )
    place = wire.place(b'{"model":"public","cache_salt":"mine","n":1e2}', x_tenant="acme")
    salt = place.request.body["cache_salt"]
    assert place.request.body["model"] == "tiny" and salt != "mine"
    first, *rest = wire.stream.placed(decide(place))
    if duplex:
        assert "content-length" in first.message.request_headers.response.header_mutation.remove_headers
        sent = rest[0].message.request_body.response.body_mutation.streamed_response.body
    else:
        common = first.message.request_body.response
        sent = common.body_mutation.body
        assert header_set(common.header_mutation, "content-length") == str(len(sent))
    assert sent == f'{{"model":"tiny","cache_salt":"{salt}","n":1e2}}'.encode()


def test_the_tenant_can_come_from_a_verified_token():
    path = ["envoy.filters.http.jwt_authn", "payload", "org"]
    metadata = {path[0]: {"payload": {"org": "acme"}}}
    claims = Wire(tenant_metadata=path, tenant_header="x-tenant", salt_secret="s" * 32)
    header = Wire(tenant_header="x-tenant", salt_secret="s" * 32)
    other_secret = Wire(tenant_header="x-tenant", salt_secret="t" * 32)
    by_claim = claims.place(metadata=metadata, x_tenant="other").request.body["cache_salt"]
    by_header = header.place(x_tenant="acme").request.body["cache_salt"]
    assert by_claim == by_header != other_secret.place(x_tenant="acme").request.body["cache_salt"]


def test_a_body_that_breaks_the_processor_goes_on():
    wire = Wire(duplex=True)
    wire.headers()
    wire.stream._body += b"abc"
    wire.stream._body_ended = True
    unplaced, first, chunk = wire.stream.failed(pb.ProcessingRequest(request_body=pb.HttpBody(body=b"abc")))
    assert unplaced == Unplaced("internal_error") and not first.message.HasField("dynamic_metadata")
    assert chunk.message.request_body.response.body_mutation.streamed_response.body == b"abc"


def test_a_response_that_breaks_the_processor_goes_on():
    wire = Wire(duplex=True)
    wire.stream.placed(decide(wire.place()))
    (chunk,) = wire.stream.failed(pb.ProcessingRequest(response_body=pb.HttpBody(body=b"abc", end_of_stream=True)))
    streamed = chunk.message.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)
    (reply,) = wire.stream.failed(pb.ProcessingRequest(response_headers=pb.HttpHeaders()))
    assert reply.message.WhichOneof("response") == "response_headers"
