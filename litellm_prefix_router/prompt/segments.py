"""Ids of a long text from the ids of its segments, so that a conversation's next turn costs its new text.

A tokenizer first cuts a text at its added tokens and then works on what lies between, each piece for itself. So a text
may be cut before each occurrence of one added token, and the ids of the segments, put together, are the ids of the
whole. That holds for an added token which

- is found in the text as it stands: not `normalized`, and without `lstrip`, `rstrip` and `single_word`, which look at
  its surroundings;
- is never hidden by another added token: none contains it, and none ends with a beginning of it.

A segment begins with the token, so no segment but the first begins the text (some tokenizers put a space there).
Where no token is like that, the whole text is encoded at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

from .backend import Backend
from .cache import PromptCache
from .reference import AddedToken

_GROUP_BYTES = 16 * 1024
"""Text that one look-up stands for, where all of it was seen together before."""
_MIN_CHARACTERS = 1024
"""Shorter texts are encoded at once: that is as fast as looking them up."""
_PLAIN_FLAGS = ("normalized", "lstrip", "rstrip", "single_word")


def cut_tokens(added: Mapping[int, AddedToken]) -> dict[int, str]:
    """The added tokens before which any text may be cut, by id."""
    contents = [token.content for token in added.values()]
    endings: set[str] = set()
    for content in contents:
        endings.update(content[start:] for start in range(1, len(content)))
    # strings that contain a candidate are looked for in one go: a set of all substrings would be quadratic
    joined = "\n\0\n".join(contents)
    found: dict[int, str] = {}
    for index, token in added.items():
        content = token.content
        if len(content) < 2 or any(getattr(token, flag) for flag in _PLAIN_FLAGS):
            continue
        if joined.count(content) > 1 or any(content[:length] in endings for length in range(1, len(content) + 1)):
            continue
        found[index] = content
    return found


class SegmentEncoder:
    """Encodes texts segment by segment, with the segments' ids in a shared cache."""

    def __init__(self, backend: Backend, added: Mapping[int, AddedToken], cache: PromptCache) -> None:
        self._backend = backend
        self._cache = cache
        self._cuts = cut_tokens(added)
        self._cut_ids = np.asarray(sorted(self._cuts), dtype="<u4")
        self._cut: bytes | None = None
        # random, so that nobody can make two texts with one key; one a token, which is part of what a segment is
        self._seeds: dict[bytes, int] = {}

    def encode(self, text: str) -> bytes:
        """Ids of `text` as little-endian uint32. Raises UnicodeEncodeError for lone surrogates."""
        if len(text) < _MIN_CHARACTERS:
            return self._whole(text)
        cut = self._cut
        data = text.encode()  # UTF-8 holds no false matches; lone surrogates are refused here
        if cut is None or cut not in data:
            ids = self._backend.encode(text)
            self._choose_cut(ids)
            return ids
        seed = self._seeds.get(cut) or self._seeds.setdefault(cut, secrets.randbits(63) | 1)
        return b"".join(self._groups(data, cut, seed))

    def _groups(self, data: bytes, cut: bytes, seed: int) -> Iterator[bytes]:
        """Ids of the text in order, by groups of segments where the whole group was seen before.

        Where a group ends depends on its own text alone, so the groups of a text that grows stay the same.
        """
        view = memoryview(data)
        start = 0
        while start < len(data):
            end = data.find(cut, start + _GROUP_BYTES)
            if end < 0:
                yield self._segments(data[start:], start == 0, cut, seed)
                return
            # 4: a group's key must not be that of a segment with the same text
            key = xxhash.xxh3_128_intdigest(view[start:end], seed) ^ (4 if start else 5)
            ids = self._cache.get_many((key,))[0]
            if ids is None:
                ids = self._segments(data[start:end], start == 0, cut, seed)
                self._cache.put(key, ids, len(ids))
            yield ids
            start = end

    def _segments(self, data: bytes, begins: bool, cut: bytes, seed: int) -> bytes:
        """Ids of a group, each segment by itself. A group that does not begin the text begins with the cut."""
        pieces = data.split(cut)
        if not begins:
            del pieces[0]
        digest = xxhash.xxh3_128_intdigest
        keys = [digest(piece, seed) for piece in pieces]
        if begins:
            keys[0] ^= 3  # the first piece of the text has no token before it
        found = self._cache.get_many(keys)
        missing = [index for index, ids in enumerate(found) if ids is None]
        if missing:
            texts = [pieces[0] if begins and not index else cut + pieces[index] for index in missing]
            encoded = self._backend.encode_many([piece.decode() for piece in texts])
            for index, ids in zip(missing, encoded, strict=True):
                found[index] = ids
                self._cache.put(keys[index], ids, len(ids))
        return b"".join(found)

    def _whole(self, text: str) -> bytes:
        if not text.isascii():
            text.encode()  # refuses lone surrogates, which the libraries treat each in their own way
        return self._backend.encode(text)

    def _choose_cut(self, ids: bytes) -> None:
        """Cut from now on at the added token that this text has most often."""
        if not len(self._cut_ids):
            return
        values = np.frombuffer(ids, dtype="<u4")
        values = values[np.isin(values, self._cut_ids)]
        if len(values) > 1:
            tokens, counts = np.unique(values, return_counts=True)
            self._cut = self._cuts[int(tokens[counts.argmax()])].encode()
