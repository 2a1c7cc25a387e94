"""How the index's values are encoded: roster records, announcements, loads. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from .contract import ReplicaLoad, ReplicaRecord

_records = msgspec.json.Decoder(ReplicaRecord)
_record_lists = msgspec.json.Decoder(list[ReplicaRecord])
_loads = msgspec.msgpack.Decoder(dict[str, ReplicaLoad])


def as_fields(raw: Any) -> dict[bytes, bytes]:
    """A hash as the client answers HGETALL: a mapping, or a flat list of names and values."""
    return raw if isinstance(raw, dict) else dict(zip(raw[::2], raw[1::2], strict=True))


def encode_record(record: ReplicaRecord) -> bytes:
    """JSON without what the scripts manage: slot, incarnation, epoch."""
    return msgspec.json.encode(msgspec.structs.replace(record, slot=None, incarnation=0, epoch=""))


def decode_roster(fields: Mapping[bytes, bytes]) -> dict[str, ReplicaRecord]:
    """The roster hash as records; fields that this version cannot read are left out."""
    epoch = fields.get(b"@e", b"").decode()
    roster = {}
    for name, value in fields.items():
        if name.startswith(b"@"):
            continue
        slot, _, rest = value.partition(b":")
        incarnation, _, body = rest.partition(b":")
        try:
            record = _records.decode(body)
            roster[name.decode()] = msgspec.structs.replace(
                record, slot=int(slot) if slot else None, incarnation=int(incarnation), epoch=epoch
            )
        except (msgspec.DecodeError, ValueError):
            continue
    return roster


def encode_announcement(replicas: Iterable[ReplicaRecord]) -> bytes:
    return msgspec.json.encode([msgspec.structs.replace(r, slot=None, incarnation=0, epoch="") for r in replicas])


def merge_announcements(lists: Iterable[bytes]) -> dict[str, ReplicaRecord]:
    """Replica id -> record over all gateways; one that names the event endpoint wins."""
    merged: dict[str, ReplicaRecord] = {}
    for raw in lists:
        try:
            records = _record_lists.decode(raw)
        except msgspec.DecodeError:
            continue
        for record in records:
            known = merged.get(record.replica_id)
            doubted_at = max(record.doubted_at, known.doubted_at if known is not None else 0.0)
            if known is None or (known.events is None and record.events is not None):
                known = record
            merged[record.replica_id] = msgspec.structs.replace(known, doubted_at=doubted_at)
    return merged


def encode_loads(loads: Mapping[str, ReplicaLoad]) -> bytes:
    """Only replicas with work in flight take room."""
    return msgspec.msgpack.encode({name: load for name, load in loads.items() if load != ReplicaLoad()})


def decode_loads(raw: bytes) -> dict[str, ReplicaLoad]:
    try:
        return _loads.decode(raw)
    except msgspec.DecodeError:
        return {}


def sum_loads(shares: Iterable[Mapping[str, ReplicaLoad]]) -> dict[str, ReplicaLoad]:
    total: dict[str, ReplicaLoad] = {}
    for share in shares:
        for name, load in share.items():
            known = total.get(name)
            total[name] = load if known is None else known + load
    return total
