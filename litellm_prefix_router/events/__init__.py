"""Engine events into index writes: codecs, the tracker (a state machine without I/O), ZMQ, and the indexer service."""

from __future__ import annotations

from .embedded import EmbeddedIndexer
from .identity import block_extra

__all__ = ["EmbeddedIndexer", "block_extra"]
