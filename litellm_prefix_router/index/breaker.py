"""A circuit breaker as a state machine without I/O and clock: the caller passes the time and does the probing.

One failure opens it (what counts as one, the caller knows), since a frozen Redis should cost few decisions their
timeout. While it is open nothing is sent but a probe now and then (off the path of any decision), at growing intervals;
a probe that succeeds closes it.
"""

from __future__ import annotations


class CircuitBreaker:
    """`allows` before a call, `succeeded` / `failed` after it, `probe_due` to ask for one probe at a time."""

    __slots__ = ("_first_s", "_interval_s", "_last_s", "_next_probe", "_probing", "opened", "reason")

    def __init__(self, first_probe_s: float = 0.1, last_probe_s: float = 2.0) -> None:
        self._first_s = first_probe_s
        self._last_s = last_probe_s
        self._interval_s = first_probe_s
        self._next_probe = 0.0
        self._probing = False
        self.opened = False
        self.reason: str | None = None
        """Why it is open, for people."""

    @property
    def allows(self) -> bool:
        return not self.opened

    @property
    def state(self) -> str:
        """ "closed", "open" or "probing"."""
        if not self.opened:
            return "closed"
        return "probing" if self._probing else "open"

    def failed(self, now: float, reason: str) -> None:
        """A call or a probe failed."""
        was_probe, self._probing = self._probing, False
        self._interval_s = min(self._interval_s * 2, self._last_s) if self.opened and was_probe else self._interval_s
        if not self.opened:
            self._interval_s = self._first_s
        if not self.opened or was_probe:  # others that were under way fail with it, and know no better reason
            self._next_probe = now + self._interval_s
            self.reason = reason
        self.opened = True

    def succeeded(self) -> None:
        """A probe succeeded (or a call that was under way while another failed)."""
        self.opened = self._probing = False
        self._interval_s = self._first_s
        self.reason = None

    def probe_due(self, now: float) -> bool:
        """True once per interval while open: the caller then probes and reports."""
        if not self.opened or self._probing or now < self._next_probe:
            return False
        self._probing = True
        return True
