"""The server over real gRPC, without Envoy: health, TLS, sockets, shutdown, and settings that cannot work."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import grpc
import httpx
import pytest
from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from grpc_health.v1 import health_pb2, health_pb2_grpc

from litellm_prefix_router.demo.processes import free_ports
from litellm_prefix_router.gateways.ext_proc.server import ExtProcServer, listen_address
from litellm_prefix_router.settings import Settings, SettingsError

from .conftest import chat, until
from .test_bootstraps import Authority

MEMORY = {"redis_url": "memory://servers", "embedded_indexer": False}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def options(echoes, **more):
    top = {**MEMORY, **more.pop("top", {})}
    return {"pool": {"endpoints": [e.endpoint for e in echoes]}, "top": top, **more}


def headers() -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.append(HeaderValue(key=":path", raw_value=b"/v1/chat/completions"))
    return message


def body() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=json.dumps(chat("hi")).encode(), end_of_stream=True))


async def place(channel) -> tuple[object, str]:
    """(the open call, the endpoints that were named)"""
    call = ExternalProcessorStub(channel).Process()
    await call.write(headers())
    await call.read()
    await call.write(body())
    answer = await call.read()
    return call, answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]


async def status(channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health_tells_whether_there_is_anything_to_choose(echoes, serve) -> None:
    server = await serve(**options(echoes))
    names = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")

    async def all_are(wanted: int) -> bool:
        try:
            return {await status(channel, name) for name in names} == {wanted}
        except grpc.aio.AioRpcError:  # nothing has been said yet
            return False

    async with grpc.aio.insecure_channel(server.address) as channel:
        assert await status(channel, "liveness") == SERVING
        await until(lambda: all_are(SERVING))
        for echo in echoes:
            echo.healthy = False
        await until(lambda: all_are(NOT_SERVING))
        assert await status(channel, "liveness") == SERVING
        for echo in echoes:
            echo.healthy = True
        await until(lambda: all_are(SERVING))


async def test_a_unix_socket_left_behind_is_no_obstacle(tmp_path: Path, echoes, serve) -> None:
    address = f"unix://{tmp_path}/processor.sock"
    (tmp_path / "processor.sock").touch()
    await serve(**options(echoes, listen=address))
    async with grpc.aio.insecure_channel(address) as channel:
        call, endpoints = await place(channel)
        assert set(endpoints.split(",")) == {e.endpoint for e in echoes}
        call.cancel()


async def test_a_call_that_is_cut_releases_its_load(echoes, serve) -> None:
    server = await serve(**options(echoes))
    ledger = server.service.router.ledger
    async with grpc.aio.insecure_channel(server.address) as channel:
        call, endpoints = await place(channel)
        assert list(ledger.loads()) == [f"http://{endpoints.split(',')[0]}"]
        call.cancel()
        await until(lambda: not ledger.loads())


async def test_shutdown_lets_running_streams_end(echoes, settings_of) -> None:
    server = ExtProcServer(Settings(**settings_of(**options(echoes, shutdown_grace_s=30))))
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        call, _ = await place(channel)
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.stopping)
        end = pb.ProcessingRequest()
        end.response_headers.headers.headers.append(HeaderValue(key=":status", raw_value=b"200"))
        end.response_headers.end_of_stream = True
        await call.write(end)
        answer = await call.read()
        added = answer.response_headers.response.header_mutation.set_headers
        assert [h.header.key for h in added] == ["x-prefix-router"]
        await call.done_writing()
        await stopping
    assert not server.service.router.ledger.loads()


async def test_mutual_tls_lets_in_whom_it_should(tmp_path: Path, echoes, serve) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("prefix-router")
    client = [path.read_bytes() for path in authority.issue("envoy")]
    ca = tmp_path / "ca.crt"
    tls = {"tls_certificate": certificate, "tls_key": key, "tls_client_ca": ca}
    server = await serve(**options(echoes, **tls))
    override = (("grpc.ssl_target_name_override", "prefix-router"),)
    known = grpc.ssl_channel_credentials(ca.read_bytes(), client[1], client[0])
    async with grpc.aio.secure_channel(server.address, known, options=override) as channel:
        call, endpoints = await place(channel)
        assert endpoints
        call.cancel()
    stranger = grpc.ssl_channel_credentials(ca.read_bytes())
    async with grpc.aio.secure_channel(server.address, stranger, options=override) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await status(channel, "liveness")


async def test_metrics_are_served_and_hold_no_prompt(echoes, serve) -> None:
    (port,) = free_ports(1)
    server = await serve(**options(echoes, top={"metrics_port": port}))
    async with grpc.aio.insecure_channel(server.address) as channel:
        call, _ = await place(channel)
        call.cancel()
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert "prefix_router_decisions_total" in text and "prefix_router_envoy_replica_up" in text
    assert "hi" not in text.split()


async def test_a_taken_port_is_one_clear_line(echoes, serve, settings_of) -> None:
    first = await serve(**options(echoes))
    second = ExtProcServer(Settings(**settings_of(**options(echoes, listen=first.address))))
    with pytest.raises(SettingsError, match="cannot listen"):
        await second.start()
    with contextlib.suppress(Exception):
        await second.stop()


@pytest.mark.parametrize(
    ("envoy", "message"),
    [
        ({"pools": {}}, "envoy.pools"),
        ({"listen": "nowhere"}, "envoy.listen"),
        ({"tls_certificate": "/nowhere/a.crt"}, "belong together"),
        ({"tls_certificate": "/nowhere/a.crt", "tls_key": "/nowhere/a.key"}, "cannot be read"),
        ({"tls_client_ca": "/nowhere/ca.crt"}, "needs tls_certificate"),
        ({"salt_secret": "secret"}, "needs tenant_header"),
    ],
)
def test_settings_that_cannot_work_say_so(envoy, message):
    given = {"pools": {"chat": {"model": "m", "endpoints": ["127.0.0.1:1"]}}, **envoy}
    with pytest.raises(SettingsError, match=message):
        ExtProcServer(Settings(**MEMORY, envoy=given))


def test_workers_have_addresses_of_their_own():
    def at(listen: str, worker: int) -> str:
        return listen_address(Settings(redis_url="memory://", envoy={"listen": listen}).envoy, worker)

    assert [at("127.0.0.1:9002", n) for n in range(2)] == ["127.0.0.1:9002", "127.0.0.1:9003"]
    assert [at("unix:///run/x.sock", n) for n in range(2)] == ["unix:///run/x.sock", "unix:///run/x.sock.1"]
