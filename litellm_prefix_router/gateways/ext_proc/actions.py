"""What a stream's state machine wants done: answers to Envoy, a question to the router, outcomes to report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ...request import RoutingRequest
from . import wire


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this to Envoy."""

    message: wire.Response


@dataclass(frozen=True, slots=True)
class Place:
    """Ask the router, then call `placed` with its decision. Always the last action."""

    request: RoutingRequest


@dataclass(frozen=True, slots=True)
class Served:
    """Response headers came from this replica (None: Envoy answered by itself)."""

    replica_id: str | None
    status: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill is done."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over. Comes once, and only after `placed`."""

    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Envoy's own fallback places this one: "unknown_pool", "no_endpoints"."""

    reason: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the gRPC stream. Without `Finished` before it the response is not followed, and how long the request lasts
    stays unknown."""


Action: TypeAlias = Reply | Place | Served | FirstToken | Finished | Unplaced | HangUp
