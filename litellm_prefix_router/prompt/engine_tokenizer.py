"""Token ids from a replica itself, for models whose prompts only their engine can render.

`{path}/render` gives the ids of any endpoint; where it is switched off, `/tokenize` gives those of chat and
completions, as long as nothing in the body changes the prompt that it does not know. Answers are kept; a question that
takes longer than the decision may wait is left to finish, so that the next one like it finds its answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import xxhash

from .blocks import as_token_ids
from .cache import PromptCache
from .encoded import CacheIdentity, EncodedPrompt, PromptUnknown
from .request_forms import refuse

_SWITCHED_OFF = frozenset({403, 404, 405, 501})
_REFUSED = frozenset({400, 413, 422})
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_SAMPLING = """
    stream stream_options max_tokens max_completion_tokens max_output_tokens temperature top_p top_k min_p n stop seed
    user metadata logprobs top_logprobs presence_penalty frequency_penalty repetition_penalty return_token_ids priority
    request_id session_id store service_tier stop_sequences
"""
_WITHOUT_EFFECT = frozenset(_SAMPLING.split())
"""Fields that never change a prompt: requests that differ in them share an answer."""
_TOKENIZE_KNOWS = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "chat_template_kwargs", "prompt"),
)
_TOKENIZE_IGNORES = ("truncate_prompt_tokens", "documents", "reasoning_effort", "kv_transfer_params", "suffix")


class EngineTokenizer:
    """Implements PromptEncoder by asking replicas.

    `addresses` gives the base URLs of replicas that may be asked; those that failed lately are asked last.
    `deadline_ms` bounds the wait of one request, `timeout_s` the question itself; at most `max_in_flight` questions are
    open at a time.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        *,
        cache: PromptCache,
        client: httpx.AsyncClient | None = None,
        lora_modules: frozenset[str] = frozenset(),
        headers: Mapping[str, str] | None = None,
        deadline_ms: float = 15.0,
        timeout_s: float = 5.0,
        max_in_flight: int = 16,
        max_body_bytes: int = 1 << 20,
    ) -> None:
        self._addresses = addresses
        self._cache = cache
        self._client = client or httpx.AsyncClient(timeout=timeout_s)
        self._own_client = client is None
        self._lora_modules = lora_modules
        self._headers = dict(headers or {})
        self._deadline_s = deadline_ms / 1000
        self._timeout_s = timeout_s
        self._max_in_flight = max_in_flight
        self._max_body_bytes = max_body_bytes
        self._open: dict[int, asyncio.Task[bytes]] = {}
        self._no_render: set[str] = set()
        self._failed_at: dict[str, float] = {}
        self._state = "ready (engine)"

    @property
    def state(self) -> str:
        return self._state

    def ask_at(self, addresses: Callable[[], Sequence[str]]) -> None:
        """Other replicas from now on."""
        self._addresses = addresses

    async def close(self) -> None:
        """Give up open questions and the client, where it is our own."""
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._own_client:
            await self._client.aclose()

    async def encode(self, path: str, body: Mapping[str, Any]) -> EncodedPrompt:
        """As PromptEncoder.encode; "tokenizer_missing" also where no replica answered in time."""
        if path not in _ENDPOINTS:
            raise PromptUnknown("not_a_prompt", path)
        name = body.get("model")
        salt = body.get("cache_salt")
        identity = CacheIdentity(
            lora=name if name in self._lora_modules else None, cache_salt=salt if isinstance(salt, str) else None
        )
        question = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT and key != "cache_salt"}
        try:
            content = json.dumps(question).encode()  # escapes keep lone surrogates as they came
        except (ValueError, TypeError, RecursionError) as error:
            raise PromptUnknown("malformed", type(error).__name__) from None
        if len(content) > self._max_body_bytes:
            raise PromptUnknown("too_large", f"more than {self._max_body_bytes} bytes")
        key = xxhash.xxh3_128_intdigest(path.encode() + b"\0" + content)
        known = self._cache.get_many((("engine", key),))[0]
        if known is None:
            known = await self._answer(key, path, content, question)
        return EncodedPrompt(np.frombuffer(known, dtype="<u4"), identity, "engine")

    async def _answer(self, key: int, path: str, content: bytes, question: Mapping[str, Any]) -> bytes:
        task = self._open.get(key)
        if task is None:
            if len(self._open) >= self._max_in_flight:
                raise PromptUnknown("tokenizer_missing", "too many questions to replicas are open")
            task = asyncio.create_task(self._ask(key, path, content, question))
            self._open[key] = task
            task.add_done_callback(lambda done: self._close_question(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._deadline_s)
        except TimeoutError:
            raise PromptUnknown("tokenizer_missing", "no replica answered in time") from None

    def _close_question(self, key: int, task: asyncio.Task[bytes]) -> None:
        self._open.pop(key, None)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain of what nobody waited for

    async def _ask(self, key: int, path: str, content: bytes, question: Mapping[str, Any]) -> bytes:
        known = self._addresses()
        self._failed_at = {address: at for address, at in self._failed_at.items() if address in known}
        addresses = sorted(known, key=lambda address: self._failed_at.get(address, 0.0))[:2]
        if not addresses:
            raise PromptUnknown("tokenizer_missing", "no replica to ask")
        failure = PromptUnknown("tokenizer_missing", "no replica answered")
        for address in addresses:
            base = address.rstrip("/").removesuffix("/v1")
            try:
                ids = await self._ask_one(base, path, content, question)
            except (httpx.HTTPError, ValueError) as error:
                failure = PromptUnknown("tokenizer_missing", f"replica: {type(error).__name__}")
                self._state = f"failing: {type(error).__name__}"
                self._failed_at[address] = time.monotonic()
                continue
            packed = as_token_ids(ids).tobytes()
            self._cache.put(("engine", key), packed, len(packed))
            self._state = "ready (engine)"
            return packed
        raise failure

    async def _ask_one(self, base: str, path: str, content: bytes, question: Mapping[str, Any]) -> list[int]:
        if base not in self._no_render:
            response = await self._post(f"{base}{path}/render", content)
            if response.status_code not in _SWITCHED_OFF:
                return _ids(response)
            self._no_render.add(base)
        if path not in _ENDPOINTS[:2] or any(question.get(name) is not None for name in _TOKENIZE_IGNORES):
            raise PromptUnknown("unsupported", "the replica's /render is switched off")
        asked = {name: question[name] for name in _TOKENIZE_KNOWS if name in question}
        prompt = asked.get("prompt")
        if path == _ENDPOINTS[1] and not isinstance(prompt, str):
            if isinstance(prompt, list) and prompt and all(type(value) is int for value in prompt):
                return prompt
            raise PromptUnknown("unsupported", "several prompts in one request")
        return _ids(await self._post(f"{base}/tokenize", json.dumps(asked).encode()))

    async def _post(self, url: str, content: bytes) -> httpx.Response:
        headers = {"content-type": "application/json", **self._headers}
        return await self._client.post(url, content=content, headers=headers, timeout=self._timeout_s)


def _ids(response: httpx.Response) -> list[int]:
    if response.status_code in _REFUSED:
        refuse(f"the replica answers {response.status_code}")
    response.raise_for_status()
    value = response.json()
    if isinstance(value, list) and value:
        value = value[0]
    for name in ("token_ids", "prompt_token_ids", "tokens"):
        ids = value.get(name) if isinstance(value, dict) else None
        if isinstance(ids, list) and all(type(item) is int for item in ids):
            return ids
    raise ValueError("no token ids in the replica's answer")
