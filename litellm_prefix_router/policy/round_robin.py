"""Each candidate in turn, by a counter that is passed in: the baseline of the demo."""

from __future__ import annotations

from random import Random

from .base import PolicyInput, Ranking


class RoundRobin:
    """Position = the pool's decision counter, over the candidates in name order so that health changes shift little."""

    name = "round-robin"
    uses_prefix = False

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        by_name = sorted(range(len(given.candidates)), key=lambda i: given.candidates[i].replica_id)
        start = given.sequence % len(by_name)
        return Ranking(by_name[start:] + by_name[:start])
