"""Prometheus metrics of the decision path. Labels are bounded: pools, replicas, sources and stable reasons."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from ..decision import Receipt

_FAST = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class _Children(dict[tuple[str, ...], Any]):
    """A metric's children by label values; `labels` itself checks and locks each time (4 µs)."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def __missing__(self, values: tuple[str, ...]) -> Any:
        child = self[values] = self.metric.labels(*values)
        return child


class Metrics:
    """Observer of decisions and outcomes. One instance a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> _Children:
            return _Children(Counter(f"prefix_router_{name}", text, labels, registry=registry))

        self._decisions = counter("decisions", "Decisions by knowledge and reason.", "pool", "source", "reason")
        self._placed = counter("placed_requests", "Requests by chosen replica.", "pool", "replica")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of placed requests.", "pool")
        self._match_tokens = counter("match_tokens", "Prompt tokens that the choice was known to hold.", "pool")
        self._predicted = counter("predicted_cached_tokens", "Predicted cached tokens of audited responses.", "pool")
        self._reported = counter("reported_cached_tokens", "Cached tokens that engines reported.", "pool")
        self._audited = counter("audited_responses", "Responses whose cached tokens were compared.", "pool", "agreed")
        self._seconds = _Children(
            Histogram(
                "prefix_router_decision_seconds", "Decision time by stage.", ["stage"], buckets=_FAST, registry=registry
            )
        )

        self._confidence = _Children(
            Gauge(
                "prefix_router_confidence",
                "How far the last decision believed a replica's index, 0 to 1: by its indexer and by responses.",
                ["replica"],
                registry=registry,
            )
        )

    def believed(self, replica_id: str, confidence: float) -> None:
        """How far the replica's index is believed now."""
        self._confidence[replica_id,].set(confidence)

    def gone(self, replica_id: str) -> None:
        """The replica is no more: an alert on its last confidence must not stay."""
        if self._confidence.pop((replica_id,), None) is not None:
            self._confidence.metric.remove(replica_id)

    def decided(self, receipt: Receipt) -> None:
        pool = receipt.pool
        self._decisions[pool, receipt.source, receipt.reason].inc()
        self._placed[pool, receipt.choice].inc()
        self._prompt_tokens[pool,].inc(receipt.prompt_tokens)
        self._match_tokens[pool,].inc(receipt.match_tokens)
        for stage, milliseconds in receipt.timings_ms.items():
            self._seconds[stage,].observe(milliseconds / 1e3)

    def finished(self, receipt: Receipt, cached_tokens: int | None) -> None:
        if cached_tokens is None or not receipt.tokens_by:
            return
        pool = receipt.pool
        self._predicted[pool,].inc(receipt.match_tokens)
        self._reported[pool,].inc(cached_tokens)
        self._audited[pool, "yes" if receipt.agrees_with(cached_tokens) else "no"].inc()


class Tally:
    """Counts for people: what `prefix-router status` shows of a gateway. Observer, like Metrics."""

    def __init__(self, *others: Metrics) -> None:
        self._others = others
        self.decisions = 0
        self.by_source: dict[str, int] = {}
        self.by_reason: dict[str, int] = {}
        self.prompt_tokens = 0
        self.match_tokens = 0
        self.audited = 0
        self.agreed = 0
        self.predicted_tokens = 0
        self.reported_tokens = 0

    def decided(self, receipt: Receipt) -> None:
        self.decisions += 1
        self.by_source[receipt.source.value] = self.by_source.get(receipt.source.value, 0) + 1
        self.by_reason[receipt.reason] = self.by_reason.get(receipt.reason, 0) + 1
        self.prompt_tokens += receipt.prompt_tokens
        self.match_tokens += receipt.match_tokens
        for other in self._others:
            other.decided(receipt)

    def finished(self, receipt: Receipt, cached_tokens: int | None) -> None:
        if cached_tokens is not None and receipt.tokens_by:
            self.audited += 1
            self.agreed += receipt.agrees_with(cached_tokens)
            self.predicted_tokens += receipt.match_tokens
            self.reported_tokens += cached_tokens
        for other in self._others:
            other.finished(receipt, cached_tokens)

    def as_dict(self) -> dict[str, object]:
        return {
            "decisions": self.decisions,
            "by_source": dict(self.by_source),
            "by_reason": dict(self.by_reason),
            "prompt_tokens": self.prompt_tokens,
            "match_tokens": self.match_tokens,
            "audited": self.audited,
            "agreed": self.agreed,
            "predicted_tokens": self.predicted_tokens,
            "reported_tokens": self.reported_tokens,
        }
