"""Child processes of the demo: started with a log file each, ended with the demo however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path


class StartError(Exception):
    """Something that the demo needs did not start: one line for people."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment, all different."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports


def consecutive_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on. Raises StartError where there are none."""
    for first in range(random.randrange(21000, 29000), 32000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise StartError(f"no {count} free ports in a row")


class Processes:
    """Context manager: whatever was started in it is gone after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        processes = [process for _, process in self._running]
        for process in processes:
            if process.poll() is None:
                _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait()

    def start(self, name: str, command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `command` in a process group of its own; its output goes to `<name>.log` in the folder."""
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._running.append((name, process))
        return process

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    async def until(self, what: str, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Wait for a condition. Raises StartError when time is up or a process has died, with its last words."""
        deadline = time.monotonic() + timeout_s
        while not await ready():
            for name, process in self._running:
                if process.poll() is not None:
                    raise StartError(f"{name} ended with code {process.returncode}: {self._last_words(name)}")
            if time.monotonic() > deadline:
                raise StartError(f"{what} was not ready within {timeout_s:.0f} s; logs are in {self._folder}")
            await asyncio.sleep(0.05)

    def _last_words(self, name: str) -> str:
        lines = [line for line in self.log(name).read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "no output"


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
