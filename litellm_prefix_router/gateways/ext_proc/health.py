"""Which replicas may be chosen: a book of signs, without I/O. Envoy's own health checks do not filter the endpoints
that a processor names, so this has to.

    sign                                     state of the replica
    -----------------------------------      -----------------------------------------------------------------
    probe answered 2xx, response < 500       up
    probe refused or answered otherwise      down until a probe succeeds
    probe without an answer, n times         down until a probe succeeds
    Envoy could not reach it                 suspect: behind all others until the probe that is due at once
    n responses with 5xx in a row            out for a while

Replicas are known here by their API address: its ranks live and die together. One that nothing is known of counts as
up. Times are monotonic seconds from the clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Signs:
    down: bool = False
    suspect: bool = False
    timeouts: int = 0
    failures: int = 0
    out_until: float = float("-inf")
    seen_at: float = float("-inf")
    """When it last gave any sign, good or bad."""


class HealthBook:
    """Signs in, choosable replicas out."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        interval_s: float = 0.5,
        timeouts: int = 2,
        eject_failures: int = 5,
        eject_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._timeouts = timeouts
        self._eject_failures = eject_failures
        self._eject_s = eject_s
        self._signs: dict[str, _Signs] = {}

    def keep(self, replicas: Collection[str]) -> None:
        """These are all there are: forget the others."""
        for address in self._signs.keys() - set(replicas):
            del self._signs[address]
        for address in replicas:
            self._signs.setdefault(address, _Signs())

    # --- signs ----------------------------------------------------------------------------------------------------

    def probed(self, address: str, healthy: bool) -> None:
        """A probe was answered or refused."""
        signs = self._of(address)
        signs.seen_at = self._clock()
        signs.down, signs.suspect, signs.timeouts = not healthy, False, 0

    def unanswered(self, address: str) -> None:
        """A probe's time is up."""
        signs = self._of(address)
        signs.seen_at = self._clock()
        signs.timeouts += 1
        signs.down = signs.down or signs.timeouts >= self._timeouts

    def responded(self, address: str, status: int) -> None:
        """A request was answered by this replica."""
        signs = self._of(address)
        if status < 500:
            signs.seen_at = self._clock()
            signs.failures, signs.suspect = 0, False
            return
        signs.failures += 1
        if signs.failures >= self._eject_failures:
            signs.out_until, signs.failures = self._clock() + self._eject_s, 0
        signs.seen_at = float("-inf")  # a failing replica is asked at once whether it lives

    def unreachable(self, address: str) -> None:
        """Envoy moved on to another endpoint, or answered for this one itself."""
        signs = self._of(address)
        signs.suspect, signs.seen_at = True, float("-inf")

    # --- what follows from them -----------------------------------------------------------------------------------

    def due(self) -> list[str]:
        """Replicas to probe now."""
        horizon = self._clock() - self._interval_s
        return [address for address, signs in self._signs.items() if signs.seen_at <= horizon]

    def is_up(self, address: str) -> bool:
        signs = self._signs.get(address)
        return signs is None or not (signs.down or signs.suspect or signs.out_until > self._clock())

    def usable(self, replicas: Collection[str], draining: Collection[str] = ()) -> tuple[str, ...]:
        """Those of `replicas` that are up and not draining, in their order; empty if there are none."""
        return tuple(r for r in replicas if r not in draining and self.is_up(r))

    def last_hope(self, replicas: Collection[str], draining: Collection[str] = ()) -> tuple[str, ...]:
        """Where none is usable: draining ones that live, else suspects, else all."""
        alive = tuple(r for r in replicas if r in draining and self.is_up(r))
        if alive:
            return alive
        suspects = tuple(r for r in replicas if not self._of(r).down and r not in draining)
        return suspects or tuple(replicas)

    def _of(self, address: str) -> _Signs:
        return self._signs.setdefault(address, _Signs())
