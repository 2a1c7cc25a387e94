"""Runs the requests of one API call on a rank and puts their tokens together to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from .answers import Babble
from .bodies import ApiError, Job
from .config import SimConfig
from .engine import Request
from .faults import Faults
from .rank import EngineDied, Rank
from .shapes import Choice
from .tokenizer import SimTokenizer

UNFINISHED = "\ufffd"
"""What bytes decode to while the rest of their character is missing."""

Piece = tuple[Choice, str, Sequence[int]]
"""(the answer it belongs to, its next text, its next tokens)."""


class ConnectionDropped(Exception):
    """The connection is to be closed without an end."""


class Generation:
    """One API call in progress. `close` ends what still runs; safe to call twice."""

    def __init__(
        self, job: Job, rank: Rank, requests: Sequence[Request], tokenizer: SimTokenizer, drop_after: int | None
    ) -> None:
        self._rank = rank
        self._requests = requests
        self._tokenizer = tokenizer
        self._drop_after = drop_after
        self._out: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self.choices = [Choice(index, request.prompt) for index, request in enumerate(requests)]
        streams = [rank.submit(request) for request in requests]
        self._tasks = [
            asyncio.create_task(self._collect(choice, request, stream))
            for choice, request, stream in zip(self.choices, requests, streams, strict=True)
        ]

    async def run(self) -> None:
        """To the end. Raises EngineDied or ConnectionDropped."""
        async for _ in self.pieces():
            pass

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answers' pieces as they come. Raises EngineDied or ConnectionDropped."""
        left, tokens = len(self._tasks), 0
        while left:
            item = await self._out.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
                tokens += len(item[2])
                if self._drop_after is not None and tokens >= self._drop_after:
                    raise ConnectionDropped

    def close(self) -> None:
        """End what still runs and free what it held."""
        for task in self._tasks:
            task.cancel()
        for request in self._requests:
            self._rank.abort(request)

    async def _collect(self, choice: Choice, request: Request, stream: AsyncIterator[int]) -> None:
        pending: list[int] = []
        try:
            async for token in stream:
                choice.cached_tokens = request.cached_tokens or 0
                choice.tokens.append(token)
                pending.append(token)
                done = len(choice.tokens) == len(request.answer)
                if done:
                    choice.finish_reason = request.finish_reason
                text = self._tokenizer.decode(pending)
                if text.endswith(UNFINISHED) and not done:
                    continue
                choice.text += text
                self._out.put_nowait((choice, text, pending))
                pending = []
            self._out.put_nowait(None)
        except EngineDied as error:
            self._out.put_nowait(error)


class Generator:
    """Starts generations: chooses the rank and the answers."""

    def __init__(self, config: SimConfig, tokenizer: SimTokenizer, ranks: Sequence[Rank], faults: Faults) -> None:
        self._script = config.script
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._faults = faults
        self._babble = Babble(tokenizer, config.seed)
        self._turn = 0

    def start(self, job: Job, rank: int | None) -> Generation:
        """Queue the call's requests on `rank`, or on the least busy one. Raises ApiError for what cannot fit."""
        chosen = self._ranks[rank] if rank is not None else self._least_busy()
        requests = [self._request(job, prompt, choice) for prompt in job.prompts for choice in range(job.choices)]
        drop_after = self._faults.drop_after_tokens if self._faults.use("drop_requests") else None
        try:
            return Generation(job, chosen, requests, self._tokenizer, drop_after)
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    def _request(self, job: Job, prompt: Sequence[int], choice: int) -> Request:
        answer = self._answer(job, prompt, choice)
        ended = bool(answer) and answer[-1] == self._tokenizer.eos_id
        return Request(
            prompt,
            answer,
            job.labels,
            job.lora_path,
            job.read_cache,
            job.report_hits,
            "stop" if ended else "length",
        )

    def _answer(self, job: Job, prompt: Sequence[int], choice: int) -> list[int]:
        if self._script is not None:
            return list(self._script(prompt, job.max_tokens))[: job.max_tokens]
        return self._babble(prompt, job.max_tokens, stop=job.stop, choice=choice)

    def _least_busy(self) -> Rank:
        """The engine's own balancing: a waiting request weighs as much as four running ones; ties take turns."""
        count = len(self._ranks)
        self._turn = (self._turn + 1) % count
        order = [self._ranks[(self._turn + offset) % count] for offset in range(count)]
        return min(order, key=lambda rank: 4 * rank.load[0] + rank.load[1])
