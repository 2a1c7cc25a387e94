"""/metrics of a replica: the engine's names and labels, in Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .config import SimConfig
from .rank import Rank


def render(config: SimConfig, ranks: Sequence[Rank], process_start: float) -> str:
    """The whole page. `process_start`: wall clock, seconds."""
    return "\n".join(_lines(config, ranks, process_start)) + "\n"


def _lines(config: SimConfig, ranks: Sequence[Rank], process_start: float) -> Iterator[str]:
    yield from _metric("process_start_time_seconds", "gauge", [({}, process_start)])

    def each(name: str, kind: str, values: Sequence[float]) -> Iterator[str]:
        labelled = [({"engine": str(rank.number), "model_name": config.model_name}, v) for rank, v in zip(ranks, values, strict=True)]  # fmt: skip  # noqa: E501
        yield from _metric(name, kind, labelled)
        if kind == "counter":
            created = [(labels, rank.started_at) for (labels, _), rank in zip(labelled, ranks, strict=True)]
            yield from _metric(name.removesuffix("_total") + "_created", "gauge", created)

    stats = [rank.engine.stats for rank in ranks]
    yield from each("vllm:num_requests_running", "gauge", [len(rank.engine.running) for rank in ranks])
    yield from each("vllm:num_requests_waiting", "gauge", [len(rank.engine.waiting) for rank in ranks])
    waiting = [
        ({"engine": str(rank.number), "model_name": config.model_name, "reason": reason}, float(count))
        for rank in ranks
        for reason, count in (("capacity", len(rank.engine.waiting)), ("deferred", 0))
    ]
    yield from _metric("vllm:num_requests_waiting_by_reason", "gauge", waiting)
    yield from each("vllm:kv_cache_usage_perc", "gauge", [rank.engine.cache.usage for rank in ranks])
    yield from each("vllm:prefix_cache_queries_total", "counter", [item.prefix_queries for item in stats])
    yield from each("vllm:prefix_cache_hits_total", "counter", [item.prefix_hits for item in stats])
    yield from each("vllm:num_preemptions_total", "counter", [item.preemptions for item in stats])
    yield from each("vllm:prompt_tokens_total", "counter", [item.prompt_tokens for item in stats])
    yield from each("vllm:prompt_tokens_cached_total", "counter", [item.prompt_tokens_cached for item in stats])
    yield from each("vllm:generation_tokens_total", "counter", [item.generation_tokens for item in stats])
    finished = [
        ({"engine": str(rank.number), "finished_reason": reason, "model_name": config.model_name}, float(count))
        for rank in ranks
        for reason, count in rank.engine.stats.finished.items()
    ]
    yield from _metric("vllm:request_success_total", "counter", finished)
    if config.lora_modules:
        names = [{item.labels.lora_name or "" for item in rank.engine.running} - {""} for rank in ranks]
        adapters = ",".join(sorted(set().union(*names)))
        labels = {"max_lora": str(len(config.lora_modules)), "running_lora_adapters": adapters, "waiting_lora_adapters": ""}  # fmt: skip  # noqa: E501
        yield from _metric("vllm:lora_requests_info", "gauge", [(labels, process_start)])
    # With several ranks the engine tells the sum of their blocks in each of them.
    blocks = config.num_blocks * len(ranks)
    info = [
        (
            {
                "block_size": str(config.block_size),
                "cache_dtype": "auto",
                "enable_prefix_caching": "True",
                "engine": str(rank.number),
                "kv_cache_size_tokens": str(config.num_blocks * config.block_size),
                "num_gpu_blocks": str(blocks),
                "num_gpu_blocks_override": str(config.num_blocks),
                "prefix_caching_hash_algo": config.hash_algorithm,
            },
            1.0,
        )
        for rank in ranks
    ]
    yield from _metric("vllm:cache_config_info", "gauge", info)


def _metric(name: str, kind: str, series: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} Simulated."
    yield f"# TYPE {name} {kind}"
    for labels, value in series:
        text = ",".join(f'{key}="{_escaped(item)}"' for key, item in labels.items())
        yield f"{name}{{{text}}} {float(value)!r}" if text else f"{name} {float(value)!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
