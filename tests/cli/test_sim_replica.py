"""The command: starts, serves several replicas, stops cleanly, and says in one line what it cannot do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from litellm_prefix_router.cli.app import app

COMMAND = [sys.executable, "-c", "from litellm_prefix_router.cli import main; main()", "sim-replica"]


def test_it_serves_several_replicas_until_it_is_told_to_stop() -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--replicas", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert time.monotonic() - start < 10  # about 1 s on an idle machine
        for line in lines:
            found = re.fullmatch(r"(http://127\.0\.0\.1:\d+) serves tiny; events: (tcp://127\.0\.0\.1:\d+)\n", line)
            assert found, line
            with urllib.request.urlopen(f"{found[1]}/kv_event_sources") as response:
                told = json.load(response)["0"]["endpoint"]
            assert told.rpartition(":")[2] == found[2].rpartition(":")[2]
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block-size", "0"], "block_size must be positive"),
        (["--lora-modules", "x"], "wants NAME=PATH"),
        (["--model-folder", "/nowhere"], "has no tokenizer.json"),
        (["--replicas", "2", "--events-endpoint", "tcp://127.0.0.1:1"], "give --events-port"),
        (["--port", "0", "--host", "203.0.113.1"], "cannot listen"),
    ],
)
def test_mistakes_are_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["sim-replica", *options])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
