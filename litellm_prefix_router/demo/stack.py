"""What the demo starts: simulated replicas, and in front of them the real LiteLLM proxy, the real Envoy, or both."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from .envoy_stack import start_envoy
from .processes import Processes, consecutive_ports, free_ports

MODEL = "tiny"
GROUP = "chat"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Stack:
    """One fleet with one of its gateways, up and running."""

    name: str
    gateway: str
    url: str
    ready_url: str
    key: str
    """Empty where the gateway asks for none."""
    replicas: tuple[str, ...]
    redis_url: str
    key_prefix: str
    config: Path

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def proxy_config(replicas: Sequence[str], settings: dict[str, Any]) -> dict[str, Any]:
    """LiteLLM's config.yaml as a user would write it; examples/litellm/config.yaml is the same by hand."""
    return {
        "model_list": [
            {
                "model_name": GROUP,
                "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
                "model_info": {"id": f"replica-{i}"},
            }
            for i, url in enumerate(replicas, 1)
        ],
        "litellm_settings": {"callbacks": "litellm_prefix_router.prefix_router"},
        "callback_settings": {"prefix_router": settings},
        "general_settings": {"master_key": "os.environ/LITELLM_MASTER_KEY"},
    }


async def start_stacks(
    name: str,
    gateways: Sequence[str],
    processes: Processes,
    folder: Path,
    *,
    policy: str,
    replicas: int,
    redis_url: str,
    num_blocks: int,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
) -> list[Stack]:
    """Start replicas and, in front of them, each of the gateways ("litellm", "envoy"). Raises StartError."""
    first = consecutive_ports(replicas)
    processes.start(
        f"{name}-replicas",
        [
            *_command("prefix-router"),
            "sim-replica",
            *("--replicas", str(replicas), "--port", str(first), "--model-name", MODEL),
            *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks)),
            *("--prefill-tokens-per-s", str(prefill_tokens_per_s)),
            *("--decode-tokens-per-s", str(decode_tokens_per_s)),
        ],
    )
    ports = range(first, first + replicas)
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    prefix = f"demo-{name}-{secrets.token_hex(4)}"
    settings = {
        "redis_url": redis_url,
        "key_prefix": prefix,
        "policy": policy,
        "prefill_tokens_per_s": prefill_tokens_per_s,
    }
    stacks = []
    for gateway in gateways:
        label = f"{name}-{gateway}"
        if gateway == "litellm":
            url, ready, key, config = _start_litellm(label, processes, folder, urls, settings)
        else:
            url, config = start_envoy(
                name, processes, folder, urls, settings, command=_command, model=MODEL, group=GROUP
            )
            ready, key = f"{url}/health", ""
        stacks.append(Stack(name, gateway, url, ready, key, urls, redis_url, prefix, config))
    async with httpx.AsyncClient(timeout=2) as client:

        async def up() -> bool:
            for url in (*(f"{url}/health" for url in urls), *(stack.ready_url for stack in stacks)):
                try:
                    if (await client.get(url)).status_code != 200:
                        return False
                except httpx.HTTPError:
                    return False
            return True

        await processes.until(f"the {name} fleet", up, timeout_s=90)
    return stacks


def _start_litellm(
    label: str, processes: Processes, folder: Path, urls: Sequence[str], settings: dict[str, Any]
) -> tuple[str, str, str, Path]:
    """(URL, URL that answers when it is ready, key, config file)"""
    (port,) = free_ports(1)
    key = f"sk-{secrets.token_urlsafe(24)}"
    config = folder / f"{label}.yaml"
    config.write_text(yaml.safe_dump(proxy_config(urls, settings), sort_keys=False), encoding="utf-8")
    environment = {
        "LITELLM_MASTER_KEY": key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "LITELLM_LOG": "ERROR",
    }
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    processes.start(label, [*_command("litellm"), *options], environment)
    url = f"http://127.0.0.1:{port}"
    return url, f"{url}/health/liveliness", key, config


def _command(name: str) -> list[str]:
    """An installed command of this Python environment, whatever the PATH says."""
    beside = Path(sys.executable).parent / name
    return [str(beside)] if beside.exists() else [name]
