"""Routing policies by name: pure scoring functions, one file each. Adding one touches `POLICIES` below."""

from __future__ import annotations

from ..settings import SettingsError
from .base import Candidate, Policy, PolicyInput, Ranking
from .chwbl import ConsistentHash
from .least_cost import LeastCost
from .least_load import LeastLoad
from .random_choice import RandomChoice
from .round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (LeastCost, LeastLoad, RoundRobin, RandomChoice, ConsistentHash)
}

__all__ = ["POLICIES", "Candidate", "Policy", "PolicyInput", "Ranking", "policy_named"]


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises SettingsError that lists the names."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise SettingsError(f"policy: no policy is called {name!r}; known: {', '.join(sorted(POLICIES))}") from None
