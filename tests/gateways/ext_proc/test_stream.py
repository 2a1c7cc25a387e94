"""The recommended mode, message by message: what is asked of the router, and what Envoy is told."""

from __future__ import annotations

import json

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from litellm_prefix_router.gateways.ext_proc.actions import Unplaced

from .gateway_side import ENDPOINTS, IDS, Wire, decide, header_set, named


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


def test_a_gateway_may_send_attributes_instead_of_headers():
    wire = Wire()
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b'{"model": "tiny"}', end_of_stream=True))
    message.attributes["envoy.filters.http.ext_proc"].update(
        {"request.path": "/v1/completions?a=b", "xds.cluster_name": "chat"}
    )
    (place,) = wire.send(message)
    assert (place.request.pool, place.request.path) == ("chat", "/v1/completions")
    (reply,) = wire.stream.placed(decide(place))
    assert reply.message.WhichOneof("response") == "request_body" and named(reply)


def test_the_route_or_the_cluster_names_the_pool_before_the_model_does():
    pools = {name: {"model": "tiny", "endpoints": ENDPOINTS[n : n + 2]} for n, name in ((0, "a"), (2, "b"))}
    by_cluster = Wire(pools=pools)
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=b'{"model": "tiny"}', end_of_stream=True))
    message.attributes["envoy.filters.http.ext_proc"].update({"xds.cluster_name": "b"})
    assert by_cluster.send(message)[0].request.pool == "b"
    by_route = Wire(pools=pools)
    by_route.stream._route_pool = "b"
    assert by_route.place().request.pool == "b"
    assert Wire(pools=pools).place().request.pool == "a"


def test_a_request_for_a_model_of_no_pool_is_salted_all_the_same():
    pools = {name: {"model": name, "endpoints": ENDPOINTS} for name in ("a", "b")}
    wire = Wire(pools=pools, tenant_header="x-tenant", salt_secret="s" * 32)
    wire.headers(x_tenant="acme")
    unplaced, reply = wire.body({"model": "an alias", "cache_salt": "of the client's choice"})
    assert unplaced == Unplaced("unknown_pool")
    sent = json.loads(reply.message.request_body.response.body_mutation.body)
    assert sent["model"] == "an alias" and len(sent["cache_salt"]) > 30


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


def test_a_client_cannot_have_cached_blocks_reported_again():
    """Each report would count as one more copy that the index believes to be left after an eviction."""
    wire = Wire()
    place = wire.place(b'{"n": 1, "vllm_xargs": {"kv_cache_report_mode": "full", "other": 2}, "model": "tiny"}')
    assert place.request.body["vllm_xargs"] == {"other": 2}
    sent = wire.stream.placed(decide(place))[0].message.request_body.response.body_mutation.body
    assert sent == b'{"n": 1, "vllm_xargs": {"other": 2}, "model": "tiny"}'


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
