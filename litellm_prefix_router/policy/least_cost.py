"""The default policy: send the request where serving it costs the fleet least, in seconds of prefill.

    cost = pending prefill work + (1 + λ) · this request's uncached work + overflow

λ grows with the fleet's mean backlog: on an idle fleet a miss costs its own time only, under load it delays everyone
behind it. Overflow is the work that must drain before the request's tokens fit into the replica's KV memory.
"""

from __future__ import annotations

from random import Random

from .base import PolicyInput, Ranking, order_by


class LeastCost:
    """See the module's formula; ties are broken at random."""

    name = "least-cost"
    uses_prefix = True

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        candidates = given.candidates
        backlog_s = sum(c.pending_prefill_tokens / c.prefill_tokens_per_s for c in candidates) / len(candidates)
        weight = 1.0 + min(given.backlog_weight * backlog_s, given.backlog_weight_max)
        costs = []
        for c in candidates:
            # a prompt served wholly from cache still computes its last token
            uncached = max(given.prompt_tokens - c.credit(given.tier_credit), 1.0)
            overflow = 0.0
            if c.capacity_tokens:
                overflow = max(0, c.active_tokens + given.prompt_tokens - c.capacity_tokens)
            costs.append((c.pending_prefill_tokens + weight * uncached + overflow) / c.prefill_tokens_per_s)
        # equal costs (an idle fleet and a new prompt): fewest requests, then at random
        keys = [(round(cost, 9), float(c.requests)) for cost, c in zip(costs, candidates, strict=True)]
        return Ranking(order_by(keys, rng), costs)
