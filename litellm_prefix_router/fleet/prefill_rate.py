"""How fast each replica prefills, measured from time to first token.

A sample is the uncached tokens that stood before the first token (this request's own and those pending ahead of it)
divided by the time until it came. Short prompts measure network and scheduling, so they do not count.
"""

from __future__ import annotations

MIN_SAMPLE_TOKENS = 256
SMOOTHING = 0.1


class PrefillRates:
    """Exponentially smoothed tokens per second by replica, `initial` until measured."""

    def __init__(self, initial_tokens_per_s: float) -> None:
        self._initial = initial_tokens_per_s
        self._rates: dict[str, float] = {}

    def observe(self, replica_id: str, tokens: int, seconds: float) -> None:
        """One first token: `tokens` were prefilled within `seconds` of dispatch."""
        if tokens < MIN_SAMPLE_TOKENS or seconds <= 0:
            return
        sample = tokens / seconds
        known = self._rates.get(replica_id)
        self._rates[replica_id] = sample if known is None else known + SMOOTHING * (sample - known)

    def rate(self, replica_id: str) -> float:
        """Tokens per second; an unmeasured replica is taken to be like the mean of the others."""
        known = self._rates.get(replica_id)
        if known is not None:
            return known
        return sum(self._rates.values()) / len(self._rates) if self._rates else self._initial
