"""Which socket reaches an engine's event stream: pure functions from what is configured to what ZMQ is told.

An engine binds an endpoint that has a wildcard or a local transport, and connects to any other; the other side does the
opposite. An endpoint that an operator gives (`ReplicaRecord.events`) is seen from here: a wildcard is bound, any other
address is connected to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

_WILDCARDS = ("*", "0.0.0.0", "[::]", "::")


class StreamAddress(msgspec.Struct, frozen=True):
    """`topic` None: any. `replay` is always connected to."""

    endpoint: str
    bind: bool
    topic: bytes | None = None
    replay: str | None = None


def engine_binds(endpoint: str) -> bool:
    """vLLM's rule; SGLang counts 0.0.0.0 as a wildcard too, and a vLLM that connects there makes no sense."""
    return "*" in endpoint or "::" in endpoint or "0.0.0.0" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def from_engine(api_address: str, source: Mapping[str, Any]) -> StreamAddress | None:
    """The stream of one rank as /kv_event_sources tells it; None where it publishes nothing."""
    endpoint = source.get("endpoint")
    if not endpoint or source.get("enable_kv_cache_events") is False or source.get("publisher") in ("null", None, ""):
        return None
    replay = source.get("replay_endpoint")
    binds = engine_binds(endpoint)
    return StreamAddress(
        endpoint=_reach(endpoint, api_address) if binds else endpoint,
        bind=not binds,
        topic=str(source.get("topic") or "").encode(),
        replay=_reach(replay, api_address) if replay else None,
    )


def from_operator(api_address: str, events: str, replay: str | None, rank: int = 0) -> StreamAddress:
    """The stream of a data-parallel rank where the configuration names rank 0's endpoints: TCP ports count up."""
    bind = events.startswith("tcp://") and any(f"://{host}:" in events for host in _WILDCARDS)
    return StreamAddress(
        _of_rank(events, rank), bind, None, _reach(_of_rank(replay, rank), api_address) if replay else None
    )


def _of_rank(endpoint: str, rank: int) -> str:
    before, _, port = endpoint.rpartition(":")
    return f"{before}:{int(port) + rank}" if endpoint.startswith("tcp://") and port.isdigit() else endpoint


def _reach(endpoint: str, api_address: str) -> str:
    """A bound endpoint as seen from here: the wildcard becomes the host of the replica's API."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint[len("tcp://") :].rpartition(":")
    if host not in _WILDCARDS:
        return endpoint
    name = urlsplit(api_address).hostname or "127.0.0.1"
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"
