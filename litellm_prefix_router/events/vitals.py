"""Whether an engine's events can be believed, judged by its own metrics. No I/O but the one question.

Silence by itself means nothing: engines send no heartbeat, and an idle one has nothing to say. An engine whose
counters say that it computed prompts, while not one frame came, is not being heard. And counters that were created
anew tell that it is another process now, even where every frame of the change was missed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import httpx

SILENT_TOKENS = 4096
"""Computed tokens without a frame before an engine counts as not heard. Prompts shorter than a block store nothing."""

_SERIES = re.compile(r"^vllm:prefix_cache_(queries|hits)_(total|created)\{([^}]*)\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Vitals:
    """One rank's counters."""

    created_at: float
    """Unix time at which the engine's process made them; 0.0: it does not say."""
    computed_tokens: int
    """Prompt tokens looked up in the prefix cache and not found: they were computed."""


def read_vitals(metrics: str, rank: int) -> Vitals | None:
    """Of a Prometheus page; None where the engine has no such counters."""
    values: dict[str, float] = {}
    for what, kind, labels, value in _SERIES.findall(metrics):
        if f'engine="{rank}"' in labels:
            values[f"{what}_{kind}"] = float(value)
    if "queries_total" not in values or "hits_total" not in values:
        return None
    return Vitals(values.get("queries_created", 0.0), int(values["queries_total"] - values["hits_total"]))


async def ask_vitals(client: httpx.AsyncClient, address: str, rank: int, timeout_s: float = 2.0) -> Vitals | None:
    """The replica's counters; None without an answer."""
    try:
        answer = await client.get(f"{address}/metrics", timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return read_vitals(answer.text, rank) if answer.status_code == 200 else None


class Finding(Enum):
    """What one look at an engine came to."""

    FINE = "fine"
    SILENT = "silent"
    """It computes prompts and no frame comes."""
    RESTARTED = "restarted"
    """It is another process than at the last look, and no new connection told so."""


class VitalsWatch:
    """Compares counters with frames, look by look. Count frames and connections *before* asking for the counters."""

    def __init__(self) -> None:
        self._created_at = 0.0
        self._connections = -1
        self._frames = -1
        self._computed = 0
        self._doubts = 0

    def look(self, vitals: Vitals, frames: int, connections: int) -> Finding:
        """`frames`, `connections`: how many there were since the start."""
        another = bool(self._created_at) and vitals.created_at != self._created_at
        if another or frames != self._frames or vitals.computed_tokens < self._computed:
            missed = another and connections == self._connections
            self._created_at, self._connections = vitals.created_at, connections
            self._frames, self._computed, self._doubts = frames, vitals.computed_tokens, 0
            return Finding.RESTARTED if missed else Finding.FINE
        self._connections = connections
        # twice, since the counters may have moved between the count of the frames and the answer
        self._doubts = self._doubts + 1 if self.unheard(vitals) >= SILENT_TOKENS else 0
        return Finding.SILENT if self._doubts > 1 else Finding.FINE

    def unheard(self, vitals: Vitals) -> int:
        """Tokens computed since the last look at which frames had come."""
        return vitals.computed_tokens - self._computed
