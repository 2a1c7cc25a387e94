"""The gateway's side of the endpoint-picker protocol 1.0 (full duplex), message by message."""

from __future__ import annotations

import json

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from litellm_prefix_router.gateways.ext_proc.actions import Unplaced

from .gateway_side import ENDPOINTS, IDS, KEY, Wire, decide, header_set, named


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
