"""Clients cannot have an engine announce its blocks again."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_prefix_router.gateways.litellm.strategy import LiteLLMPrefixRouter
from litellm_prefix_router.gateways.report_mode import take_out_report_mode
from litellm_prefix_router.settings import Settings

ASKS = {"kv_cache_report_mode": "full"}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({"prompt": "x"}, {"prompt": "x"}),
        ({"prompt": "x", "vllm_xargs": dict(ASKS)}, {"prompt": "x"}),
        ({"vllm_xargs": {**ASKS, "session_id": "s"}}, {"vllm_xargs": {"session_id": "s"}}),
        ({"extra_body": {"top_k": 1, "vllm_xargs": dict(ASKS)}}, {"extra_body": {"top_k": 1}}),
        ({"vllm_xargs": {}}, {"vllm_xargs": {}}),
        ({"vllm_xargs": "full", "extra_body": None}, {"vllm_xargs": "full", "extra_body": None}),
    ],
)
def test_only_that_field_is_taken_out(body: dict[str, Any], left: dict[str, Any]) -> None:
    changed = body != left
    assert take_out_report_mode(body) is changed
    assert body == left


async def test_the_proxys_hook_takes_it_out() -> None:
    strategy = LiteLLMPrefixRouter(Settings.model_validate({}))
    data = {"model": "chat", "messages": [], "vllm_xargs": {**ASKS, "session_id": "s"}}
    assert await strategy.async_pre_call_hook(None, None, data, "acompletion") is data
    assert data == {"model": "chat", "messages": [], "vllm_xargs": {"session_id": "s"}}
