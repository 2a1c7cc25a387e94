"""This gateway's own load, counted from dispatch to the end of the response.

A reservation is taken with each decision and released exactly once, whatever way the request ends; releasing twice is
harmless, and one that nobody releases expires. Thread-safe: synchronous callers share it with the event loop.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..index.contract import ReplicaLoad


@dataclass(slots=True)
class _Reservation:
    replica_id: str
    pool: str
    prefill_tokens: int
    active_tokens: int
    since: float


class LoadLedger:
    """Requests, pending prefill tokens and active tokens per replica. `clock` gives seconds, monotonic."""

    def __init__(self, clock: Callable[[], float], ttl_s: float = 900.0) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._keys = itertools.count(1)
        self._open: dict[int, _Reservation] = {}
        self._loads: dict[str, ReplicaLoad] = {}
        self.expired = 0
        """Reservations that nobody released, since the start."""

    def reserve(self, pool: str, replica_id: str, *, prefill_tokens: int, active_tokens: int) -> int:
        """Count a dispatched request; returns the key that `first_token` and `release` take."""
        with self._lock:
            key = next(self._keys)
            self._open[key] = _Reservation(replica_id, pool, prefill_tokens, active_tokens, self._clock())
            self._add(replica_id, ReplicaLoad(1, prefill_tokens, active_tokens))
            return key

    def first_token(self, key: int) -> float | None:
        """The prefill is done: its tokens no longer wait. Returns the seconds since dispatch, once."""
        with self._lock:
            held = self._open.get(key)
            if held is None or held.prefill_tokens < 0:
                return None
            self._add(held.replica_id, ReplicaLoad(0, -held.prefill_tokens, 0))
            held.prefill_tokens = -1
            return self._clock() - held.since

    def release(self, key: int) -> bool:
        """The request has ended, in whatever way. False if it had been released before."""
        with self._lock:
            held = self._open.pop(key, None)
            if held is None:
                return False
            self._add(held.replica_id, ReplicaLoad(-1, -max(held.prefill_tokens, 0), -held.active_tokens))
            return True

    def expire(self) -> int:
        """Forget reservations older than the lifetime; returns how many. They are dispatched in order of age."""
        horizon = self._clock() - self._ttl_s
        with self._lock:
            overdue = list(itertools.takewhile(lambda key: self._open[key].since < horizon, self._open))
        gone = sum(self.release(key) for key in overdue)
        self.expired += gone
        return gone

    def load(self, replica_id: str) -> ReplicaLoad:
        return self._loads.get(replica_id, _IDLE)

    def loads(self) -> Mapping[str, ReplicaLoad]:
        """A copy of all loads that are not zero."""
        with self._lock:
            return dict(self._loads)

    def _add(self, replica_id: str, change: ReplicaLoad) -> None:
        total = self._loads.get(replica_id, _IDLE) + change
        if total == _IDLE:
            self._loads.pop(replica_id, None)
        else:
            self._loads[replica_id] = total


_IDLE = ReplicaLoad()
