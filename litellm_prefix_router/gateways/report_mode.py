"""`kv_cache_report_mode`: what a client may not ask of an engine on its own.

From 0.26 on vLLM announces a request's cached blocks again where the body asks for it. An event of that kind looks like
that of a second copy, which the engine may remove while the first still hits. So whoever can ask for it makes the index
believe in blocks that are gone, and costs the indexers time. The copies counted are bounded (MAX_COPIES), so that it
costs misses at most; gateways take the field out of bodies that come from clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELD = "kv_cache_report_mode"
XARGS = "vllm_xargs"


def without_report_mode(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body's `vllm_xargs` without the field; None where it is not there."""
    given = body.get(XARGS)
    if not isinstance(given, dict) or _FIELD not in given:
        return None
    return {name: value for name, value in given.items() if name != _FIELD}


def take_out_report_mode(body: dict[str, Any]) -> bool:
    """Take the field out of `body`, in place, and out of an `extra_body` that LiteLLM sends along. Was it there?"""
    found = False
    for fields in (body, body.get("extra_body")):
        if not isinstance(fields, dict) or (rest := without_report_mode(fields)) is None:
            continue
        found = True
        if rest:
            fields[XARGS] = rest
        else:
            del fields[XARGS]
    return found
