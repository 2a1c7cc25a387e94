"""Engine events: from the wire to four small records. vLLM from 0.9 on and SGLang send the same batches.

A batch is an array ``[ts, events, data_parallel_rank]`` (a map in one development version), an event an array tagged by
its first element (vLLM <= 0.23, SGLang <= 0.5.19) or a map tagged by "type". Block hashes are integers, signed or not,
or digests; here they become the unsigned low 64 bits, which name the block within one engine. Unknown fields are
ignored, unknown events are reported as such.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import msgspec
import numpy as np

from ..prompt.blocks import TokenIds

_decode = msgspec.msgpack.Decoder().decode
_MASK = (1 << 64) - 1

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx", "locality")

_TIER = {"gpu": "gpu", "cpu": "cpu", "cpu_pinned": "cpu", "storage": "storage", "disk": "storage", "ssd": "storage"}
_FULL_ATTENTION = ("full_attention", "mla_attention")


class Stored(msgspec.Struct, frozen=True):
    """Blocks in chain order. `tokens` has `block_size` ids per block, or none where the engine does not tell."""

    blocks: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    tier: str
    lora: str | None
    extra_keys: list[Any] | None
    cache_salt: str | None = None
    """SGLang names the salt by itself; vLLM puts it into `extra_keys`."""


class Removed(msgspec.Struct, frozen=True):
    blocks: list[int]
    tier: str


class Cleared(msgspec.Struct, frozen=True):
    """The whole cache of the rank is empty."""


class Skipped(msgspec.Struct, frozen=True):
    """An event that says nothing about the index. `reason` is short and stable."""

    reason: str


Event = Stored | Removed | Cleared | Skipped


class MalformedBatch(Exception):
    """Bytes that are no event batch."""


def decode_batch(payload: bytes) -> tuple[float, int, list[Event]]:
    """(unix time, data-parallel rank, events in order). Raises MalformedBatch."""
    try:
        batch = _decode(payload)
        if isinstance(batch, dict):
            ts, events, rank = batch.get("ts", 0.0), batch["events"], batch.get("data_parallel_rank")
        else:
            ts, events, rank = batch[0], batch[1], batch[2] if len(batch) > 2 else None
        return float(ts), int(rank or 0), [_event(event) for event in events]
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise MalformedBatch(f"{type(error).__name__}: {error}") from None


def time_of(payload: bytes) -> float:
    """The batch's own time; infinity for bytes that are none."""
    try:
        return decode_batch(payload)[0]
    except MalformedBatch:
        return float("inf")


def token_array(ids: list[int]) -> TokenIds:
    """Token ids as they are hashed. `array` converts a list three times as fast as numpy does."""
    if sys.byteorder == "little" and array("I").itemsize == 4:
        return np.frombuffer(array("I", ids), "<u4")
    return np.array(ids, "<u4")


def hash_name(value: int | bytes) -> int:
    """The 64 bits that stand for an engine's block hash. Digests are cut to their last 8 bytes, as vLLM's own do."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _MASK


def _names(raw: list[Any]) -> list[int]:
    try:
        if min(raw) >= 0:  # plain unsigned integers, the default: nothing to convert
            return raw
    except (TypeError, ValueError):  # digests, or none at all
        pass
    return [hash_name(value) for value in raw]


def _event(raw: Any) -> Event:
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    else:
        kind, fields = raw[0], dict(zip(_REMOVED if raw[0] == "BlockRemoved" else _STORED, raw[1:], strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved"):
        return Skipped("unknown_event")
    if str(fields.get("locality") or "LOCAL").upper() == "REMOTE":
        return Skipped("remote")
    # Groups of a hybrid model reuse one block hash for several caches; the full-attention one decides about a hit.
    spec, group = fields.get("kv_cache_spec_kind"), fields.get("group_idx")
    if (spec is not None and spec not in _FULL_ATTENTION) or (spec is None and group):
        return Skipped("other_group")
    medium = str(fields.get("medium") or "GPU").lower()
    tier = _TIER.get(medium) or ("gpu" if medium.startswith(("gpu", "cuda", "hip", "xpu", "tpu", "device")) else None)
    if tier is None:
        return Skipped("unknown_medium")
    names = _names(fields["block_hashes"])
    if kind == "BlockRemoved":
        return Removed(names, tier)
    parent = fields.get("parent_block_hash")
    tokens = fields.get("token_ids") or []
    if tokens and not isinstance(tokens[0], int):
        tokens = [pair[0] for pair in tokens]  # bigrams (EAGLE): the first of each pair is the position's own token
    lora = fields.get("lora_name")
    if lora is None and fields.get("lora_id") is not None:
        lora = f"#{fields['lora_id']}"  # an adapter whose name the engine does not tell: no request can ask for it
    return Stored(
        names,
        None if parent is None else hash_name(parent),
        tokens,
        int(fields.get("block_size") or 0),
        tier,
        lora,
        fields.get("extra_keys"),
        fields.get("cache_salt"),
    )
