"""One model's tokenizer, ready to use: ids of a text as the engine has them, and what its files say beside."""

from __future__ import annotations

import logging

import numpy as np

from .backend import choose_backend
from .blocks import TokenIds
from .cache import PromptCache
from .effective import effective_tokenizer, special_tokens
from .request_forms import refuse
from .segments import SegmentEncoder
from .tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)


class ModelTokenizer:
    """Built from a model's files; building takes a second or so, encoding a text microseconds to milliseconds."""

    def __init__(self, files: TokenizerFiles, cache: PromptCache) -> None:
        """Raises PromptUnknown("tokenizer_missing")."""
        tokenizer = effective_tokenizer(files)
        added = tokenizer.get_added_tokens_decoder()
        self.vocab_size: int = max(tokenizer.get_vocab_size(with_added_tokens=True), files.vocab_size or 0)
        self.special_tokens = special_tokens(files)
        self._added_ids = np.asarray(sorted(added), dtype="<u4")
        self._prefix, self._suffix = _surroundings(tokenizer)
        backend, why = choose_backend(tokenizer, [token.content for token in added.values()])
        self.source = backend.name
        self._segments = SegmentEncoder(backend, added, cache)
        if why is not None:
            log.info("%s: tokenizing with %s: %s", files.folder.name, backend.name, why)

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


def _surroundings(tokenizer: object) -> tuple[bytes, bytes]:
    """The ids that the post-processor puts before and after a text."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    plain, whole = encode("a", add_special_tokens=False).ids, encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            before, after = whole[:start], whole[start + len(plain) :]
            return np.asarray(before, dtype="<u4").tobytes(), np.asarray(after, dtype="<u4").tobytes()
    return b"", b""
