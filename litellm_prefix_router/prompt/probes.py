"""What the engine finds out about a chat template by trying it: done here the same way, once a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext

from .encoded import EncodedPrompt, PromptUnknown
from .sandbox import OutOfBounds, TemplateSandbox

_TURNS = ("system", "user", "system", "user")


def system_must_be_first(source: str) -> bool:
    """Does the template fail on a system message further down?

    The engine tries it without the helpers of chat templates, so one that calls them unasked counts as failing, too.
    """
    sandbox = TemplateSandbox()
    sandbox.globals.pop("raise_exception")
    sandbox.globals.pop("strftime_now")
    sandbox.extensions.pop("litellm_prefix_router.prompt.sandbox.Generation", None)
    context = {"messages": [{"role": role, "content": "t"} for role in _TURNS], "add_generation_prompt": False}
    try:
        sandbox.run(sandbox.compile_bounded(source), context, 1.0, 1 << 20)
    except jinja2.TemplateError:
        return True
    except (OutOfBounds, Exception):
        return False
    return False


def disabled_thinking_effort(encode: Callable[[dict[str, Any]], EncodedPrompt]) -> str:
    """The reasoning_effort that stands for "no thinking": "none", or "low" where the template does not know that."""

    def prompt(effort: str) -> bytes | None:
        try:
            encoded = encode({"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort})
        except PromptUnknown:
            return None
        return encoded.token_ids.tobytes()

    none = prompt("none")
    if none is None or any(prompt(effort) == none for effort in ("low", "medium", "high", "xhigh", "max")):
        return "low"
    return "none"
