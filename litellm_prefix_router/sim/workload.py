"""Traffic as a multi-tenant chat service sees it, from a seed: who asks what, when, and after which answer.

Each tenant has a long system prompt that all its sessions share; sessions grow turn by turn; some prompts are asked
once and share nothing. Arrivals are open-loop (Poisson): they do not wait for a slow server, except that a session's
next turn needs the previous answer. Tenants and sessions are drawn with Zipf-like popularity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

from .words import prose, sentence

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of the schedule."""

    index: int
    """Position in the schedule, which is in order of `at_s`."""
    at_s: float
    """When it arrives, seconds from the start; a follow-up may have to wait longer, see `drive`."""
    tenant: int | None
    """None: a one-off prompt."""
    session: str
    turn: int
    """0 for a session's first request."""
    max_tokens: int
    system: str | None
    questions: tuple[str, ...]
    """The session's questions up to and including this one."""
    previous: int | None = None
    """Index of the session's previous request, whose answer this one continues."""
    think_s: float = 0.0
    """Time between the previous answer and this request, at least."""

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """Chat messages, given the texts of the session's answers so far. Raises ValueError for another number."""
        if len(answers) != self.turn:
            raise ValueError(f"turn {self.turn} of {self.session} continues {self.turn} answers, got {len(answers)}")
        out = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in zip(self.questions, answers, strict=False):
            out += ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        out.append({"role": "user", "content": self.questions[-1]})
        return out


@dataclass(slots=True)
class _Session:
    name: str
    tenant: int
    turns: int
    questions: list[str] = field(default_factory=list)
    last: TimedRequest | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """What the traffic is like. Ranges are inclusive and drawn from uniformly; lengths are in words, and a word is
    about one token of the simulated model."""

    seed: int = 0
    tenants: int = 8
    sessions: int = 32
    """Sessions open at a time; one that has had its turns is followed by a new one."""
    rate: float = 8.0
    """Requests per second, on average."""
    requests: int = 400
    one_off_share: float = 0.1
    """Share of the requests that have nothing in common with any other."""
    zipf: float = 0.9
    """Popularity of the k-th tenant (and session) is 1 / k to this power; 0: all alike."""
    system_words: tuple[int, int] = (500, 2000)
    question_words: tuple[int, int] = (15, 80)
    one_off_words: tuple[int, int] = (300, 1200)
    answer_tokens: tuple[int, int] = (16, 64)
    turns: tuple[int, int] = (3, 12)
    think_s: tuple[float, float] = (0.5, 2.0)
    min_gap_s: float = 2.0
    """A session is not asked again sooner after its last arrival, so that its answer is usually there."""

    def schedule(self) -> list[TimedRequest]:
        """All requests in order of arrival. The same for the same settings."""
        rng = Random(f"workload:{self.seed}")
        systems = [self._system(rng, tenant) for tenant in range(self.tenants)]
        opened = 0

        def open_session() -> _Session:
            nonlocal opened
            opened += 1
            return _Session(f"session-{opened}", self._popular(rng, self.tenants), rng.randint(*self.turns))

        sessions = [open_session() for _ in range(self.sessions)]
        schedule: list[TimedRequest] = []
        now = 0.0
        for index in range(self.requests):
            now += rng.expovariate(self.rate)
            if rng.random() < self.one_off_share:
                schedule.append(self._one_off(rng, index, now))
                continue
            place = self._popular(rng, self.sessions)
            for offset in range(self.sessions):
                last = sessions[(place + offset) % self.sessions].last
                if last is None or now - last.at_s >= self.min_gap_s:
                    place = (place + offset) % self.sessions
                    break
            else:  # all were asked just now: someone new comes
                sessions[place] = open_session()
            session = sessions[place]
            request = self._turn(rng, index, now, session, systems[session.tenant])
            schedule.append(request)
            session.last = request
            if len(session.questions) >= session.turns:
                sessions[place] = open_session()
        return schedule

    def _turn(self, rng: Random, index: int, now: float, session: _Session, system: str) -> TimedRequest:
        session.questions.append(self._question(rng))
        return TimedRequest(
            index=index,
            at_s=now,
            tenant=session.tenant,
            session=session.name,
            turn=len(session.questions) - 1,
            max_tokens=rng.randint(*self.answer_tokens),
            system=system,
            questions=tuple(session.questions),
            previous=None if session.last is None else session.last.index,
            think_s=0.0 if session.last is None else rng.uniform(*self.think_s),
        )

    def _one_off(self, rng: Random, index: int, now: float) -> TimedRequest:
        # Different from its first words on, so that not even one block is shared.
        text = f"{sentence(rng, 6)} {prose(rng, rng.randint(*self.one_off_words))}"
        return TimedRequest(
            index=index,
            at_s=now,
            tenant=None,
            session=f"one-off-{index}",
            turn=0,
            max_tokens=rng.randint(*self.answer_tokens),
            system=None,
            questions=(text,),
        )

    def _system(self, rng: Random, tenant: int) -> str:
        name = sentence(rng, 5).rstrip(".")
        return f"{name}. You are the assistant of tenant {tenant}. {prose(rng, rng.randint(*self.system_words))}"

    def _question(self, rng: Random) -> str:
        return prose(rng, rng.randint(*self.question_words))

    def _popular(self, rng: Random, count: int) -> int:
        """A number below `count`, small ones more often."""
        weights = list(accumulate(1.0 / (rank + 1) ** self.zipf for rank in range(count)))
        return rng.choices(range(count), cum_weights=weights)[0]


Send = Callable[[TimedRequest, list[Message]], Awaitable[str]]
"""Sends one request and returns the text of its answer; raises what it likes where that fails."""


async def drive(schedule: Sequence[TimedRequest], send: Send) -> list[BaseException | None]:
    """Send a schedule in real time: open-loop, but each turn after its session's previous answer and think time.

    Returns, for each request, what `send` raised or None. A session whose turn failed goes on with an empty answer,
    so that both sides of a comparison send the same number of requests.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    answers: dict[str, list[str]] = {}
    tasks: list[asyncio.Task[None]] = []

    async def one(request: TimedRequest) -> None:
        await asyncio.sleep(start + request.at_s - loop.time())
        if request.previous is not None:
            previous = tasks[request.previous]
            late = not previous.done()
            await asyncio.wait((previous,))
            if late:
                await asyncio.sleep(request.think_s)
        given = answers.setdefault(request.session, [])
        try:
            text = await send(request, request.messages(given))
        except BaseException:
            given.append("")
            raise
        given.append(text)

    for request in schedule:
        tasks.append(asyncio.create_task(one(request)))
    try:
        results: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    return [result if isinstance(result, BaseException) else None for result in results]
