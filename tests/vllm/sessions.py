"""Conversations for the test with LiteLLM in front: each a generator that is sent the model's answer to its last call.

Together they use everything that shapes a prompt: shared system prompts, tools and their results, content parts, the
developer role, salts, template options, token ids, prompts that are exact multiples of the block size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from litellm_prefix_router.sim.words import prose

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
IDS_GROUP = "ids"
"""Model group for prompts of token ids: LiteLLM's hosted_vllm provider takes text alone."""

Body = dict[str, Any]
Session = Generator[tuple[str, Body], str, None]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather <tag> & 'quote' für 城市",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Zürich", "n": 1.50}'}}


@dataclass(frozen=True)
class Call:
    """One request of a session, and its place in the summary."""

    kind: str
    path: str
    body: Body


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def chat(opening: Sequence[Body], questions: Sequence[Any], **options: Any) -> Session:
    """Turn by turn, with the model's own answers sent again."""
    messages = list(opening)
    for question in questions:
        messages.append(user(question))
        answer = yield CHAT, {"messages": list(messages), **options}
        messages.append({"role": "assistant", "content": answer})


def with_tools(opening: Sequence[Body], questions: Sequence[str], **options: Any) -> Session:
    """Before each question a call of a tool and its result."""
    messages = list(opening)
    for number, question in enumerate(questions):
        if number:
            messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            messages.append({"role": "tool", "tool_call_id": "c1", "content": f'{{"temp": {number}}}'})
        messages.append(user(question))
        answer = yield CHAT, {"messages": list(messages), "tools": [WEATHER, CLOCK], **options}
        messages.append({"role": "assistant", "content": answer})


def continued(opening: Sequence[Body], question: str, starts: Sequence[str]) -> Session:
    """The model goes on with a message of its own."""
    for start in starts:
        messages = [*opening, user(question), {"role": "assistant", "content": start}]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        yield CHAT, {"messages": messages, **options}


def completions(prompts: Sequence[Any], **options: Any) -> Session:
    for prompt in prompts:
        yield COMPLETIONS, {"prompt": prompt, **options}


def grown(text: str, additions: Sequence[str]) -> Session:
    """A completion whose answer becomes the beginning of the next prompt."""
    for addition in additions:
        answer = yield COMPLETIONS, {"prompt": text}
        text += answer + addition


def responses(instructions: str, questions: Sequence[str]) -> Session:
    items: list[Body] = []
    for question in questions:
        items.append(user(question))
        answer = yield RESPONSES, {"instructions": instructions, "input": list(items)}
        items.append({"role": "assistant", "content": answer})


def anthropic(system: str, questions: Sequence[str]) -> Session:
    messages: list[Body] = []
    for question in questions:
        messages.append(user(question))
        answer = yield MESSAGES, {"system": system, "messages": list(messages)}
        messages.append({"role": "assistant", "content": answer})


def all_sessions(rng: Random, block_size: int) -> list[tuple[str, Session]]:
    """(kind, session): together about 260 requests, several times what fits into the caches of two small replicas."""
    systems = [{"role": "system", "content": prose(rng, words)} for words in (100, 180, 260)]

    def questions(count: int) -> list[str]:
        return [prose(rng, rng.choice((5, 15, 40))) for _ in range(count)]

    def parts(count: int) -> list[Any]:
        texts = [questions(2) for _ in range(count)]
        return [[{"type": "text", "text": one}, {"type": "text", "text": two}] for one, two in texts]

    sessions: list[tuple[str, Session]] = []
    for number in range(12):
        sessions.append(("multi-turn", chat([systems[number % 3]], questions(8))))
    for number in range(3):
        sessions.append(("tools", with_tools([systems[number % 2]], questions(5))))
    for _ in range(3):
        sessions.append(("content parts", chat([systems[0]], parts(5))))
    for _ in range(2):
        developer = {"role": "developer", "content": prose(rng, 120)}
        sessions.append(("developer", chat([developer], questions(5))))
    salted = questions(5)
    for salt in ("a", "b", "a", "c"):
        sessions.append((f"salt {salt}", chat([systems[1]], salted, cache_salt=salt)))
    for thinking in (True, False):
        options = {"chat_template_kwargs": {"enable_thinking": thinking}}
        sessions.append(("template options", chat([systems[2]], questions(4), **options)))
    odd = "How is the weather in Zürich? 你好 🙂 na\u0308ive <|im_start|>system\n\n  ü 1234 don't"
    sessions.append(("odd text", chat([systems[0]], [odd, "🙃 ok", " ", "<|im_end|>\n" + odd])))
    sessions.append(("continued", continued([systems[0]], questions(1)[0], ["Well, ", "Well, the ", "Well, the sea"])))
    ids = [rng.randrange(6000) for _ in range(20 * block_size)]
    for shift in range(3):
        lengths = [n * block_size + extra for n in (1, 2, 5, 9) for extra in (-1, 0, 0, 1)]
        prompts = [[shift, *ids[1:length]] for length in lengths]
        sessions.append(("token ids", completions(prompts, model=IDS_GROUP, max_tokens=(1, 2, block_size + 1)[shift])))
    text = prose(rng, 150)
    sessions.append(("text", completions([text, text, text + " More.", text + " More."])))
    sessions.append(("text, no special tokens", completions([text, text[:200], text], add_special_tokens=False)))
    sessions.append(("grown text", grown(prose(rng, 60), questions(5))))
    sessions.append(("responses", responses(prose(rng, 100), questions(5))))
    sessions.append(("anthropic messages", anthropic(prose(rng, 100), questions(5))))
    for _ in range(8):
        prompt = [rng.randrange(6000) for _ in range(rng.randrange(200, 900))]
        sessions.append(("one-off", completions([prompt], model=IDS_GROUP)))
    return sessions


class Interleaved:
    """The sessions' calls in random order, one at a time: iterate, and `answer` each call before the next."""

    def __init__(self, sessions: Sequence[tuple[str, Session]], rng: Random) -> None:
        self._rng = rng
        self._open = [(kind, session, next(session)) for kind, session in sessions]
        self._asked: tuple[str, Session] | None = None

    def __iter__(self) -> Iterator[Call]:
        while self._open:
            kind, session, (path, body) = self._open.pop(self._rng.randrange(len(self._open)))
            self._asked = (kind, session)
            yield Call(kind, path, body)

    def answer(self, text: str) -> None:
        assert self._asked is not None
        kind, session = self._asked
        try:
            self._open.append((kind, session, session.send(text)))
        except StopIteration:
            pass
