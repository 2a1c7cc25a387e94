"""What can be made to go wrong with a replica, for tests: set in process, or by `POST /sim/fault`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Faults:
    """Switches, all off. Counters count down as they are used."""

    fail_requests: int = 0
    """The next n generation requests are answered with `fail_status`."""
    fail_status: int = 500
    drop_requests: int = 0
    """The connection of the next n generation requests is closed after `drop_after_tokens` tokens."""
    drop_after_tokens: int = 1
    drop_frames: int = 0
    """The next n event frames are not sent; their sequence numbers pass, and replay still has them."""
    forget_frames: int = 0
    """The next n event frames are neither sent nor kept for replay."""
    slow_factor: float = 1.0
    """Steps take this many times as long."""
    unhealthy: bool = False
    """/health answers 503."""
    frozen: bool = False
    """Nothing moves and nothing is answered, as under SIGSTOP, until this is taken back."""
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, values: Mapping[str, Any]) -> None:
        """Set switches by name. Raises ValueError, and sets none, for an unknown name or a value of another kind."""
        known = {item.name: type(getattr(self, item.name)) for item in fields(self) if item.name[0] != "_"}
        converted = {}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"unknown fault {name!r}; known: {', '.join(known)}")
            if isinstance(value, bool) != (known[name] is bool) or not isinstance(value, int | float):
                raise ValueError(f"fault {name!r} wants a {known[name].__name__}, got {value!r}")
            converted[name] = known[name](value)
        for name, value in converted.items():
            setattr(self, name, value)
        (self._thawed.clear if self.frozen else self._thawed.set)()

    def as_dict(self) -> dict[str, Any]:
        """The switches as they stand."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name[0] != "_"}

    def use(self, counter: str) -> bool:
        """Count one down; whether there was one."""
        left: int = getattr(self, counter)
        if left > 0:
            setattr(self, counter, left - 1)
        return left > 0

    async def thawed(self) -> None:
        """Return at once, or as soon as the replica is no longer frozen."""
        while self.frozen:
            self._thawed.clear()
            await self._thawed.wait()
