"""Envoy's endpoints in a file: what is written, what never is, and that Envoy follows it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
import yaml
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from google.protobuf.json_format import ParseDict
from typer.testing import CliRunner

from litellm_prefix_router.cli.app import app
from litellm_prefix_router.demo.processes import Processes
from litellm_prefix_router.gateways.ext_proc.eds import EdsFile, assignment, endpoint_of_address

from .conftest import chat, receipt_of, until

COMMAND = [sys.executable, "-c", "from litellm_prefix_router.cli import main; main()", "eds"]


def test_the_content_is_what_envoy_calls_an_assignment():
    content = assignment("replicas", {"10.0.0.2:8000": True, "[fd00::1]:80": False})
    resource = dict(content["resources"][0])
    resource.pop("@type")
    parsed = ParseDict(resource, ClusterLoadAssignment())
    hosts = [e.endpoint.address.socket_address for e in parsed.endpoints[0].lb_endpoints]
    assert [(h.address, h.port_value) for h in hosts] == [("10.0.0.2", 8000), ("fd00::1", 80)]
    assert parsed.endpoints[0].lb_endpoints[0].health_status == 3  # DRAINING


def test_a_file_is_replaced_only_when_it_changes_and_never_by_nothing(tmp_path):
    path = tmp_path / "eds.yaml"
    file = EdsFile(path, "replicas")
    assert file.write({}) == "refused" and not path.exists()
    assert file.write({"10.0.0.1:1": False}) == "written"
    first = path.stat().st_ino
    assert file.write({"10.0.0.1:1": False}) == "unchanged" and path.stat().st_ino == first
    assert file.write({}) == "refused" and "10.0.0.1" in path.read_text()
    assert file.write({"10.0.0.2:1": False}) == "written" and path.stat().st_ino != first
    assert list(tmp_path.iterdir()) == [path]
    assert yaml.safe_load(path.read_text())["version_info"]


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://vllm-0", "vllm-0:80"),
        ("https://[fd00::1]", "[fd00::1]:443"),
    ],
)
def test_addresses_become_endpoints(address, endpoint):
    assert endpoint_of_address(address) == endpoint


def test_the_command_writes_the_configurations_endpoints_once(tmp_path):
    settings = {"redis_url": "memory://", "envoy": {"pools": {"chat": {"model": "m", "endpoints": ["127.0.0.1:81"]}}}}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    output = tmp_path / "eds.yaml"
    arguments = ["eds", "--config", str(tmp_path / "settings.yaml"), "--output", str(output), "--once"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "1 endpoints written" in result.output
    assert json.loads(output.read_text())["resources"][0]["cluster_name"] == "chat"
    empty = CliRunner().invoke(app, [*arguments, "--source", "roster"])
    assert empty.exit_code == 1 and "127.0.0.1" in output.read_text()


@pytest.mark.envoy
async def test_envoy_follows_the_roster_and_running_streams_go_on(
    tmp_path: Path, fleet, serve, exact, settings_of, start_envoy
) -> None:
    given = settings_of()
    server = await serve(given)
    await exact(server)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(given))
    output = tmp_path / "eds.yaml"
    with Processes(tmp_path) as processes:
        options = ["--config", str(tmp_path / "settings.yaml"), "--output", str(output), "--interval-s", "0.1"]
        process = processes.start("eds", [*COMMAND, *options, "--source", "roster"])
        await until(output.exists)
        envoy = await start_envoy([], [server.address], eds_file=str(output))
        body = chat("a long answer please", max_tokens=3000, stream=True)
        async with envoy.client.stream("POST", f"{envoy.url}/v1/chat/completions", json=body) as answer:
            home = receipt_of(answer)["replica"]
            lines = answer.aiter_lines()
            await anext(lines)
            # the replica that streams is taken from the list: Envoy ends nothing that runs
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
            rest = {endpoint: False for endpoint in fleet.endpoints if f"http://{endpoint}" != home}
            assert EdsFile(output, "replicas").write(rest) == "written"

            async def moved() -> bool:
                told = receipt_of(await envoy.post(json=chat("a long answer please")))
                return told.get("served", told["replica"]) != home

            await until(moved)
            last = [line async for line in lines if line.startswith("data: ")][-1]
        assert last == "data: [DONE]"
