"""What an engine of a given kind and version does differently, as switches: one renderer serves them all.

Each field is one rule. The version where a rule appeared is the first release in which it was seen; releases between
the ones examined were not, so a bound may be a few releases late.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VLLM_CURRENT = (0, 32, 0)
"""Assumed where a replica's version is not known: the release that the recordings come from."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The rules of one engine release. The defaults are those of vLLM 0.32."""

    engine: str = "vllm"
    developer_to_system: bool = True
    """A template that never names the developer role gets these messages as system messages."""
    reasoning_content_as_reasoning: bool = True
    """`reasoning_content` of an earlier turn counts as its `reasoning`."""
    reasoning_accepted: bool = True
    macro_aware_format: bool = True
    """The content format is looked for inside macros by what they are called with."""
    keep_extra_tool_keys: bool = False
    null_strict_dropped: bool = True
    bad_arguments_to_empty: bool = True
    """Arguments that are no JSON object become {}; before, the request failed."""
    join_tool_parts: bool = True
    drop_empty_tool_calls: bool = True
    effort_sets_thinking: bool = True
    kv_transfer_ids: bool = True
    strip_billing_header: bool = True
    responses_add_special_tokens: bool = True
    trailing_assistant_to_user: bool = False
    """SGLang: a last assistant message that is not continued is sent to the template as the user's."""
    bare_tools_on_error: bool = False
    """SGLang: where the template fails on the tools, they are tried again as bare functions."""


def parse_version(text: str | None) -> tuple[int, int, int] | None:
    """(major, minor, patch) of "0.32.0", "v0.32.0+cpu" or "0.32.1rc1.dev3"; None where there is no number."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def dialect_for(engine: str, version: str | None = None) -> Dialect:
    """The rules of `engine` ("vllm", "sglang" or "auto", which is taken as vLLM) at `version`."""
    if engine == "sglang":
        return Dialect(
            engine="sglang",
            developer_to_system=False,
            effort_sets_thinking=False,
            kv_transfer_ids=False,
            strip_billing_header=False,
            trailing_assistant_to_user=True,
            bare_tools_on_error=True,
        )
    release = parse_version(version) or VLLM_CURRENT
    return Dialect(
        developer_to_system=release >= (0, 26, 0),
        reasoning_content_as_reasoning=release < (0, 20, 0) or release >= (0, 26, 0),
        reasoning_accepted=release >= (0, 20, 0),
        macro_aware_format=release >= (0, 26, 0),
        keep_extra_tool_keys=release < (0, 29, 0),
        null_strict_dropped=release >= (0, 26, 0),
        bad_arguments_to_empty=release >= (0, 29, 0),
        join_tool_parts=release >= (0, 20, 2),
        drop_empty_tool_calls=release >= (0, 14, 1),
        effort_sets_thinking=release >= (0, 26, 0),
        kv_transfer_ids=release >= (0, 29, 0),
        strip_billing_header=release >= (0, 32, 0),
        responses_add_special_tokens=release >= (0, 20, 2),
    )
