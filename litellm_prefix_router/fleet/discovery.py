"""What a replica says about itself over its API: models, version, block size, capacity, event sockets, health.

Each question is asked for itself: an engine that lacks an endpoint (an older one, another make) leaves that fact
unknown and the others usable.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>[^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Answers of one replica; None or empty where it did not say."""

    reachable: bool = False
    base_model: str | None = None
    """First model that is no adapter, in the order that the replica lists them."""
    aliases: tuple[str, ...] = ()
    """All names of the base model."""
    lora_modules: tuple[str, ...] = ()
    root: str | None = None
    """Where the engine loaded the model from: a folder or a Hugging Face id."""
    version: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    capacity_tokens: int = 0
    """KV memory of one data-parallel rank, in tokens; 0: unknown."""
    dp_ranks: int = 1
    event_sources: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Data-parallel rank -> the engine's event configuration as it reports it."""


async def ask_replica(client: httpx.AsyncClient, address: str, timeout_s: float = 2.0) -> ReplicaFacts:
    """All facts of the replica at `address` (base URL without /v1), asked at once. Never raises for its answers."""
    models, version, metrics, sources = await asyncio.gather(
        _get_json(client, f"{address}/v1/models", timeout_s),
        _get_json(client, f"{address}/version", timeout_s),
        _get_text(client, f"{address}/metrics", timeout_s),
        _get_json(client, f"{address}/kv_event_sources", timeout_s),
    )
    base, aliases, adapters, root, longest = _read_models(models)
    ranks = _read_sources(sources)
    block_size, capacity = _read_cache_info(metrics or "")
    return ReplicaFacts(
        reachable=models is not None or metrics is not None,
        base_model=base,
        aliases=aliases,
        lora_modules=adapters,
        root=root,
        version=version.get("version") if isinstance(version, dict) else None,
        max_model_len=longest,
        block_size=block_size,
        # with data parallelism the engine reports the sum over its ranks
        capacity_tokens=capacity // max(len(ranks), 1),
        dp_ranks=max(len(ranks), 1),
        event_sources=ranks,
    )


def _read_models(answer: Any) -> tuple[str | None, tuple[str, ...], tuple[str, ...], str | None, int | None]:
    data = answer.get("data") if isinstance(answer, dict) else None
    rows = [row for row in data or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
    bases = [row for row in rows if not row.get("parent")]
    adapters = tuple(row["id"] for row in rows if row.get("parent"))
    if not bases:
        return None, (), adapters, None, None
    root, longest = bases[0].get("root"), bases[0].get("max_model_len")
    return (
        bases[0]["id"],
        tuple(row["id"] for row in bases),
        adapters,
        root if isinstance(root, str) else None,
        longest if isinstance(longest, int) else None,
    )


def _read_sources(answer: Any) -> dict[int, Mapping[str, Any]]:
    if not isinstance(answer, dict):
        return {}
    return {int(rank): source for rank, source in answer.items() if rank.isdigit() and isinstance(source, dict)}


def _read_cache_info(metrics: str) -> tuple[int | None, int]:
    found = _CACHE_INFO.search(metrics)
    if found is None:
        return None, 0
    labels = dict(_LABEL.findall(found["labels"]))
    size = int(labels["block_size"]) if labels.get("block_size", "").isdigit() else None
    blocks = int(labels["num_gpu_blocks"]) if labels.get("num_gpu_blocks", "").isdigit() else 0
    return size, (size or 0) * max(blocks - 1, 0)  # the engine keeps one block for itself


async def _get_json(client: httpx.AsyncClient, url: str, timeout_s: float) -> Any:
    try:
        answer = await client.get(url, timeout=timeout_s)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


async def _get_text(client: httpx.AsyncClient, url: str, timeout_s: float) -> str | None:
    try:
        answer = await client.get(url, timeout=timeout_s)
        return answer.text if answer.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
