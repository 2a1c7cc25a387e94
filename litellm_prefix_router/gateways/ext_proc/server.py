"""The external processor as a gRPC server with everything around it: router service, health, metrics, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from prometheus_client import start_http_server

from ...service import RouterService
from ...settings import EnvoySettings, Settings, SettingsError
from . import wire
from .directory import Directory
from .health import HealthBook
from .meters import Meters
from .prober import Prober
from .processor import Processor

logger = logging.getLogger("litellm_prefix_router")

LIVENESS = "liveness"
READINESS = "readiness"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_METERS: list[Meters] = []


def listen_address(options: EnvoySettings, worker: int) -> str:
    """Where worker n (from 0) listens, as gRPC takes it. Raises SettingsError."""
    if options.listen.startswith("unix:"):
        return options.listen if worker == 0 else f"{options.listen}.{worker}"
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdigit():
        raise SettingsError(f"envoy.listen: {options.listen!r} is neither host:port nor unix:///path")
    return f"{host}:{int(port) + worker if int(port) else 0}"


def credentials(options: EnvoySettings) -> Any:
    """TLS or mTLS credentials, None for plain text. Raises SettingsError for files that cannot be used."""
    if options.tls_certificate is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise SettingsError("envoy.tls_client_ca needs tls_certificate and tls_key")
        return None
    if options.tls_certificate is None or options.tls_key is None:
        raise SettingsError("envoy: tls_certificate and tls_key belong together")
    authority = _read(options.tls_client_ca) if options.tls_client_ca is not None else None
    return grpc.ssl_server_credentials(
        [(_read(options.tls_key), _read(options.tls_certificate))],
        root_certificates=authority,
        require_client_auth=authority is not None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"envoy: {path} cannot be read ({error.strerror})") from None


class ExtProcServer:
    """One worker. `start`, then `wait`; `stop` drains. Raises SettingsError for settings that cannot work."""

    def __init__(self, settings: Settings, *, worker: int = 0, service: RouterService | None = None) -> None:
        options = settings.envoy
        if not options.pools:
            raise SettingsError("envoy.pools: name at least one pool with its endpoints")
        if options.salt_secret is not None and not (options.tenant_header or options.tenant_metadata):
            raise SettingsError("envoy.salt_secret needs tenant_header or tenant_metadata to tell tenants apart")
        self.settings = settings
        self.address = listen_address(options, worker)
        self._credentials = credentials(options)
        self._worker = worker
        self.service = service or RouterService(settings)
        self.directory = Directory(settings)
        self.health = HealthBook(
            time.monotonic,
            interval_s=options.health_interval_s,
            timeouts=options.health_timeouts,
            eject_failures=options.eject_failures,
            eject_s=options.eject_s,
        )
        if not _METERS:  # Prometheus knows each name once a process
            _METERS.append(Meters())
        self.meters = _METERS[0]
        self._prober = Prober(options, self.directory, self.health, self._pools_changed)
        self._status = HealthServicer()
        self._server: Any = None
        self._metrics: Any = None
        self._watch: asyncio.Task[None] | None = None
        self.stopping = False
        """No new streams are taken any more."""

    async def start(self) -> None:
        """Listen. Raises SettingsError where the address is taken."""
        options = self.settings.envoy
        await self._prober.start()
        self._pools_changed()
        self.service.start()
        processor = Processor(self.settings, self.service.router, self.directory, self.health, self.meters)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.max_message_mb << 20),
                ("grpc.max_send_message_length", options.max_message_mb << 20),
                ("grpc.so_reuseport", 0),  # Envoy keeps one connection: a second process would only starve
            ]
        )
        self._server.add_generic_rpc_handlers((processor.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._status, self._server)
        if self.address.startswith("unix:"):
            with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
                os.unlink(self.address.removeprefix("unix://").removeprefix("unix:"))
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self.address)
            else:
                port = self._server.add_secure_port(self.address, self._credentials)
        except RuntimeError:
            raise SettingsError(f"envoy.listen: cannot listen on {self.address}") from None
        if self.address.endswith(":0"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        if self.settings.metrics_port is not None:
            try:
                self._metrics = start_http_server(self.settings.metrics_port + self._worker)
            except OSError as error:
                raise SettingsError(f"metrics_port: {error.strerror}") from None
        await self._say(LIVENESS, _SERVING)
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_readiness())

    async def reload(self, settings: Settings) -> None:
        """Take pools and endpoints (drains among them) from these settings; the rest needs a restart.

        Raises SettingsError and changes nothing where they cannot work.
        """
        if not settings.envoy.pools:
            raise SettingsError("envoy.pools: name at least one pool with its endpoints")
        if self.directory.configure(settings):
            self._pools_changed()
        await self._prober.resolve_now()

    async def stop(self) -> None:
        """Tell the health checkers, take no new streams, let the running ones end within the grace."""
        if self._watch is not None:
            self._watch.cancel()
        await self._status.enter_graceful_shutdown()
        self.stopping = True
        if self._server is not None:
            await self._server.stop(self.settings.envoy.shutdown_grace_s)
        await self._prober.stop()
        await asyncio.to_thread(self.service.stop)
        if self._metrics is not None:
            self._metrics[0].shutdown()
            self._metrics[0].server_close()

    @property
    def ready(self) -> bool:
        """Whether some pool has an endpoint to choose."""
        return any(self.health.usable(view.endpoint_of) for view in self.directory.pools.values())

    def _pools_changed(self) -> None:
        self.service.set_pools({name: view.pool for name, view in self.directory.pools.items()})

    async def _watch_readiness(self) -> None:
        said, shown = False, set[str]()
        await self._say_ready(said)
        await self.service.warm_up()
        while True:
            addresses = set(self.directory.addresses())
            for address in addresses:
                self.meters.up.labels(address).set(self.health.is_up(address))
            for address in shown - addresses:
                self.meters.up.remove(address)
            shown = addresses
            if self.ready != said:
                said = self.ready
                await self._say_ready(said)
            await asyncio.sleep(0.1)

    async def _say_ready(self, ready: bool) -> None:
        for name in ("", READINESS, wire.SERVICE):
            await self._say(name, _SERVING if ready else _NOT_SERVING)

    async def _say(self, name: str, status: int) -> None:
        await self._status.set(name, status)
