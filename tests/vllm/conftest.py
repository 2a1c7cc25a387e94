"""Real vLLM engines with a tiny random-weight model and the tokenizer that this project ships.

`make test-vllm` installs what they need (install.sh). A pair is started once a session: about 30 s and 2.5 GB each.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import pytest

from litellm_prefix_router.sim.assets import TINY_MODEL

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("VENV_VLLM", ROOT / ".venv-vllm"))
START_TIMEOUT_S = 240
BLOCK_SIZE = 32  # the CPU build takes multiples of 32
NUM_BLOCKS = 72
MAX_MODEL_LEN = 2048
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class VllmReplica:
    """One engine process. `start` returns at once; `wait_ready` when it serves."""

    folder: Path
    number: int
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events_endpoint(self) -> str:
        """Where a subscriber connects."""
        return f"tcp://127.0.0.1:{self.events_port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    @property
    def log(self) -> Path:
        return self.folder / f"vllm-{self.number}.log"

    def command(self) -> list[str]:
        events = (
            f'{{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:{self.events_port}", '
            f'"replay_endpoint": "tcp://*:{self.replay_port}"}}'
        )
        return [
            str(VENV / "bin" / "vllm"), "serve", str(self.folder / "model"), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), "--load-format", "dummy", "--dtype", "bfloat16",
            "--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE),
            "--num-gpu-blocks-override", str(NUM_BLOCKS), "--enable-prefix-caching", "--enable-prompt-tokens-details",
            "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--kv-events-config", events,
        ]  # fmt: skip

    def start(self) -> None:
        # One core each, where there are several: two engines that spin on the same one are several times slower.
        core = str(self.number % (os.cpu_count() or 1))
        self._log = self.log.open("ab")
        self.process = subprocess.Popen(
            self.command(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": core},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if httpx.get(f"{self.base_url}/health", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"vLLM ended with {self.process.returncode}:\n{tail}"
            assert time.monotonic() < deadline, f"vLLM does not serve after {START_TIMEOUT_S} s:\n{tail}"
            time.sleep(0.2)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server and its engine processes. Safe to call twice."""
        if self.process is None:
            return
        group = self.process.pid
        if number == signal.SIGKILL:
            os.killpg(group, number)
        elif self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(group, signal.SIGKILL)
            self.process.wait(20)
        if self._log is not None:
            self._log.close()
        self.process = self._log = None


@pytest.fixture(scope="session")
def vllm_replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmReplica]]:
    """Two engines of the same model on this machine, with events on TCP. Tests may restart them."""
    if not (VENV / "bin" / "vllm").exists():
        pytest.skip("no vLLM here: run `make test-vllm`")
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copytree(TINY_MODEL, folder / "model")
    replicas = [VllmReplica(folder, number) for number in range(2)]
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.wait_ready()
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()
