"""Consistent hashing with bounded loads: equal prefixes meet on one replica without any shared state.

Candidates are ordered by rendezvous hashing (highest random weight) of the prefix key, so that a replica that comes or
goes moves only its own share; one whose requests exceed the bound times the mean is passed over.
"""

from __future__ import annotations

import math
from random import Random

from xxhash import xxh3_64_intdigest

from .base import PolicyInput, Ranking
from .least_load import LeastLoad


class ConsistentHash:
    """Without a prefix key there is nothing to hash: least load."""

    name = "chwbl"
    uses_prefix = True

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        if given.prefix_key is None:
            return LeastLoad().rank(given, rng)
        candidates = given.candidates
        seed = given.prefix_key & (2**64 - 1)
        weights = [xxh3_64_intdigest(c.replica_id.encode("utf-8", "surrogatepass"), seed) for c in candidates]
        # the request to be placed counts too, else an idle fleet would have a bound of zero
        mean = (sum(c.requests for c in candidates) + 1) / len(candidates)
        bound = math.ceil(mean * given.load_bound)
        order = sorted(range(len(candidates)), key=lambda i: (candidates[i].requests >= bound, -weights[i]))
        return Ranking(order)
