"""How far a replica's index can be believed, from predicted against reported cached tokens.

A response that reports fewer cached tokens than the index promised, or more than anyone knew of, is a mismatch. The
smoothed share of mismatches, with what the indexer says of itself, gives the confidence that scales a match's credit.
When mismatches go on, the gateway tells the indexers that it doubts the replica, and they read its events anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SMOOTHING = 0.1
DEGRADED_ABOVE = 0.2
STALE_ABOVE = 0.5
DOUBT_AFTER = 20
"""Responses of one life before its mismatches are worth a resync."""
DOUBT_AGAIN_S = 120.0
"""Between the first two resyncs of a replica, then doubling: each costs it its matches until the replay is through,
and where the cause is another one (a tokenizer that is not the engine's), it mends nothing."""
DOUBT_AGAIN_AT_MOST_S = 3600.0
CONFIDENCE = {"exact": 1.0, "degraded": 0.7, "stale": 0.3, "none": 0.0}


class ConfidenceTracker:
    """Smoothed mismatch share by replica, 0 to 1. `clock` gives seconds, monotonic; `wall_clock` Unix time."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._mismatch: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._life: dict[str, int] = {}
        self._knowledge: dict[str, str] = {}
        self._doubted: dict[str, _Doubt] = {}

    def observe(self, replica_id: str, agreed: bool) -> None:
        """One response, and whether it bore its prediction out (Receipt.agrees_with)."""
        before = self._mismatch.get(replica_id, 0.0)
        self._mismatch[replica_id] = now = before + SMOOTHING * ((0.0 if agreed else 1.0) - before)
        self._seen[replica_id] = self._seen.get(replica_id, 0) + 1
        if now > DEGRADED_ABOVE and self._seen[replica_id] >= DOUBT_AFTER:
            self._doubt(replica_id)

    def level(self, replica_id: str, knowledge: str) -> str:
        """ "exact", "degraded", "stale" or "none": the indexer's word, lowered by what responses showed."""
        mismatch = self._mismatch.get(replica_id, 0.0)
        if mismatch <= DEGRADED_ABOVE:
            return knowledge
        return min(knowledge, "stale" if mismatch > STALE_ABOVE else "degraded", key=CONFIDENCE.__getitem__)

    def of(self, replica_id: str, knowledge: str, life: int = 0) -> float:
        """Confidence of the replica's level, 0 to 1. `life`: its incarnation, 0 if not known; a new one
        begins with a clean sheet."""
        if life and self._life.get(replica_id) != life:
            self._life[replica_id] = life
            self._mismatch.pop(replica_id, None)
            self._seen.pop(replica_id, None)
        self._knowledge[replica_id] = knowledge
        return CONFIDENCE[self.level(replica_id, knowledge)]

    def mismatch(self, replica_id: str) -> float:
        return self._mismatch.get(replica_id, 0.0)

    def current(self, replica_id: str) -> str | None:
        """The level by which the last decision knew the replica; None: there was none."""
        knowledge = self._knowledge.get(replica_id)
        return None if knowledge is None else self.level(replica_id, knowledge)

    def doubted_at(self, replica_id: str) -> float:
        """Unix time at which responses had contradicted the index for so long that its replica should be read anew;
        0.0: never."""
        doubt = self._doubted.get(replica_id)
        return doubt.at if doubt is not None else 0.0

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        for table in (self._mismatch, self._seen, self._life, self._knowledge, self._doubted):
            table.pop(replica_id, None)

    def _doubt(self, replica_id: str) -> None:
        now, last = self._clock(), self._doubted.get(replica_id)
        if last is None:
            self._doubted[replica_id] = _Doubt(self._wall_clock(), now + DOUBT_AGAIN_S, 2 * DOUBT_AGAIN_S)
        elif now >= last.again:
            wait_s = min(last.wait_s, DOUBT_AGAIN_AT_MOST_S)
            self._doubted[replica_id] = _Doubt(self._wall_clock(), now + wait_s, 2 * wait_s)


@dataclass(frozen=True, slots=True)
class _Doubt:
    at: float
    again: float
    """Monotonic time from which the replica may be doubted again."""
    wait_s: float
