"""Prometheus metrics of the Envoy gateway, beside those of the decisions. One instance a registry."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class Meters:
    """Labels are bounded: replicas of the configuration and stable reasons."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.streams = Gauge("prefix_router_envoy_streams", "Requests that are followed now.", registry=registry)
        self.unplaced = Counter(
            "prefix_router_envoy_unplaced_requests",
            "Requests left to Envoy's own balancing, or refused.",
            ["reason"],
            registry=registry,
        )
        self.moved = Counter(
            "prefix_router_envoy_moved_requests",
            "Requests that Envoy's retry took from the chosen replica.",
            ["replica"],
            registry=registry,
        )
        self.errors = Counter(
            "prefix_router_envoy_stream_errors", "Streams on which the processor failed.", registry=registry
        )
        self.up = Gauge("prefix_router_envoy_replica_up", "1: may be chosen.", ["replica"], registry=registry)
