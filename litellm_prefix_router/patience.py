"""A timeout that does not blame others for a busy event loop.

Under load a gateway's loop may turn only every 10 or 50 ms. An ordinary timeout then strikes although the answer has
long arrived and waits to be read. This one counts only the time in which the loop was free to turn: it sleeps in
slices, and what a slice overslept is not counted. `patience` bounds the wall-clock time all the same.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

SLICES = 8
"""More of them notice the loop's delays better, and cost a timer each when something is really slow. It is also how
often a loop that is always late may turn before time is up: what takes more turns needs more slices."""


class PatientTimeout:
    """``async with PatientTimeout(0.02): ...`` raises TimeoutError after 0.02 s of a turning loop, or after
    `patience` times as long by the clock."""

    __slots__ = ("_delay_s", "_due", "_end", "_fired", "_handle", "_left", "_loop", "_patience", "_slice_s", "_task")

    def __init__(self, delay_s: float, patience: float = 10.0, slices: int = SLICES) -> None:
        self._delay_s = delay_s
        self._slice_s = delay_s / slices
        self._patience = patience
        self._left = slices
        self._fired = False

    async def __aenter__(self) -> PatientTimeout:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("PatientTimeout is for tasks")
        self._task = task
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._end = now + self._delay_s * self._patience
        self._due = now + self._slice_s
        self._handle = self._loop.call_at(self._due, self._slept)
        return self

    def _slept(self) -> None:
        self._left -= 1
        now = self._loop.time()
        if self._left <= 0 or now >= self._end:
            self._fired = True
            self._task.cancel()
            return
        self._due = now + self._slice_s
        self._handle = self._loop.call_at(self._due, self._slept)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._fired and self._task.uncancel() <= 0 and kind is asyncio.CancelledError:
            raise TimeoutError from error
