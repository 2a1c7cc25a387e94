"""What a replica says about itself over its API: models, version, block size, capacity, event sockets, health.

Each question is asked for itself: an engine that lacks an endpoint (an older one, another make) leaves that fact
unknown and the others usable.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

_CACHE_INFO = re.compile(r"^vllm:cache_config_info\{(?P<labels>[^}]*)\}", re.MULTILINE)
_TOLD_BY = {
    "models": ("base_model", "aliases", "lora_modules", "root", "max_model_len"),
    "version": ("version",),
    "metrics": ("block_size", "capacity_tokens"),
    "events": ("dp_ranks", "event_sources"),
}
"""Question -> the facts that its answer tells."""
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
    unanswered: frozenset[str] = frozenset()
    """Questions ("models", "version", "metrics", "events") without an answer in time. "Not found" is an answer."""

    def after(self, before: ReplicaFacts) -> ReplicaFacts:
        """These facts, and what was known `before` where a question got no answer this time."""
        kept = {name: getattr(before, name) for question in self.unanswered for name in _TOLD_BY[question]}
        if "events" in self.unanswered and "metrics" not in self.unanswered:
            kept["capacity_tokens"] = self.capacity_tokens // before.dp_ranks
        return replace(self, **kept)


async def ask_replica(client: httpx.AsyncClient, address: str, timeout_s: float = 2.0) -> ReplicaFacts:
    """All facts of the replica at `address` (base URL without /v1), asked at once. Never raises for its answers."""
    paths = {"models": "/v1/models", "version": "/version", "metrics": "/metrics", "events": "/kv_event_sources"}
    answers = await asyncio.gather(*(_get(client, f"{address}{path}", timeout_s) for path in paths.values()))
    by_question = dict(zip(paths, answers, strict=True))
    models, version, sources = (_json(by_question[question]) for question in ("models", "version", "events"))
    metrics = _text(by_question["metrics"])
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
        unanswered=frozenset(question for question, answer in by_question.items() if answer is None),
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


async def _get(client: httpx.AsyncClient, url: str, timeout_s: float) -> httpx.Response | None:
    """None: no answer, or one that says nothing about the question (5xx)."""
    try:
        answer = await client.get(url, timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer if answer.status_code < 500 else None


def _json(answer: httpx.Response | None) -> Any:
    try:
        return answer.json() if answer is not None and answer.status_code == 200 else None
    except ValueError:
        return None


def _text(answer: httpx.Response | None) -> str | None:
    return answer.text if answer is not None and answer.status_code == 200 else None
