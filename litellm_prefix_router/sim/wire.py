"""The engine's event messages: a batch is an array, each event a map with a "type", None left out at the end.

Field order and presence are those of recorded frames; see tests/sim/test_recorded_truth.py, which compares bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that became findable, a chain: each is the parent of the next."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """One copy of each named block is gone."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode_batch(ts: float, events: Sequence[Event], rank: int) -> bytes:
    """Payload of one frame. `ts`: wall clock, seconds; `rank`: the data-parallel rank that sends it."""
    return _encoder.encode(_Batch(ts, list(events), rank))
