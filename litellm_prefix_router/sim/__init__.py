"""A simulated vLLM replica and the traffic to try it with.

The replica speaks the engine's HTTP API and sends its KV events, and its cache follows the engine's rules to the byte
(tests/sim/test_recorded_truth.py), but it computes nothing: time passes instead. It shares no code with `prompt/` or
`index/`, so that it cannot share a mistake with them. Serving needs the extra `[sim]`; `workload` and `ideal` do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import SimConfig
from .faults import Faults

if TYPE_CHECKING:
    from .replica import SimReplica

__all__ = ["Faults", "SimConfig", "SimReplica"]


def __getattr__(name: str) -> Any:
    # The web server is imported only by those who serve.
    if name == "SimReplica":
        from .replica import SimReplica

        return SimReplica
    raise AttributeError(name)
