"""One MGET of many block keys, put together as it travels.

The block keys of a family differ in their last 8 bytes alone, so the request is those bytes joined by what stands
between them. Building each key and having a client encode it takes three to four times as long, and a lookup reads
hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def tails(blocks: Sequence[int], positions: Iterable[int]) -> list[bytes]:
    """The last parts of the block keys at these positions of a chain, see layout."""
    return [blocks[at].to_bytes(8, "little") for at in positions]


class WideRead:
    """Plain keys first, then block keys, in the order in which they are added. Answered by one value a key."""

    __slots__ = ("_families", "_keys")

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = keys
        self._families: list[tuple[bytes, Sequence[bytes]]] = []

    def add(self, family: bytes, ends: Sequence[bytes]) -> None:
        """Block keys that begin with `family`; `ends` as `tails` gives them."""
        if ends:
            self._families.append((family, ends))

    def command(self) -> list[str | bytes]:
        """For a client that encodes commands itself."""
        blocks = [family + end for family, ends in self._families for end in ends]
        return ["MGET", *self._keys, *blocks]

    def packed(self) -> bytes:
        """The command in the Redis protocol: an array of bulk strings, each `$<length>CRLF<bytes>CRLF`."""
        count = 1 + len(self._keys) + sum(len(ends) for _, ends in self._families)
        parts = [b"*%d\r\n$4\r\nMGET" % count]
        parts += [b"\r\n$%d\r\n%b" % (len(key), key) for key in self._keys]
        for family, ends in self._families:
            between = b"\r\n$%d\r\n%b" % (len(family) + 8, family)
            parts += between, between.join(ends)
        parts.append(b"\r\n")
        return b"".join(parts)
