"""The state of a whole set-up, read from the index: gateways, indexers, replicas, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..fleet.confidence import CONFIDENCE, DEGRADED_ABOVE
from ..index.contract import IndexReader, IndexUnavailable, ReplicaRecord


@dataclass(slots=True)
class ReplicaStatus:
    """One replica of one pool."""

    replica: str
    pool: str
    knowledge: str
    note: str | None = None
    block_size: int = 0
    blocks: int = 0
    """Blocks that the index holds for it."""
    incarnation: int = 0
    indexer: str | None = None
    last_event_at: float = 0.0
    """Unix time; 0.0: none yet."""
    requests: int = 0
    pending_prefill_tokens: int = 0


@dataclass(slots=True)
class Status:
    """`problems` is empty when all is well; each entry is one line for people."""

    index: str
    replicas: list[ReplicaStatus] = field(default_factory=list)
    gateways: list[dict[str, Any]] = field(default_factory=list)
    indexers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}


async def read_status(reader: IndexReader, where: str) -> Status:
    """Ask the index. Never raises for an index that cannot be reached: that is a status too."""
    status = Status(index=where)
    try:
        states = await reader.states()
        status.gateways = [json.loads(raw) for raw in states.values()]
        for pool in await reader.pools():
            await reader.lookup(pool, ())  # learns which gateways there are; their loads come with the next
            lookup = await reader.lookup(pool, ())
            for record in lookup.roster.values():
                load = lookup.loads.get(record.replica_id)
                status.replicas.append(_replica(pool, record, load))
            announced = {
                r
                for g in status.gateways
                for p in g["pools"].values()
                for r in p["replicas"]
                if p["cache_name"] == pool
            }
            for missing in sorted(announced - lookup.roster.keys()):
                status.replicas.append(ReplicaStatus(missing, pool, "none", "no indexer follows it"))
    except IndexUnavailable as error:
        status.problems.append(f"the index cannot be reached: {error}")
        return status
    for gateway in status.gateways:
        for replica in status.replicas:
            _lower(replica, gateway)
    status.indexers = sorted({r.indexer for r in status.replicas if r.indexer})
    status.problems = _problems(status)
    return status


def _replica(pool: str, record: ReplicaRecord, load: Any) -> ReplicaStatus:
    return ReplicaStatus(
        replica=record.replica_id,
        pool=pool,
        knowledge=record.knowledge,
        note=record.note,
        block_size=record.block_size,
        blocks=record.blocks,
        incarnation=record.incarnation,
        indexer=record.indexer,
        last_event_at=record.last_event_at,
        requests=load.requests if load is not None else 0,
        pending_prefill_tokens=load.prefill_tokens if load is not None else 0,
    )


def _lower(replica: ReplicaStatus, gateway: Mapping[str, Any]) -> None:
    """Knowledge is what the gateways make of it: responses may have contradicted the index."""
    seen = gateway.get("confidence", {}).get(replica.replica)
    if seen is None or seen["mismatch"] <= DEGRADED_ABOVE or CONFIDENCE[seen["level"]] >= CONFIDENCE[replica.knowledge]:
        return
    replica.knowledge = seen["level"]
    replica.note = f"{seen['mismatch']:.0%} of the latest responses reported other cached tokens than predicted"


def _problems(status: Status) -> list[str]:
    problems = []
    if not status.gateways:
        problems.append("no gateway is running with these settings (or it cannot reach this Redis)")
    if status.gateways and not status.replicas:
        problems.append("no gateway has a pool: a model group needs at least two replicas")
    for replica in status.replicas:
        if replica.knowledge != "exact":
            why = f": {replica.note}" if replica.note else ""
            problems.append(f"replica {replica.replica} is routed by {replica.knowledge} knowledge{why}")
    for gateway in status.gateways:
        problems += _gateway_problems(gateway)
    return problems


def _gateway_problems(gateway: Mapping[str, Any]) -> list[str]:
    name = gateway["gateway"]
    problems = []
    if gateway["breaker"] != "closed":
        problems.append(f"gateway {name}: its circuit breaker to Redis is {gateway['breaker']}")
    for pool, info in gateway["pools"].items():
        if not str(info["tokenizer"]).startswith("ready"):
            problems.append(f"gateway {name}: tokenizer of {pool}: {info['tokenizer']}")
        problems += [f"gateway {name}: {line}" for line in info["problems"]]
    return problems
