"""A pool's way from request body to token ids to block hashes, for use inside an event loop.

The tokenizer is loaded in the background; until it is there every prompt is unknown, with the reason. Small requests
are encoded where they come in, since a hop to another thread costs more than they do; what may take longer than about
a millisecond goes to a thread. Tokenizers let go of the interpreter lock while they work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

from ..settings import ModelSettings
from .blocks import chain_hashes, root_hash
from .cache import PromptCache
from .dialect import dialect_for
from .encoded import EncodedPrompt, PromptUnknown
from .engine_tokenizer import EngineTokenizer
from .hashing import BlockHasher
from .model import EngineModel
from .sandbox import Clock
from .tokenizer import TokenizerStore
from .tokenizer_files import find_folder, read_files

log = logging.getLogger(__name__)

_INLINE_CHARACTERS = 24_000
"""What fits into about 1 ms of rendering, tokenizing and hashing with the fast tokenizer (measured)."""
_CHARACTERS_PER_ITEM = 200
"""What handling one message, part or tool costs, in characters of text."""
_INLINE_SLOW_CHARACTERS = 2_000
"""The same with the reference tokenizer."""
_MAX_NODES = 200_000
_WORTH_KNOWING = 256
"""Characters from which on a text is remembered as seen (by its hash alone)."""
_SEEN_TEXTS = 20_000
_KNOWN_COUNTS_UP_TO = 160_000
"""Longer prompts go to a thread whatever is known of them."""
_FIRST_BODY = {"messages": [{"role": "user", "content": "Hello"}]}
"""Rendered while loading: templates are compiled when they are used, and the first request would have to wait."""
_ENGINE_ONLY = frozenset(
    {
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
        *("DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration", "InklingForCausalLM"),
        *("InklingForConditionalGeneration", "MoonshotKimiaForCausalLM"),
    }
)
"""Architectures that the engine renders with code of its own instead of a chat template, and no library does."""


class PromptPipeline:
    """Implements PromptEncoder for one pool.

    `settings` say how the engine was started; `root` is where its replicas say that the model lives (a folder or a
    Hugging Face id), used when the settings name no tokenizer. `max_model_len` and `lora_modules` are what replicas
    report. `cache` and `tokenizers` may be shared by several pipelines; `clock` is the templates' local time.
    `engine_tokenizer` asks a replica where its engine alone can render the prompt, and where no tokenizer can be had.
    """

    def __init__(
        self,
        settings: ModelSettings | None = None,
        *,
        root: str | None = None,
        engine: str | None = None,
        engine_version: str | None = None,
        max_model_len: int | None = None,
        lora_modules: Iterable[str] = (),
        cache: PromptCache | None = None,
        tokenizers: TokenizerStore | None = None,
        clock: Clock = datetime.now,
        max_body_bytes: int = 8 << 20,
        engine_tokenizer: EngineTokenizer | None = None,
    ) -> None:
        self.settings = settings or ModelSettings.model_validate({})
        self.cache = cache if cache is not None else PromptCache(256 << 20)
        self._tokenizers = tokenizers if tokenizers is not None else TokenizerStore(self.cache)
        self._name = self.settings.tokenizer or root
        chosen = self.settings.engine if self.settings.engine != "auto" else (engine or "vllm")
        self._dialect = dialect_for(chosen, self.settings.engine_version or engine_version)
        self._max_model_len = max_model_len
        self._lora_modules = frozenset(lora_modules)
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._engine_tokenizer = engine_tokenizer
        self._hasher = BlockHasher(self.cache)
        self._seen: dict[int, None] = {}
        self._model: EngineModel | None = None
        self._failure: PromptUnknown | None = None
        self._loading: Future[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prompt")

    def start(self) -> None:
        """Begin to load in the background; a second call does nothing."""
        if self._loading is None:
            self._loading = self._executor.submit(self._load_quietly)

    def load(self) -> None:
        """Load now, in this thread. Raises PromptUnknown("tokenizer_missing")."""
        self._load_quietly()
        if self._failure is not None:
            raise self._failure

    async def wait(self) -> None:
        """Return when loading has ended, well or not."""
        self.start()
        assert self._loading is not None
        await asyncio.wrap_future(self._loading)

    def close(self) -> None:
        """Stop the threads; nothing can be encoded afterwards."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def state(self) -> str:
        if self._model is not None:
            return f"ready ({self._model.source}, {self._name})"
        if self._failure is not None and self._engine_tokenizer is not None:
            return f"{self._engine_tokenizer.state} because {self._failure.detail or self._failure.reason}"
        if self._failure is not None:
            return f"failed: {self._failure.detail or self._failure.reason}"
        return "loading" if self._loading is not None else "not started"

    def _load_quietly(self) -> None:
        try:
            if not self._name:
                raise PromptUnknown("tokenizer_missing", "no tokenizer is set and no replica says where its model is")
            if self.settings.tokenizer_mode == "engine":
                raise PromptUnknown("unsupported", "the settings say so")
            files = read_files(find_folder(self._name))
            settings = self.settings
            if settings.tokenizer_mode == "auto" and self._dialect.engine == "vllm":
                only = _ENGINE_ONLY.intersection(map(str, files.config.get("architectures") or ()))
                if only:
                    raise PromptUnknown("unsupported", f"only the engine renders prompts of {next(iter(only))}")
                if self._name.startswith("mistralai/") and files.has_tekken:
                    settings = settings.model_copy(update={"tokenizer_mode": "mistral"})
            model = EngineModel(
                files,
                settings,
                self._dialect,
                self._tokenizers,
                clock=self._clock,
                max_model_len=self._max_model_len,
                lora_modules=self._lora_modules,
            )
            with contextlib.suppress(Exception):  # what is wrong with a template, a real request will say
                model.encode("/v1/chat/completions", _FIRST_BODY)
            self._model = model
            self._failure = None
        except PromptUnknown as error:
            self._failure = error
            log.warning("tokenizer of %s: %s", self._name, error)
        except Exception as error:  # a broken file must not end the thread without a word
            self._failure = PromptUnknown("tokenizer_missing", f"{type(error).__name__} while loading")
            log.warning("tokenizer of %s", self._name, exc_info=True)

    async def encode(self, path: str, body: Mapping[str, Any]) -> EncodedPrompt:
        """Token ids for the body that is sent to `path`; for a list of prompts, the first. Raises PromptUnknown."""
        if self._failure is not None and self._engine_tokenizer is not None:
            return await self._engine_tokenizer.encode(path, body)
        model = self._ready()
        weight = self._weigh(body)
        limit = _INLINE_CHARACTERS if model.source == "fastokens" else _INLINE_SLOW_CHARACTERS
        if weight <= limit and not _brings_template(body):
            return self.encode_now(path, body)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.encode_now, path, body)

    def encode_now(self, path: str, body: Mapping[str, Any]) -> EncodedPrompt:
        """As encode, in this thread. Raises PromptUnknown."""
        model = self._ready()
        try:
            return model.encode(path, body)
        except (RecursionError, MemoryError) as error:
            raise PromptUnknown("malformed", type(error).__name__) from None
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            # a body of a shape that no check above foresaw: the engine's schema would not have taken it
            log.debug("unexpected shape of a request body", exc_info=True)
            raise PromptUnknown("malformed", type(error).__name__) from None

    def blocks(self, encoded: EncodedPrompt, pool: str, block_size: int) -> list[int]:
        """Hashes of the prompt's full blocks in order, as blocks.chain_hashes from the root of pool and identity.

        Costs about 0.4 µs a block that was not hashed before and 10 ns one that was.
        """
        identity = encoded.identity
        root = root_hash(pool, identity.lora, identity.cache_salt)
        if identity.block_extra:
            return chain_hashes(encoded.token_ids, block_size, root, identity.block_extra)
        return self._hasher.hashes(encoded.token_ids, block_size, root)

    def _ready(self) -> EngineModel:
        if self._model is not None:
            return self._model
        if self._failure is not None:
            raise self._failure
        raise PromptUnknown("tokenizer_loading")

    def _weigh(self, body: Mapping[str, Any]) -> int:
        """About how much work a body is, in characters of new text. Raises PromptUnknown("too_large")."""
        weight = nodes = known = 0
        stack: list[Any] = [body]
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                weight += len(value)
                if len(value) >= _WORTH_KNOWING:
                    name = hash(value)
                    if name in self._seen:
                        known += len(value)
                    else:
                        self._seen[name] = None
            elif isinstance(value, dict):
                stack += value.values()
                weight += _CHARACTERS_PER_ITEM
            elif isinstance(value, list):
                if value and type(value[0]) is int:
                    weight += len(value)
                else:
                    stack += value
            nodes += 1
            if weight > self._max_body_bytes or nodes > _MAX_NODES:
                raise PromptUnknown("too_large", f"more than {self._max_body_bytes} bytes of prompt")
        while len(self._seen) > _SEEN_TEXTS:
            self._seen.pop(next(iter(self._seen)))
        # a text that came before is in the caches: it costs about a tenth
        return weight - known * 9 // 10 if weight <= _KNOWN_COUNTS_UP_TO else weight


def _brings_template(body: Mapping[str, Any]) -> bool:
    kwargs = body.get("chat_template_kwargs")
    return bool(body.get("chat_template") or (isinstance(kwargs, dict) and kwargs.get("chat_template")))
