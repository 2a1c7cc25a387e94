"""`kv_cache_report_mode`: what a client may not ask of an engine on its own.

From 0.26 on vLLM announces a request's cached blocks again where the body asks for it. An event of that kind looks like
that of a second copy, which the engine may remove while the first still hits. So whoever can ask for it makes the index
believe in blocks that are gone, and costs the indexers time. The copies counted are bounded (MAX_COPIES), so that it
costs misses at most; gateways take the field out of bodies that come from clients.
"""

from __future__ import annotations

from typing import Any

_FIELD = "kv_cache_report_mode"
_XARGS = "vllm_xargs"


def take_out_report_mode(body: dict[str, Any]) -> bool:
    """Take the field out of `body`, in place, and out of an `extra_body` that LiteLLM sends along. Was it there?"""
    found = False
    for fields in (body, body.get("extra_body")):
        xargs = fields.get(_XARGS) if isinstance(fields, dict) else None
        if not isinstance(fields, dict) or not isinstance(xargs, dict) or _FIELD not in xargs:
            continue
        found = True
        rest = {name: value for name, value in xargs.items() if name != _FIELD}
        if rest:
            fields[_XARGS] = rest
        else:
            del fields[_XARGS]
    return found
