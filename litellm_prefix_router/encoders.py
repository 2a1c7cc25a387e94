"""Prompt encoders of a gateway: one for each tokenizer and set of options, shared by the pools that use it."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from .fleet.pool import Pool
from .prompt.cache import PromptCache
from .prompt.engine_tokenizer import EngineTokenizer
from .prompt.pipeline import PromptPipeline
from .prompt.tokenizer import TokenizerStore
from .settings import Settings

Key = tuple[Any, ...]
KEPT = 64
"""Encoders remembered, beside those in use: each change of a pool's adapters or engine version makes another."""
ENGINE_SHARE = 0.6
"""Part of a decision's deadline that an engine's own tokenizer may take; the rest is for the lookup."""


class EncoderShelf:
    """Makes encoders when their tokenizer's whereabouts are known, and keeps them while settings stay."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._cache = PromptCache(settings.prompt_cache_mb << 20)
        self._tokenizers = TokenizerStore(self._cache)
        self._encoders: WeakValueDictionary[Key, PromptPipeline] = WeakValueDictionary()
        """All that some pool holds, and the recent ones."""
        self._recent: dict[Key, PromptPipeline] = {}
        self._engines: WeakKeyDictionary[PromptPipeline, EngineTokenizer] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def equip(self, pool: Pool) -> None:
        """Give the pool its encoder, or say what is missing. Cheap when nothing changed; loading goes on behind."""
        facts = pool.facts
        root = pool.settings.tokenizer or facts.root
        if root is None:
            pool.encoder = None
            pool.encoder_problem = "no replica has said where its model is, and no tokenizer is set for the model"
            return
        key: Key = (
            root,
            pool.settings.model_dump_json(),
            facts.version,
            facts.max_model_len,
            tuple(sorted(pool.lora_modules)),
        )
        with self._lock:
            encoder = self._encoders.get(key)
            if encoder is None:
                engine = EngineTokenizer(
                    list,
                    cache=self._cache,
                    lora_modules=pool.lora_modules,
                    deadline_ms=self._settings.deadline_ms * ENGINE_SHARE,
                )
                encoder = PromptPipeline(
                    pool.settings,
                    root=root,
                    engine_version=facts.version,
                    max_model_len=facts.max_model_len,
                    lora_modules=pool.lora_modules,
                    cache=self._cache,
                    tokenizers=self._tokenizers,
                    max_body_bytes=self._settings.max_body_bytes,
                    engine_tokenizer=engine,
                )
                self._engines[encoder] = engine
                encoder.start()
            # the pool of now: an encoder outlives those that it was made for
            self._engines[encoder].ask_at(lambda: _addresses(pool))
            self._encoders[key] = encoder
            self._recent[key] = self._recent.pop(key, encoder)  # the last asked for stands last
            if len(self._recent) > KEPT:
                del self._recent[next(iter(self._recent))]
        pool.encoder = encoder
        pool.encoder_problem = None

    def close(self) -> None:
        with self._lock:
            for encoder in list(self._encoders.values()):
                encoder.close()
            self._encoders.clear()
            self._recent.clear()


def _addresses(pool: Pool) -> list[str]:
    return list(dict.fromkeys(r.address for r in pool.replicas.values() if r.facts.reachable))
