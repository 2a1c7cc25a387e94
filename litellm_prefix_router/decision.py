"""What the router answers: the choice, how it came about (the receipt), and a reservation of the chosen load."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from .policy.base import Candidate

RECEIPT_HEADER = "x-prefix-router"
"""Response header that carries the receipt in one line."""


class Source(StrEnum):
    """The knowledge a decision rests on, best first."""

    EXACT = "exact"
    """Block hashes of the very tokens, looked up in an index that engine events keep true."""
    APPROXIMATE = "approximate"
    """What was sent where recently."""
    HASH = "hash"
    """Consistent hashing of the prompt's beginning, with bounded loads."""
    LEAST_LOAD = "least-load"
    """Load alone."""


class Receipt(msgspec.Struct, frozen=True):
    """The record of one decision. Holds hashes' counts and names only: no prompt text, no token ids."""

    request_id: str
    pool: str
    policy: str
    source: Source
    reason: str
    """Short and stable: "ok", or why the best knowledge was not used ("tokenizer_loading", "index_timeout", ...)."""
    choice: str
    prompt_tokens: int = 0
    """0 where the prompt's tokens are not known."""
    blocks: int = 0
    match_tokens: int = 0
    candidates: tuple[Candidate, ...] = ()
    """The candidates as the policy saw them."""
    costs: tuple[float, ...] = ()
    """Cost of each candidate in seconds of prefill; empty where the policy has none."""
    timings_ms: Mapping[str, float] = {}
    """Stage ("encode", "hash", "lookup", "policy", "total") -> milliseconds."""
    tokens_by: str = ""
    """Who produced the token ids, see EncodedPrompt.source."""
    note: str | None = None
    token_credit: int = 0
    """Leading prompt tokens expected to need no prefill at the choice: the match, or a more recent placement."""

    def agrees_with(self, cached_tokens: int) -> bool:
        """Whether a response's reported cached tokens bear the prediction out: anything between the indexed match and
        a more recent placement does, since the sibling placed there may or may not have been computed in time."""
        return self.match_tokens <= cached_tokens <= max(self.match_tokens, self.token_credit)

    def header(self) -> str:
        """The receipt in one line of `key=value; ...`, for the response header."""
        items = [
            f"replica={self.choice}",
            f"source={self.source}",
            f"match={self.match_tokens}/{self.prompt_tokens}",
            f"policy={self.policy}",
            f"reason={self.reason}",
            f"ms={self.timings_ms.get('total', 0.0):.2f}",
        ]
        return "; ".join(items)


class Decision(msgspec.Struct, frozen=True):
    """Where to send the request, with the next best replicas behind it in order of cost."""

    replica_id: str
    ranking: tuple[str, ...]
    receipt: Receipt
    reservation: int = 0
    """Key of the load reservation; 0: none."""
    queued_tokens: int = 0
    """Uncached tokens that stood before this request's first token at dispatch, its own included."""
    refused: bool = False
    """The request asked not to wait that long: it is not to be sent, and was not remembered as placed."""
    chain: tuple[int, ...] = ()
    """Block hashes of the prompt, for what the response may teach."""
    block_size: int = 0
