"""The configurations in envoy/: each is started with the real Envoy and does what it says."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from litellm_prefix_router.demo.processes import free_ports
from litellm_prefix_router.gateways.ext_proc.eds import EdsFile

from .conftest import chat, receipt_of, until

ROOT = Path(__file__).parents[3]
TOP = {"redis_url": "memory://bootstraps"}
PATIENT = {"message_timeout: 0.2s": "message_timeout: 5s"}


class Authority:
    """A certificate authority that lasts for a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = self._builder(name, name, self._key.public_key()).add_extension(constraints, True)
        self._signed = self._certificate.sign(self._key, hashes.SHA256())
        (folder / "ca.crt").write_bytes(self._signed.public_bytes(serialization.Encoding.PEM))

    @staticmethod
    def _builder(subject: x509.Name, issuer: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        return builder.not_valid_after(now + timedelta(hours=1))

    def issue(self, name: str) -> tuple[Path, Path]:
        """(certificate, key) for a DNS name and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName("localhost")])
        builder = self._builder(subject, self._signed.subject, key.public_key()).add_extension(names, False)
        certificate = builder.sign(self._key, hashes.SHA256())
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths


def load(name: str, replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """A bootstrap with its paths replaced."""
    text = (ROOT / "envoy" / name).read_text()
    for old, new in (replaced or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in config["static_resources"]["clusters"] if c["name"] == name)


def put(config: dict[str, Any], name: str, addresses: list[str]) -> None:
    hosts = cluster(config, name)["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert len(hosts) == len(addresses), "the test replaces the addresses one by one"
    for host, address in zip(hosts, addresses, strict=True):
        port = int(address.rpartition(":")[2])
        host["endpoint"]["address"]["socket_address"] |= {"address": "127.0.0.1", "port_value": port}


def listen(config: dict[str, Any]) -> int:
    (port,) = free_ports(1)
    address = {"address": "127.0.0.1", "port_value": port}
    config["static_resources"]["listeners"][0]["address"]["socket_address"] = address
    return port


@pytest.mark.envoy
async def test_minimal(echoes, serve, start_envoy) -> None:
    server = await serve(pool={"endpoints": [e.endpoint for e in echoes]}, top=TOP)
    config = load("minimal.yaml", PATIENT)
    put(config, "replicas", [e.endpoint for e in echoes])
    put(config, "prefix-router", [server.address])
    listen(config)
    envoy = await start_envoy(config=config)
    for i in range(8):
        answer = await envoy.post(json=chat(f"prompt {i}"), headers={"x-gateway-destination-endpoint": "127.0.0.1:1"})
        assert answer.status_code == 200
        assert receipt_of(answer)["replica"] == f"http://{answer.json()['endpoint']}"


@pytest.mark.envoy
async def test_production(tmp_path, echoes, serve, start_envoy) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    authority = Authority(tls)
    for name in ("gateway", "envoy", "prefix-router"):
        authority.issue(name)
    endpoints = [e.endpoint for e in echoes]
    options = {
        "pool": {"endpoints": endpoints},
        "top": TOP,
        "tls_certificate": tls / "prefix-router.crt",
        "tls_key": tls / "prefix-router.key",
        "tls_client_ca": tls / "ca.crt",
    }
    servers = [await serve(**options), await serve(**options)]
    assert EdsFile(tmp_path / "eds.yaml", "replicas").write(dict.fromkeys(endpoints, False)) == "written"
    log = tmp_path / "access.json"
    config = load(
        "production.yaml",
        {
            **PATIENT,
            "/etc/envoy/tls": str(tls),
            "/etc/envoy/eds/replicas.yaml": str(tmp_path / "eds.yaml"),
            "/dev/stdout": str(log),
        },
    )
    put(config, "prefix-router", [server.address for server in servers])
    port = listen(config)
    config["admin"]["address"]["socket_address"]["port_value"] = free_ports(1)[0]
    await start_envoy(config=config)
    trusted = ssl.create_default_context(cafile=str(tls / "ca.crt"))
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:

        async def routed() -> bool:
            answer = await client.post(f"https://localhost:{port}/v1/chat/completions", json=chat("hello"))
            return answer.status_code == 200 and "replica" in receipt_of(answer)

        await until(routed)
        for i in range(8):
            answer = await client.post(f"https://localhost:{port}/v1/chat/completions", json=chat(f"prompt {i}"))
            assert receipt_of(answer)["replica"] == f"http://{answer.json()['endpoint']}"
    await until(lambda: log.exists() and len(log.read_text().splitlines()) >= 9)
    entry = json.loads(log.read_text().splitlines()[-1])
    assert entry["replica"] in endpoints and "source=" in entry["receipt"] and entry["attempts"] == 1
