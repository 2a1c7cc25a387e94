"""Requests in flight: what was decided for each, so that load is released once, however the request ends.

The ticket's number travels in the request's LiteLLM metadata, which every hook and every retry of the request sees.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from ...decision import Decision
from ...router import PrefixRouter

KEY = "prefix_router"
_BUCKETS = ("metadata", "litellm_metadata")


@dataclass(slots=True)
class Ticket:
    """One attempt of one request."""

    number: int
    decision: Decision
    failed: frozenset[str] = field(default_factory=frozenset)
    """Replicas that failed this request before."""
    since: float = field(default_factory=time.monotonic)


class Tickets:
    """Open tickets by number; thread-safe, since logging hooks may run in other threads."""

    def __init__(self, router: PrefixRouter, ttl_s: float) -> None:
        self._router = router
        self._ttl_s = ttl_s
        self._numbers = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self._lock = threading.Lock()

    def open(self, request_kwargs: MutableMapping[str, Any], decision: Decision, failed: frozenset[str]) -> Ticket:
        """Begin an attempt and note it in the request's metadata."""
        ticket = Ticket(next(self._numbers), decision, failed)
        with self._lock:
            self._open[ticket.number] = ticket
        note = {"ticket": ticket.number, "receipt": decision.receipt.header()}
        bucket = _bucket(request_kwargs)
        if bucket is None:
            bucket = request_kwargs["metadata"] = {}
        bucket[KEY] = note
        return ticket

    def find(self, carrier: Mapping[str, Any] | None) -> Ticket | None:
        """The open ticket of a request, from its keyword arguments, request data or logging payload."""
        number = note_of(carrier).get("ticket")
        return self._open.get(number) if isinstance(number, int) else None

    def retire_previous(self, request_kwargs: Mapping[str, Any]) -> frozenset[str]:
        """A new attempt begins: end the one before, if there was one; returns the replicas to avoid."""
        previous = self.find(request_kwargs)
        if previous is None:
            return frozenset()
        self.close(previous)
        bucket = _bucket(request_kwargs)
        if bucket is not None:  # where another strategy decides, nothing of what follows is ours
            bucket.pop(KEY, None)
        return previous.failed | {previous.decision.replica_id}

    def released(self, ticket: Ticket | None) -> None:
        """The attempt no longer loads its replica; what it reported may still come."""
        if ticket is not None:
            self._router.released(ticket.decision)

    def close(self, ticket: Ticket | None, cached_tokens: int | None = None) -> None:
        """The attempt is over and has reported all that it will."""
        if ticket is None:
            return
        with self._lock:
            if self._open.pop(ticket.number, None) is None:
                return
        self._router.finished(ticket.decision, cached_tokens)

    def close_number(self, number: int) -> None:
        self.close(self._open.get(number))

    def expire(self) -> None:
        """Forget tickets that nobody closed."""
        horizon = time.monotonic() - self._ttl_s
        with self._lock:
            overdue = list(itertools.takewhile(lambda t: t.since < horizon, self._open.values()))
        for ticket in overdue:
            self.close(ticket)

    def __len__(self) -> int:
        return len(self._open)


def note_of(carrier: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What `Tickets.open` noted, wherever LiteLLM keeps the metadata by now; empty if nothing."""
    for holder in (carrier, (carrier or {}).get("litellm_params")):
        if isinstance(holder, Mapping):
            for name in _BUCKETS:
                bucket = holder.get(name)
                if isinstance(bucket, Mapping) and isinstance(bucket.get(KEY), Mapping):
                    note: Mapping[str, Any] = bucket[KEY]
                    return note
    return {}


def _bucket(request_kwargs: Mapping[str, Any]) -> MutableMapping[str, Any] | None:
    # LiteLLM routes some APIs with litellm_metadata, whose `metadata` then belongs to the client's request
    for name in reversed(_BUCKETS):
        bucket = request_kwargs.get(name)
        if isinstance(bucket, MutableMapping):
            return bucket
    return None
