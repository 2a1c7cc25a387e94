"""How far a replica's index can be believed, from predicted against reported cached tokens.

A response that reports fewer cached tokens than the index promised, or more than anyone knew of, is a mismatch. The
smoothed share of mismatches, with what the indexer says of itself, gives the confidence that scales a match's credit.
"""

from __future__ import annotations

SMOOTHING = 0.1
DEGRADED_ABOVE = 0.2
STALE_ABOVE = 0.5
CONFIDENCE = {"exact": 1.0, "degraded": 0.7, "stale": 0.3, "none": 0.0}


class ConfidenceTracker:
    """Smoothed mismatch share by replica, 0 to 1."""

    def __init__(self) -> None:
        self._mismatch: dict[str, float] = {}

    def observe(self, replica_id: str, agreed: bool) -> None:
        """One response, and whether it bore its prediction out (Receipt.agrees_with)."""
        before = self._mismatch.get(replica_id, 0.0)
        self._mismatch[replica_id] = before + SMOOTHING * ((0.0 if agreed else 1.0) - before)

    def level(self, replica_id: str, knowledge: str) -> str:
        """ "exact", "degraded", "stale" or "none": the indexer's word, lowered by what responses showed."""
        mismatch = self._mismatch.get(replica_id, 0.0)
        seen = "stale" if mismatch > STALE_ABOVE else "degraded" if mismatch > DEGRADED_ABOVE else "exact"
        return min(knowledge, seen, key=CONFIDENCE.__getitem__)

    def of(self, replica_id: str, knowledge: str) -> float:
        """Confidence of the replica's level, 0 to 1."""
        return CONFIDENCE[self.level(replica_id, knowledge)]

    def mismatch(self, replica_id: str) -> float:
        return self._mismatch.get(replica_id, 0.0)

    def forget(self, replica_id: str) -> None:
        """A new incarnation begins with a clean sheet."""
        self._mismatch.pop(replica_id, None)
