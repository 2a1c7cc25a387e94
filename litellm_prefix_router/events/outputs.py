"""What a tracker answers: writes for the index, requests to the engine, alarms for people."""

from __future__ import annotations

import msgspec


class Store(msgspec.Struct, frozen=True):
    """These blocks (hashes packed 8 bytes each) are now held in the tier."""

    tier: str
    blocks: bytes


class Remove(msgspec.Struct, frozen=True):
    tier: str
    blocks: bytes


class NewIncarnation(msgspec.Struct, frozen=True):
    """All that was written about this rank is void.

    `reason`: "start", "restart", "gap", "cleared", "capacity" or "distrusted".
    """

    reason: str


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask the engine for its frames from this number on; answer with `replayed`, then `replay_ended` or `_failed`."""

    start: int


class Alarm(msgspec.Struct, frozen=True):
    """Something an operator should see. `kind`: "malformed", "block_size", "late_join", "gap", "capacity", "rank"."""

    kind: str
    detail: str


Output = Store | Remove | NewIncarnation | RequestReplay | Alarm
