"""Several processes of the processor, each with an address of its own: Envoy spreads over the addresses of its
cluster, and not over processes that share one. A worker that dies is started again; workers end with their parent.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

_RESTART_S = 0.2
_MIN_LIFE_S = 1.0


def run_workers(count: int, command: Sequence[str]) -> int:
    """Run `command --worker n` for each n until SIGTERM or SIGINT; returns the exit code.

    A worker that ends within a second of its first start has settings that cannot work: all end with its code.
    """
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    def reload(number: int, frame: FrameType | None) -> None:
        for process, _ in running.values():
            process.send_signal(signal.SIGHUP)

    running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    signal.signal(signal.SIGHUP, reload)
    running.update((n, (_start(command, n), time.monotonic())) for n in range(count))
    code = 0
    while not stopping and code == 0:
        time.sleep(_RESTART_S)
        for n, (process, since) in list(running.items()):
            ended = process.poll()
            if ended is None or stopping:
                continue
            if ended == 2 or (ended > 0 and time.monotonic() - since < _MIN_LIFE_S):
                code = ended
                break
            running[n] = (_start(command, n), time.monotonic())
    for process, _ in running.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process, _ in running.values():
        process.wait()
    return code


def _start(command: Sequence[str], n: int) -> subprocess.Popen[bytes]:
    # a group of its own: Ctrl-C reaches the parent alone, which then ends the workers in order
    return subprocess.Popen([*command, "--worker", str(n)], start_new_session=True)
