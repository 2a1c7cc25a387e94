"""What the router has learned about one request so far, stage by stage, and where that knowledge ranks.

The stages fill it in; when one fails or the deadline strikes, whatever was learned before still counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from .index.contract import IndexLookup

PREFIX_KEY_BLOCKS = 8
"""Blocks at the prompt's beginning that consistent hashing goes by."""


@dataclass(slots=True)
class Knowledge:
    """Filled in order: prompt size, chain, lookup. `stage` names the one under way."""

    stage: str = "start"
    reason: str = "ok"
    prompt_tokens: int = 0
    """Exact if `tokens_by` is set, else an estimate from the text's length."""
    tokens_by: str = ""
    blocks: Sequence[int] = ()
    """Exact block hashes; empty where token ids are not known."""
    chain: Sequence[int] = ()
    """What placement memory goes by: the blocks and what follows them, or the text's likeness."""
    chain_unit_tokens: int = 16
    block_size: int = 0
    """The pool's tokens a block, asked once a decision; 0: no pool."""
    cache_name: str = ""
    """Name under which the pool's blocks are indexed."""
    lookup: IndexLookup | None = None
    note: str | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)

    def level_of(self, replica_id: str) -> str:
        """How the replica is known: as its record in the roster says; "none" without one, or with other blocks."""
        record = self.lookup.roster.get(replica_id) if self.lookup is not None else None
        if record is None or record.slot is None or not self.block_size:
            return "none"
        return "none" if record.block_size and record.block_size != self.block_size else record.knowledge

    def life_of(self, replica_id: str) -> int:
        """Incarnation of the replica's cache, 0 where it has no record."""
        record = self.lookup.roster.get(replica_id) if self.lookup is not None else None
        return record.incarnation if record is not None else 0

    @property
    def prefix_key(self) -> int | None:
        """Hash of the prompt's beginning, None where the prompt is too short or unknown."""
        return self.chain[min(len(self.chain), PREFIX_KEY_BLOCKS) - 1] if self.chain else None

    def failed(self, reason: str) -> None:
        """Keep the first reason: it is the one to mend."""
        if self.reason == "ok":
            self.reason = reason


def extend_chain(blocks: Sequence[int], root: int, tail: Sequence[bytes]) -> Sequence[int]:
    """The chain continued over digests of parts that have no tokens yet (images), for placement memory."""
    if not tail:
        return blocks
    chain = list(blocks)
    parent = chain[-1] if chain else root
    for digest in tail:
        parent = xxh3_64_intdigest(b"tail" + digest, parent)
        chain.append(parent)
    return chain


def served_from_cache(match_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Tokens that the engine will take from its cache: whole blocks, and never the prompt's last token."""
    return min(match_blocks, max(prompt_tokens - 1, 0) // block_size) * block_size
