"""The recommended mode through the real Envoy: what the processor chooses is what Envoy does, for every body."""

from __future__ import annotations

import pytest

from .conftest import BLOCK, chat, receipt_of, until

pytestmark = pytest.mark.envoy

LONG = "The quick brown fox jumps over the lazy dog. " * 40


async def test_the_prefix_goes_where_it_is_known_to_be_and_the_match_is_exact(fleet, serve, exact, start_envoy) -> None:
    server = await serve()
    envoy = await start_envoy(fleet.endpoints, [server.address])
    await exact(server)
    first = await envoy.post(json=chat(LONG))
    assert first.status_code == 200
    home = receipt_of(first)["replica"]
    prompt = first.json()["usage"]["prompt_tokens"]
    expected = (prompt - 1) // BLOCK * BLOCK

    async def known() -> bool:
        again = receipt_of(await envoy.post(json=chat(LONG)))
        return again["match"] == f"{expected}/{prompt}"

    await until(known)
    for _ in range(8):
        answer = await envoy.post(json=chat(LONG), headers={"x-gateway-destination-endpoint": fleet.endpoints[0]})
        receipt = receipt_of(answer)
        assert (receipt["source"], receipt["reason"], receipt["replica"]) == ("exact", "ok", home)
        assert receipt["match"] == f"{expected}/{prompt}"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        assert "served" not in receipt
    lines = await envoy.access(9)
    assert all(line.split()[1] == home.removeprefix("http://") for line in lines[-8:])
    await until(lambda: not server.service.router.ledger.loads())
    tally = server.service.tally
    await until(lambda: tally.audited == tally.decisions)
    assert tally.agreed == tally.audited
