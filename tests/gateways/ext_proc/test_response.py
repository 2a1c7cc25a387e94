"""The response side, message by message: who served, the receipt, first token, usage, end."""

from __future__ import annotations

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from litellm_prefix_router.gateways.ext_proc.actions import Finished, FirstToken, HangUp, Reply, Served

from .gateway_side import ENDPOINTS, IDS, Wire, decide, header_set, named


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
    *_, end, hang_up = wire.answer_body(b"data: [DONE]\n\n", end=True)
    assert end == Finished(96) and hang_up == HangUp()
    assert wire.stream.closed() == []
    if duplex:
        echoed = [acts[-1].message.response_body.response.body_mutation.streamed_response.body for acts in seen]
        assert echoed == chunks


def test_response_trailers_end_it_too():
    wire = Wire(duplex=True)
    wire.stream.placed(decide(wire.place()))
    wire.answer()
    wire.answer_body(b"data: x\n\n")
    reply, end, _ = wire.send(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))
    assert reply.message.WhichOneof("response") == "response_trailers" and end == Finished(None)


def test_a_whole_answer_tells_no_first_token():
    wire = Wire()
    wire.stream.placed(decide(wire.place()))
    wire.answer(kind="application/json")
    reply, end, _ = wire.answer_body(b'{"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}', end=True)
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
    *_, end, _ = wire.answer(status=503, end=True, attribute="")
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
