"""One model's tokenizer, ready to use: ids of a text as the engine has them, and what its files say beside."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np

from .backend import Backend, TokenizersBackend, fast_backend, sample_texts
from .blocks import TokenIds
from .cache import PromptCache
from .effective import special_tokens
from .reference import Reference, reference
from .request_forms import refuse
from .segments import SegmentEncoder
from .tokenizer_files import Stamp, TokenizerFiles

log = logging.getLogger(__name__)


class ModelTokenizer:
    """Built from a model's files; building takes seconds, encoding a text microseconds to milliseconds."""

    def __init__(self, files: TokenizerFiles, cache: PromptCache) -> None:
        """Raises PromptUnknown("tokenizer_missing")."""
        self.special_tokens = special_tokens(files)
        with reference(files) as known:
            backend = choose_backend(known, files.folder.name)
        self.vocab_size: int = max(known.vocab_size, files.vocab_size or 0)
        self._added_ids = np.asarray(sorted(known.added), dtype="<u4")
        self._prefix, self._suffix = (np.asarray(ids, dtype="<u4").tobytes() for ids in (known.prefix, known.suffix))
        self.source = backend.name
        self._segments = SegmentEncoder(backend, known.added, cache)

    @property
    def adds_special_tokens(self) -> bool:
        """Does add_special_tokens change anything?"""
        return bool(self._prefix or self._suffix)

    @property
    def prefix_length(self) -> int:
        return len(self._prefix) // 4

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        """Ids of `text`, shape (n,). Raises PromptUnknown("refused") for text that is no valid Unicode."""
        try:
            ids = self._segments.encode(text)
        except UnicodeEncodeError:
            refuse("the text has lone surrogates")
        if add_special_tokens:
            ids = b"".join((self._prefix, ids, self._suffix))
        return np.frombuffer(ids, dtype="<u4")

    def truncate(self, ids: TokenIds, keep: int, *, add_special_tokens: bool) -> TokenIds:
        """The last `keep` ids, special tokens at both ends counted in and kept, as the tokenizer itself truncates."""
        if not add_special_tokens or not self.adds_special_tokens:
            return ids[len(ids) - keep :]
        before, after = self.prefix_length, len(self._suffix) // 4
        middle = keep - before - after
        if middle < 0:
            refuse("truncate_prompt_tokens is too small")
        text_ids = ids[before : len(ids) - after]
        return np.concatenate([ids[:before], text_ids[len(text_ids) - middle :], ids[len(ids) - after :]])

    def until_last_added_token(self, ids: TokenIds) -> TokenIds:
        """The ids up to and with the last added token: what comes before an unknown text is certain only so far."""
        positions = np.flatnonzero(np.isin(ids, self._added_ids))
        return ids[: int(positions[-1]) + 1 if len(positions) else 0]


class TokenizerStore:
    """One tokenizer for each folder, however many encoders use it: what differs by engine version or LoRA adapter is
    how a prompt is rendered. A folder whose files changed is read anew."""

    def __init__(self, cache: PromptCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._loading: dict[Path, threading.Lock] = {}
        self._kept: dict[Path, tuple[Stamp, ModelTokenizer]] = {}

    def get(self, files: TokenizerFiles) -> ModelTokenizer:
        """Raises PromptUnknown("tokenizer_missing")."""
        stamp = files.stamp()
        with self._lock:
            loading = self._loading.setdefault(files.folder, threading.Lock())
        with loading:  # others load meanwhile
            kept = self._kept.get(files.folder)
            if kept is None or kept[0] != stamp:
                kept = self._kept[files.folder] = (stamp, ModelTokenizer(files, self._cache))
            return kept[1]


def choose_backend(known: Reference, name: str) -> Backend:
    """The fastest library with the reference's ids on the sample."""
    texts = sample_texts([token.content for token in known.added.values()])
    try:
        return fast_backend(known.file or known.text, texts, known.expected)
    except ValueError as why:
        log.info("%s: tokenizing with %s: %s", name, TokenizersBackend.name, why)
        return TokenizersBackend(known.tokenizer())
