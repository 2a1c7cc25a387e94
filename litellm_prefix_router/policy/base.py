"""What a policy sees and answers. A policy is a pure function: no I/O, no clock, no randomness but the generator
that it is given, so that every decision can be explained, replayed offline and tested by table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """One replica that may serve the request. All sizes are in tokens."""

    replica_id: str
    match_tokens: int = 0
    """Leading prompt tokens that its cache holds, by the engine's own events."""
    recent_tokens: int = 0
    """Leading prompt tokens that were placed there within the placement lifetime; being computed or cached by now."""
    lower_tokens: Mapping[str, int] = {}
    """Tier ("cpu", "storage") -> leading tokens held by that tier or a faster one."""
    knowledge: str = "none"
    """How it is known: "exact", "degraded", "stale", or "none" without events."""
    confidence: float = 1.0
    """How far `match_tokens` can be believed, 0 to 1."""
    requests: int = 0
    """Requests in flight, as counted by all gateways."""
    pending_prefill_tokens: int = 0
    """Uncached prompt tokens dispatched to it whose first output token has not come yet."""
    active_tokens: int = 0
    """Prompt tokens of all requests in flight: the KV memory they pin."""
    capacity_tokens: int = 0
    """KV memory; 0: unknown."""
    prefill_tokens_per_s: float = 8000.0

    def credit(self, tier_credit: Mapping[str, float]) -> float:
        """Tokens that need no prefill here: the best of the known match, a recent placement and the lower tiers."""
        best = max(self.match_tokens * self.confidence, float(self.recent_tokens))
        for tier, tokens in self.lower_tokens.items():
            # only what the lower tier adds beyond the GPU's match is worth less
            extra = max(0, tokens - self.match_tokens)
            best = max(best, (self.match_tokens + extra * tier_credit.get(tier, 0.0)) * self.confidence)
        return best


class PolicyInput(msgspec.Struct, frozen=True):
    """One request with its candidates, and everything else a policy may look at."""

    candidates: Sequence[Candidate]
    prompt_tokens: int = 0
    """0 where unknown."""
    prefix_key: int | None = None
    """Hash of the prompt's beginning (or of its session, where the body cannot be read), for consistent hashing."""
    sequence: int = 0
    """Counts the decisions of this gateway for the pool (round robin needs it)."""
    backlog_weight: float = 2.0
    backlog_weight_max: float = 20.0
    tier_credit: Mapping[str, float] = msgspec.field(default_factory=lambda: {"cpu": 0.8, "storage": 0.4})
    load_bound: float = 1.25
    """Consistent hashing passes over a replica whose load exceeds this times the mean."""


class Ranking(msgspec.Struct, frozen=True):
    """Indices into the candidates, best first, and each candidate's cost (same order as the candidates)."""

    order: Sequence[int]
    costs: Sequence[float] | None = None
    """Seconds of prefill where the policy has a cost, else None."""


class Policy(Protocol):
    """A named scoring function."""

    name: str
    uses_prefix: bool
    """Whether it looks at matches; if not, prompts are not tokenized for it."""

    def rank(self, given: PolicyInput, rng: Random) -> Ranking:
        """All candidates, best first. `given.candidates` has at least one."""
        ...


def order_by(keys: Sequence[tuple[float, ...]], rng: Random) -> list[int]:
    """Indices sorted by key, equal keys in random order."""
    indices = list(range(len(keys)))
    rng.shuffle(indices)
    indices.sort(key=keys.__getitem__)
    return indices
