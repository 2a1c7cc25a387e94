"""What older vLLM releases and SGLang do differently, on the messages that a template receives."""

from __future__ import annotations

from typing import Any

import pytest

from litellm_prefix_router.prompt.content_format import detect_content_format
from litellm_prefix_router.prompt.conversation import (
    developer_to_system,
    normalize_messages,
    trailing_assistant_to_user,
)
from litellm_prefix_router.prompt.dialect import Dialect, dialect_for, parse_version
from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.sandbox import TemplateSandbox


def seen(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    return normalize_messages([message], "string", dialect, [])[0]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.9.2+cpu", (0, 9, 2)),
        ("0.31.1rc1.dev5", (0, 31, 1)),
        ("1.2", (1, 2, 0)),
        ("x", None),
    ],
)
def test_versions(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version


def test_the_newest_rules_are_the_default() -> None:
    assert dialect_for("vllm") == dialect_for("auto") == dialect_for("vllm", "0.32.0") == Dialect()
    assert dialect_for("vllm", "nonsense") == Dialect()


def test_reasoning_of_earlier_turns() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "why"}
    assert seen(message, dialect_for("vllm", "0.32.0"))["reasoning"] == "why"
    assert "reasoning" not in seen(message, dialect_for("vllm", "0.20.2"))


def test_arguments_that_are_no_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{nope"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert seen(message, dialect_for("vllm", "0.29.0"))["tool_calls"][0]["function"]["arguments"] == {}
    with pytest.raises(PromptUnknown):
        seen(message, dialect_for("vllm", "0.26.0"))


def test_the_billing_header() -> None:
    message = {"role": "system", "content": "x-anthropic-billing-header: 1\nrest"}
    assert seen(message, dialect_for("vllm", "0.32.0"))["content"] == "rest"
    assert seen(message, dialect_for("vllm", "0.31.0"))["content"] == message["content"]


def test_content_format_inside_macros() -> None:
    template = (
        "{% macro show(body) %}{% for part in body %}{{ part.text }}{% endfor %}{% endmacro %}"
        "{% for message in messages %}{{ show(message.content) }}{% endfor %}"
    )
    sandbox = TemplateSandbox()
    assert detect_content_format(template, sandbox, macro_aware=True) == "openai"
    assert detect_content_format(template, sandbox, macro_aware=False) == "string"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for p in m['content'] %}{% endfor %}{% endfor %}", "openai"),
        ("{% set x = messages[1:] %}{% for m in x %}{% for p in m.content | list %}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% set content = m.text %}{% for p in content %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for i, p in m.content %}{% endfor %}{% endfor %}", "string"),
        ("{% for m in others %}{% for p in m.content %}{% endfor %}{% endfor %}", "string"),
        ("{% if %}", "string"),
    ],
)
def test_content_format(template: str, found: str) -> None:
    assert detect_content_format(template, TemplateSandbox()) == found


def test_developer_messages() -> None:
    user = {"role": "user", "content": "x"}
    alone = developer_to_system([{"role": "developer", "content": "d", "tools": None}, user])
    assert alone == [{"role": "system", "content": "d"}, user]
    late = developer_to_system([{"role": "system", "content": "s"}, user, {"role": "developer", "content": "d"}])
    assert late == [{"role": "system", "content": "s\n\nd"}, user]


def test_sglang_passes_a_last_assistant_message_as_the_users() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert trailing_assistant_to_user(messages)[-1] == {"role": "user", "content": "y"}
    assert dialect_for("sglang", "0.5.23").trailing_assistant_to_user
