"""Prometheus metrics of the decision path. Labels are bounded: pools, replicas, sources and stable reasons."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..decision import Receipt

_FAST = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class Metrics:
    """Observer of decisions and outcomes. One instance a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.decisions = Counter(
            "prefix_router_decisions",
            "Decisions by knowledge and reason.",
            ["pool", "source", "reason"],
            registry=registry,
        )
        self.placed = Counter(
            "prefix_router_placed_requests", "Requests by chosen replica.", ["pool", "replica"], registry=registry
        )
        self.prompt_tokens = Counter(
            "prefix_router_prompt_tokens", "Prompt tokens of placed requests.", ["pool"], registry=registry
        )
        self.match_tokens = Counter(
            "prefix_router_match_tokens",
            "Prompt tokens that the choice was known to hold.",
            ["pool"],
            registry=registry,
        )
        self.predicted = Counter(
            "prefix_router_predicted_cached_tokens",
            "Predicted cached tokens of audited responses.",
            ["pool"],
            registry=registry,
        )
        self.reported = Counter(
            "prefix_router_reported_cached_tokens",
            "Cached tokens that engines reported.",
            ["pool"],
            registry=registry,
        )
        self.audited = Counter(
            "prefix_router_audited_responses",
            "Responses whose cached tokens were compared.",
            ["pool", "agreed"],
            registry=registry,
        )
        self.seconds = Histogram(
            "prefix_router_decision_seconds", "Decision time by stage.", ["stage"], buckets=_FAST, registry=registry
        )

    def decided(self, receipt: Receipt) -> None:
        self.decisions.labels(receipt.pool, str(receipt.source), receipt.reason).inc()
        self.placed.labels(receipt.pool, receipt.choice).inc()
        self.prompt_tokens.labels(receipt.pool).inc(receipt.prompt_tokens)
        self.match_tokens.labels(receipt.pool).inc(receipt.match_tokens)
        for stage, milliseconds in receipt.timings_ms.items():
            self.seconds.labels(stage).observe(milliseconds / 1e3)

    def finished(self, receipt: Receipt, cached_tokens: int | None) -> None:
        if cached_tokens is None or not receipt.tokens_by:
            return
        self.predicted.labels(receipt.pool).inc(receipt.match_tokens)
        self.reported.labels(receipt.pool).inc(cached_tokens)
        self.audited.labels(receipt.pool, "yes" if receipt.agrees_with(cached_tokens) else "no").inc()


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
        self.by_source[str(receipt.source)] = self.by_source.get(str(receipt.source), 0) + 1
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
