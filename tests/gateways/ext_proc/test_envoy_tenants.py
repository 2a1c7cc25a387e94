"""Tenants by a claim of a token that the real Envoy verified: each has its own cache, and nobody can choose it."""

from __future__ import annotations

import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from litellm_prefix_router.demo.envoy import bootstrap
from litellm_prefix_router.demo.processes import free_ports

from .conftest import chat

pytestmark = pytest.mark.envoy

ISSUER = "https://issuer.test"
_JWT = "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication"


def with_jwt(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The bootstrap with a filter in front that verifies tokens, and its findings shown to the processor."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    provider = {
        "issuer": ISSUER,
        "local_jwks": {"inline_string": json.dumps(keys)},
        "payload_in_metadata": "payload",
    }
    verify = {
        "name": "envoy.filters.http.jwt_authn",
        "typed_config": {
            "@type": _JWT,
            "providers": {"issuer": provider},
            "rules": [{"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}],
        },
    }
    for item in manager["http_filters"]:
        if "ext_proc" in item["name"]:
            item["typed_config"]["metadata_options"]["forwarding_namespaces"] = {
                "untyped": ["envoy.filters.http.jwt_authn"]
            }
    manager["http_filters"].insert(0, verify)
    return config


async def test_the_salt_follows_the_verified_claim(echoes, serve, start_envoy) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": "one", "alg": "RS256"}
    endpoints = [e.endpoint for e in echoes]
    server = await serve(
        pool={"endpoints": endpoints},
        top={"redis_url": "memory://envoy-tenants"},
        tenant_metadata=["envoy.filters.http.jwt_authn", "payload", "org"],
        salt_secret="s" * 32,
    )
    (port,) = free_ports(1)
    config = with_jwt(bootstrap(port, endpoints, [server.address], message_timeout_s=5.0), {"keys": [public]})
    envoy = await start_envoy(config=config)

    async def salt_of(org: str, **headers: str) -> str:
        claims = {"iss": ISSUER, "org": org, "exp": int(time.time()) + 600}
        token = jwt.encode(claims, key, algorithm="RS256", headers={"kid": "one"})
        answer = await envoy.post(
            json=chat("hello", cache_salt="stolen"), headers={"authorization": f"Bearer {token}", **headers}
        )
        assert answer.status_code == 200
        return str(json.loads(answer.json()["body"])["cache_salt"])

    acme = await salt_of("acme")
    assert acme == await salt_of("acme") and acme != "stolen"
    assert await salt_of("other") not in (acme, "stolen")
    refused = await envoy.post(json=chat("hello"), headers={"authorization": "Bearer none"})
    assert refused.status_code == 401
