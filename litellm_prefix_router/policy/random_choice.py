"""Any candidate, uniformly: a baseline."""

from __future__ import annotations

from random import Random

from .base import PolicyInput, Ranking, order_by


class RandomChoice:
    """Uniform over the candidates."""

    name = "random"
    uses_prefix = False

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        return Ranking(order_by([()] * len(given.candidates), rng))
