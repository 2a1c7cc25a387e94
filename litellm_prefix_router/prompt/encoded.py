"""What the prompt stage hands to the rest of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .blocks import TokenIds


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What separates two cached prefixes with equal tokens."""

    lora: str | None = None
    cache_salt: str | None = None
    block_extra: Mapping[int, bytes] = field(default_factory=dict)
    """Block position -> bytes mixed into its hash (multimodal parts), see blocks.chain_hashes."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt as the engine will prefill it.

    `token_ids` is exact as far as it goes; where a part cannot be known (an image's placeholder count, a previous
    response's text) it ends before that part, `complete` is False and `note` says why.
    """

    token_ids: TokenIds
    identity: CacheIdentity
    source: str
    """Who produced the ids: "fastokens", "tokenizers", "ids" (the client sent them), "engine", "harmony", ..."""
    complete: bool = True
    note: str | None = None
    opaque_tail: tuple[bytes, ...] = ()
    """Digests of what follows the known tokens, in order: good for placement memory, never for an exact match."""


class PromptUnknown(Exception):
    """The prompt's token ids cannot be had (in time): route by the next best knowledge.

    `reason` is one of a short, stable vocabulary: "tokenizer_loading", "tokenizer_missing", "template_error",
    "refused" (the engine would answer 400), "not_a_prompt", "too_large", "malformed", "unsupported".
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class PromptEncoder(Protocol):
    """One pool's way from request body to token ids. Implemented in prompt/, faked in tests."""

    async def encode(self, path: str, body: Mapping[str, Any]) -> EncodedPrompt:
        """Token ids for the request body that is sent to `path` (such as "/v1/chat/completions").

        For a list of prompts, the first one. Raises PromptUnknown. Work above about 1 ms runs off the event loop.
        """
        ...

    def blocks(self, encoded: EncodedPrompt, pool: str, block_size: int) -> list[int]:
        """Hashes of the prompt's full blocks in order, from the root of pool and identity (see blocks.py)."""
        ...

    @property
    def state(self) -> str:
        """One phrase for people: "ready (fastokens, /models/x)", "loading", "failed: ..."."""
        ...
