"""What the simulated model says: words whose tokens come back the same when the next turn sends them again."""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Sequence
from random import Random

from .tokenizer import SimTokenizer


class Babble:
    """Made-up answers. The same prompt, length and seed give the same answer on every replica."""

    def __init__(self, tokenizer: SimTokenizer, seed: int = 0) -> None:
        self._seed = seed
        self._eos = tokenizer.eos_id
        vocabulary = tokenizer.vocabulary
        first = sorted(token for text, token in vocabulary.items() if re.fullmatch("[A-Z][a-z]{2,}", text))
        rest = sorted(token for text, token in vocabulary.items() if re.fullmatch("Ġ[a-z]{2,}", text))
        # A model folder whose vocabulary is of another kind: any of its first tokens will do.
        self._first = first or list(range(min(100, tokenizer.size)))
        self._rest = rest or self._first

    def __call__(self, prompt: Sequence[int], tokens: int, *, stop: bool, choice: int = 0) -> list[int]:
        """`tokens` token ids; with `stop` the last is the end of turn."""
        tail = array("Q", prompt[-64:]).tobytes()
        rng = Random(f"{self._seed}:{choice}:{len(prompt)}:{zlib.crc32(tail)}")
        words = tokens - 1 if stop and self._eos is not None else tokens
        answer = [rng.choice(self._rest if position else self._first) for position in range(words)]
        if len(answer) < tokens and self._eos is not None:
            answer.append(self._eos)
        return answer
