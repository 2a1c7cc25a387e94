"""What the gateways hand to the router: one request, in the core's own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """One request to place.

    `body` is the JSON object that the replica will receive, already parsed, and is never changed. `candidates` are
    the replica ids that may serve it, in the gateway's order: the decision is always one of them.
    """

    pool: str
    """Name of the group of interchangeable replicas (LiteLLM: model group; Envoy: cluster)."""
    path: str
    """API path at the replica, such as "/v1/chat/completions"."""
    body: Mapping[str, Any]
    candidates: Sequence[str]
    request_id: str = ""
    session: str | None = None
    """A key for stickiness (a conversation or user id), where the gateway has one."""
    avoid: frozenset[str] = field(default_factory=frozenset)
    """Candidates that failed this very request before; chosen only if nothing else is left."""
    max_wait_s: float | None = None
    """Refuse the request where even the chosen replica has more seconds of prefill ahead of it."""
    note: str | None = None
    """Something the gateway could not know about the prompt; kept in the receipt."""
