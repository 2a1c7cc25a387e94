"""What `prefix-router status` says of replicas whose responses contradict the index."""

from __future__ import annotations

import json
from typing import Any

from litellm_prefix_router.index.contract import ReplicaRecord
from litellm_prefix_router.index.memory import MemoryIndex
from litellm_prefix_router.observe.status import read_status


def gateway(**confidence: Any) -> bytes:
    pools = {"m": {"cache_name": "m", "replicas": list(confidence), "tokenizer": "ready", "problems": []}}
    return json.dumps({"gateway": "g", "breaker": "closed", "pools": pools, "confidence": confidence}).encode()


async def test_knowledge_is_shown_as_the_gateways_believe_it() -> None:
    index = MemoryIndex()
    writer, reader = index.writer(), index.reader("status")
    names = ["a", "b", "c"]
    await reader.announce("m", [ReplicaRecord(name, name) for name in names], 60)
    claim = await writer.claim("m", "ix", dict.fromkeys(names, 0), 60)
    for name in names:
        await writer.begin_incarnation("m", ReplicaRecord(name, name, knowledge="exact"), claim.claimed[name])
    state = gateway(
        a={"level": "exact", "mismatch": 0.01},
        b={"level": "stale", "mismatch": 0.74},
        c={"level": "none", "mismatch": 0.0},  # no decision has met it yet
    )
    await reader.publish_state("g", state, 60)
    status = await read_status(reader, "test")
    shown = {replica.replica: (replica.knowledge, replica.note) for replica in status.replicas}
    assert shown["a"] == shown["c"] == ("exact", None)
    assert shown["b"] == ("stale", "74% of the latest responses reported other cached tokens than predicted")
    assert len(status.problems) == 1 and status.problems[0].startswith("replica b is routed by stale knowledge: 74%")
