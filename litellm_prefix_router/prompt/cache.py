"""One memory for everything that the prompt stage keeps: bounded in bytes, least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

_ENTRY_OVERHEAD = 200
"""Bytes of an entry beside its value: key, node and counters (measured: 170–230 with CPython 3.11)."""


class PromptCache:
    """A map from hashable keys to values of known size. Safe to share between pipelines and threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, keys: Sequence[Hashable]) -> list[Any]:
        """The value of each key, None where there is none."""
        with self._lock:
            entries = self._entries
            found: list[Any] = []
            misses = 0
            for key in keys:
                entry = entries.get(key)
                if entry is None:
                    misses += 1
                    found.append(None)
                else:
                    entries.move_to_end(key)
                    found.append(entry[0])
            self.misses += misses
            self.hits += len(found) - misses
            return found

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Keep `value`, which takes `size` bytes, and forget the longest unused until all fits."""
        size += _ENTRY_OVERHEAD
        if size > self.max_bytes:
            return
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.used_bytes -= old[1]
            self._entries[key] = (value, size)
            self.used_bytes += size
            while self.used_bytes > self.max_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.used_bytes -= freed

    def stats(self) -> dict[str, int]:
        """Counters for metrics: used_bytes, max_bytes, entries, hits, misses."""
        return {
            "used_bytes": self.used_bytes,
            "max_bytes": self.max_bytes,
            "entries": len(self._entries),
            "hits": self.hits,
            "misses": self.misses,
        }
