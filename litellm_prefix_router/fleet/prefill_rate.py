"""How fast replicas prefill, measured from time to first token.

A sample is the uncached tokens that stood before the first token (this request's own and those pending ahead of it)
divided by the time until it came. Short prompts measure network and scheduling, so they do not count.

Samples are noisy, and a cost in seconds divides by the rate: were each replica's own estimate used, the one that
happened to be measured fastest would draw every new prompt. Replicas of a pool are usually alike, so all count as the
median one, but for one whose rate is really another (a smaller GPU).
"""

from __future__ import annotations

from statistics import median

MIN_SAMPLE_TOKENS = 256
SMOOTHING = 0.1
DIFFERENT = 2.0
"""A replica this many times faster or slower than the fleet's median is not like the others."""
MIN_SAMPLES = 10
"""Samples before a replica's own rate may count as different."""


class PrefillRates:
    """Exponentially smoothed tokens per second, `initial` until measured."""

    def __init__(self, initial_tokens_per_s: float) -> None:
        self._initial = initial_tokens_per_s
        self._rates: dict[str, float] = {}
        self._samples: dict[str, int] = {}
        self._typical = initial_tokens_per_s

    def observe(self, replica_id: str, tokens: int, seconds: float) -> None:
        """One first token: `tokens` were prefilled within `seconds` of dispatch."""
        if tokens < MIN_SAMPLE_TOKENS or seconds <= 0:
            return
        sample = tokens / seconds
        known = self._rates.get(replica_id)
        self._rates[replica_id] = sample if known is None else known + SMOOTHING * (sample - known)
        self._samples[replica_id] = self._samples.get(replica_id, 0) + 1
        self._typical = median(self._rates.values())

    def rate(self, replica_id: str) -> float:
        """Tokens per second of the replica: the fleet's median, or its own where that is really different."""
        own = self._rates.get(replica_id)
        if own is None or self._samples[replica_id] < MIN_SAMPLES:
            return self._typical
        return self._typical if 1 / DIFFERENT < own / self._typical < DIFFERENT else own

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._rates.pop(replica_id, None)
        self._samples.pop(replica_id, None)
        self._typical = median(self._rates.values()) if self._rates else self._initial
