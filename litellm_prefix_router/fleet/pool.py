"""Pools and their replicas as one gateway knows them: configured at start, completed by what the replicas say.

A *pool* is what a gateway routes within (LiteLLM's model group, Envoy's cluster). Its blocks are indexed under the
*cache name*, the engine's own name of the base model: an adapter's pool and its base model's pool have the same
replicas and must meet the same blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..prompt.encoded import PromptEncoder
from ..settings import ModelSettings
from .discovery import ReplicaFacts

DEFAULT_BLOCK_SIZE = 16
RANK_HEADER = "X-data-parallel-rank"
"""Request header by which vLLM is told which of its data-parallel ranks is to serve."""


def address_of(replica_id: str) -> str:
    """API address of a replica id, which is "<address>" or "<address>#<rank>"."""
    return replica_id.partition("#")[0]


def rank_of(replica_id: str) -> str:
    """The data-parallel rank in a replica id, "" where its address has one cache only."""
    return replica_id.partition("#")[2]


@dataclass(slots=True)
class Replica:
    """One replica of this gateway's configuration."""

    replica_id: str
    address: str
    """Base URL of the API without /v1."""
    model: str
    """The engine's model name that requests carry."""
    dp_rank: int = 0
    events: str | None = None
    replay: str | None = None
    facts: ReplicaFacts = field(default_factory=ReplicaFacts)


@dataclass(slots=True)
class Pool:
    """Replicas that a request of this name may go to."""

    name: str
    replicas: dict[str, Replica]
    settings: ModelSettings = field(default_factory=lambda: ModelSettings.model_validate({}))
    encoder: PromptEncoder | None = None
    encoder_problem: str | None = None
    """Why there is no encoder, for people."""
    sequence: itertools.count[int] = field(default_factory=itertools.count)
    _cache_name: str | None = None
    _block_size: int | None = None

    def learned(self) -> None:
        """Take in what replicas have said: call after their facts changed."""
        self._spread_ranks()
        self._cache_name = self._block_size = None

    def _spread_ranks(self) -> None:
        """Turn each replica that turned out to have several data-parallel ranks into one replica a rank: every rank
        has a cache of its own. Ids become "<address>#<rank>"."""
        if not any(r.facts.dp_ranks > 1 and r.replica_id == r.address for r in self.replicas.values()):
            return
        spread: dict[str, Replica] = {}
        for replica in self.replicas.values():
            if replica.facts.dp_ranks > 1 and replica.replica_id == replica.address:
                for rank in range(replica.facts.dp_ranks):
                    name = f"{replica.address}#{rank}"
                    spread[name] = dataclasses.replace(replica, replica_id=name, dp_rank=rank)
            else:
                spread[replica.replica_id] = replica
        self.replicas = spread  # at once: decisions may be reading the old one

    def at(self, address: str) -> list[str]:
        """Ids of the replicas behind an API address, one a data-parallel rank."""
        if address in self.replicas:
            return [address]
        return [name for name, replica in self.replicas.items() if replica.address == address]

    @property
    def model(self) -> str:
        """The engine's model name: what most replicas of the pool are asked for."""
        return Counter(replica.model for replica in self.replicas.values()).most_common(1)[0][0]

    @property
    def facts(self) -> ReplicaFacts:
        """The first reachable replica's answers (the replicas of a pool are alike)."""
        return next((r.facts for r in self.replicas.values() if r.facts.reachable), ReplicaFacts())

    @property
    def lora_modules(self) -> frozenset[str]:
        return frozenset(self.settings.lora_modules) | frozenset(self.facts.lora_modules)

    # Both count over all replicas, and each decision asks: kept until the facts change.

    @property
    def cache_name(self) -> str:
        """Name under which the pool's blocks are indexed."""
        if self._cache_name is None:
            facts, model = self.facts, self.model
            known = model in (*facts.aliases, *facts.lora_modules)
            self._cache_name = facts.base_model if facts.base_model and known else model
        return self._cache_name

    @property
    def block_size(self) -> int:
        """Tokens a block: the setting, else what most replicas report, else vLLM's default."""
        if self._block_size is None:
            reported = Counter(r.facts.block_size for r in self.replicas.values() if r.facts.block_size)
            usual = reported.most_common(1)[0][0] if reported else DEFAULT_BLOCK_SIZE
            self._block_size = self.settings.block_size or usual
        return self._block_size

    def describe_problems(self) -> Iterable[str]:
        """One line for each thing that keeps a replica from exact routing, by what the replicas say."""
        block_size = self.block_size
        for replica in self.replicas.values():
            size = replica.facts.block_size
            if size and size != block_size:
                yield (
                    f"replica {replica.replica_id} of pool {self.name!r} has block size {size}, the pool "
                    f"{block_size}: it is routed by load and recent placements only"
                )
            facts = replica.facts
            if facts.reachable and facts.aliases and replica.model not in (*facts.aliases, *facts.lora_modules):
                yield (
                    f"replica {replica.replica_id} does not serve model {replica.model!r}; "
                    f"it serves: {', '.join((*facts.aliases, *facts.lora_modules))}"
                )


class Fleet:
    """The pools of a gateway, by name."""

    def __init__(self, pools: Iterable[Pool] = ()) -> None:
        self.pools: dict[str, Pool] = {pool.name: pool for pool in pools}

    def pool(self, name: str) -> Pool | None:
        return self.pools.get(name)

    def by_cache_name(self) -> Mapping[str, Sequence[Replica]]:
        """Cache name -> its replicas, each once, over all pools."""
        found: dict[str, dict[str, Replica]] = {}
        for pool in self.pools.values():
            found.setdefault(pool.cache_name, {}).update(pool.replicas)
        return {name: list(replicas.values()) for name, replicas in found.items()}
