"""An external processor that decides nothing: what gRPC and the protocol cost before the router does anything.

Arguments: the address, and "released" to end each stream with the answer to the request's body.
"""

from __future__ import annotations

import sys
from typing import Any

import grpc
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb


async def process(_: Any, context: Any) -> None:
    while (message := await context.read()) is not grpc.aio.EOF:
        kind = message.WhichOneof("request")
        answer = pb.ProcessingResponse()
        getattr(answer, kind).SetInParent()
        if kind == "response_headers":
            option = answer.response_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = "x-prefix-router", b"empty"
        await context.write(answer)
        if kind == "request_body" and "released" in sys.argv:
            return


async def serve(address: str) -> None:
    handler = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
