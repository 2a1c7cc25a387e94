"""One engine (one data-parallel rank): requests in, steps out. No clock and no I/O; the driver keeps the time.

A step is what the real scheduler makes of one forward pass: every running request computes its next token, and what
is left of the token budget prefills waiting requests in order of arrival, in chunks where they are long. Blocks
become findable, and hits are counted, when a step is planned; its tokens appear when it is done. Where memory is
short, a waiting request waits, and a running one that needs a block takes it from the youngest running one, which
starts again later (preemption).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_cache import Block, BlockCache, Labels
from .hashing import BlockHasher, Digest, Extra
from .wire import Event


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to complete. `answer` holds the tokens that the model will sample, decided beforehand."""

    prompt: Sequence[int]
    answer: Sequence[int]
    labels: Labels = field(default_factory=Labels)
    lora_path: str | None = None
    read_cache: bool = True
    """False (prompt_logprobs): nothing is reused, everything is computed and stored again."""
    report_hits: bool = False
    """Announce reused blocks again (kv_cache_report_mode=full)."""
    finish_reason: str = "length"
    """Why the answer ends where it does: "stop" or "length"."""

    tokens: list[int] = field(default_factory=list)
    """Prompt and what has been sampled so far."""
    computed: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that came from the cache, known once the request was scheduled."""
    blocks: list[Block] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    stored: int = 0
    """Blocks of this chain that are findable."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def sampled(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def finished(self) -> bool:
        """Whether the whole answer has been sampled."""
        return self.sampled >= len(self.answer)


@dataclass(slots=True)
class Step:
    """One planned step: how many tokens each request computes, and how many of these are prefill."""

    work: dict[Request, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    decodes: int = 0


@dataclass(slots=True)
class EngineStats:
    """Running totals, in tokens where not said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    """Requests."""
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    """Reason -> requests."""


class Engine:
    """Scheduler over one BlockCache. Call `plan`, let the step's time pass, then `complete`."""

    def __init__(
        self, cache: BlockCache, hasher: BlockHasher, *, max_batched_tokens: int = 2048, max_requests: int = 256
    ) -> None:
        self.cache = cache
        self.stats = EngineStats()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._hasher = hasher
        self._budget = max_batched_tokens
        self._max_requests = max_requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never fit."""
        last = len(request.prompt) + max(len(request.answer) - 1, 0)
        if self._blocks_for(last) > self.cache.capacity:
            raise ValueError(f"{last} tokens do not fit {self.cache.capacity} blocks of {self.cache.block_size}")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request wherever it is; what it computed stays findable. Safe to call twice."""
        if request in self.running:
            self.running.remove(request)
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self.stats.finished["abort"] += 1

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def plan(self) -> Step:
        """Decide the next step's work and do its bookkeeping. An empty step means that nothing can run."""
        step = Step()
        budget = self._budget
        preempted = False
        for request in list(self.running):
            if budget <= 0:
                break
            if request not in self.running:  # preempted by one before it
                continue
            count = min(len(request.tokens) - request.computed, budget)
            while not self._grow(request, count):
                victim = self.running.pop()
                preempted = True
                self._preempt(victim)
                budget += step.work.pop(victim, 0)
                if victim is request:
                    break
            if request not in self.running:
                break
            step.work[request] = count
            budget -= count
        while self.waiting and budget > 0 and not preempted and len(self.running) < self._max_requests:
            request = self.waiting[0]
            admitted = self._admit(request, budget)
            if admitted is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            step.work[request] = admitted
            budget -= admitted
        for request, count in step.work.items():
            if request.computed + count > len(request.prompt) and request.sampled:
                step.decodes += 1
                step.prefill_tokens += count - 1
            else:
                step.prefill_tokens += count
            request.computed += count
        return step

    def complete(self, step: Step) -> list[tuple[Request, int]]:
        """The step is done: each request that has computed all its tokens samples one. Returns (request, token)."""
        out = []
        for request in step.work:
            if request not in self.running or request.computed < len(request.tokens):
                continue  # aborted meanwhile, or its prefill goes on
            if not request.finished:
                token = request.answer[request.sampled]
                request.tokens.append(token)
                self.stats.generation_tokens += 1
                out.append((request, token))
            if request.finished:
                self.running.remove(request)
                self._free(request)
                self.stats.finished[request.finish_reason] += 1
        return out

    def take_events(self) -> list[Event]:
        """What the cache announced since the last call, in order."""
        return self.cache.take_events()

    def reset(self) -> bool:
        """Forget the cache. False while requests hold blocks. Announced with the next step that runs."""
        return self.cache.reset()

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_size)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Tokens to compute now for a waiting request, or None where memory is short."""
        self._hash(request, len(request.tokens))
        hits = self.cache.match(request.digests, len(request.tokens)) if request.read_cache else []
        cached = len(hits) * self.cache.block_size
        # The whole sequence has to fit, not only its first chunk: else half-done prefills would block one another.
        if not self.cache.fits(hits, self._blocks_for(len(request.tokens)) - len(hits)):
            return None
        count = min(len(request.tokens) - cached, budget)
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.stats.prompt_tokens += len(request.prompt)
            self.stats.prompt_tokens_cached += cached
            if request.read_cache:
                self.stats.prefix_queries += len(request.tokens)
                self.stats.prefix_hits += cached
        self.cache.pin(hits)
        request.blocks = list(hits)
        request.stored = len(hits)
        request.computed = cached
        needed = self._blocks_for(cached + count) - len(hits)
        request.blocks += self.cache.allocate(needed)
        self._store(request, cached + count, report_from=0 if request.report_hits else None)
        return count

    def _grow(self, request: Request, count: int) -> bool:
        """Memory for `count` more tokens of a running request; False where there is none."""
        needed = self._blocks_for(request.computed + count) - len(request.blocks)
        if needed > 0:
            if needed > self.cache.free:
                return False
            request.blocks += self.cache.allocate(needed)
        self._store(request, request.computed + count)
        return True

    def _store(self, request: Request, computed: int, *, report_from: int | None = None) -> None:
        full = min(computed, len(request.tokens)) // self.cache.block_size
        if full <= request.stored and report_from is None:
            return
        self._hash(request, full * self.cache.block_size)
        self.cache.store(
            request.blocks, request.digests[:full], request.tokens, request.stored, request.labels,
            report_from=report_from,
        )  # fmt: skip
        request.stored = max(full, request.stored)

    def _hash(self, request: Request, tokens: int) -> None:
        """Extend the request's digests to all full blocks of its first `tokens` tokens."""
        size = self.cache.block_size
        for position in range(len(request.digests), tokens // size):
            parent = request.digests[-1] if position else None
            content = request.tokens[position * size : (position + 1) * size]
            request.digests.append(self._hasher.block(parent, content, self._extra(request, position)))

    @staticmethod
    def _extra(request: Request, position: int) -> Extra:
        labels = request.labels
        extra: list[tuple[str, ...]] = []
        if labels.lora_name is not None:
            extra.append(("lora", labels.lora_name, request.lora_path or ""))
        if position == 0 and labels.cache_salt is not None:
            extra.append(("cache_salt", labels.cache_salt))
        return tuple(extra) or None

    def _preempt(self, request: Request) -> None:
        self._free(request)
        self.stats.preemptions += 1
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        self.cache.release(request.blocks)
        request.blocks = []
        request.stored = 0
        request.computed = 0
