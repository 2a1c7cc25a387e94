"""Fewest pending prefill tokens, then fewest requests: load alone, blind to caches."""

from __future__ import annotations

from random import Random

from .base import PolicyInput, Ranking, order_by


class LeastLoad:
    """The last resort of the ladder, and a baseline."""

    name = "least-load"
    uses_prefix = False

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        keys = [
            (c.pending_prefill_tokens / c.prefill_tokens_per_s, float(c.requests), float(c.active_tokens))
            for c in given.candidates
        ]
        return Ranking(order_by(keys, rng))
